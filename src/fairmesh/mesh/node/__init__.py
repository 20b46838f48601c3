"""The node of one site of a mesh, which runs unattended: `fairmesh node`."""
