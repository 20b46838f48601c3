"""Past the paper: what each ingredient of Tracked AD-GDA is worth, how far it goes, and what it costs."""
