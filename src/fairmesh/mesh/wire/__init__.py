"""How messages and announcements travel between the nodes of a mesh."""
