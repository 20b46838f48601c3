"""Second models next to the first: references, the same run with fixed weights, a site left out."""
