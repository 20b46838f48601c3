"""Trained models out and in use: read from a run's folder, exported to files that need no fairmesh, and applied."""
