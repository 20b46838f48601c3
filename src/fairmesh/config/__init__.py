"""Experiment files and configured objects: tables to objects and back, overrides, import paths."""
