"""[topology] Who talks to whom: graphs and their mixing matrices. Public as `fm.topologies`."""
