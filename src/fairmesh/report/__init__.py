"""Runs as people look at them: tables, plots, pages."""
