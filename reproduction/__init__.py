"""Runs the paper's tables, figures and theorems again and compares them with the printed numbers."""
