"""[data] What each site holds."""
