"""Measurements of fairmesh itself."""
