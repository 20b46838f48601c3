"""A bench of site problems: what robust weights gain at the worst site, on problems of known kinds of difference."""
