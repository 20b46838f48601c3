"""A program for each engine: `python -m benchmarks.engines.runners.NAME FOLDER ROUNDS` writes FOLDER/outcome.json."""
