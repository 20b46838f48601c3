"""Differential privacy per unit, such as a patient: settings, accounting, and noise that nobody can predict."""

from fairmesh.privacy.settings import Privacy

__all__ = ["Privacy"]
