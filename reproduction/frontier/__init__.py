"""Experiments beyond the paper: what each ingredient of Tracked AD-GDA contributes, its best results, its cost."""
