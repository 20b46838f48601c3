"""How nodes reach each other: all in one process, over a cluster, or between organisations."""
