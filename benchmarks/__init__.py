"""Measurements of fairmesh's own speed and message sizes; `python -m benchmarks --help` lists them."""
