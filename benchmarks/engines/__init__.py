"""One job on several engines: fairmesh's, NVFlare's, Flower's and a plain loop. `table.py` runs and measures them."""

NODES = 10
