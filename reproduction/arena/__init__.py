"""The arena: published and own methods on the bench of site problems and on natural sites (reproduction/arena.md)."""
