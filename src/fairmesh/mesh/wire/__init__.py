"""Nodes at different organisations: who is in the mesh, who is who, and how messages reach neighbours."""
