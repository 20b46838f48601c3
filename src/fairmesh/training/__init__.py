"""[options] A run from its first round to its result."""
