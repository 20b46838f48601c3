"""fairmesh inside NVFlare: the nodes of a mesh are the client processes of a job, whose calls carry their messages."""
