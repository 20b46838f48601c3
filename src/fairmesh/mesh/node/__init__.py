"""One site of a mesh, run unattended: `fairmesh node`."""
