"""One page about a run, live: what is shown, where it is read, and the server that shows it. `fairmesh watch`."""
