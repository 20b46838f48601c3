"""Training rows behind a seal: the rest of the program has their number of units and their form, and no values."""

import re
from collections.abc import Iterable
from dataclasses import replace

from fairmesh.data.samples import Samples
from fairmesh.data.units import units_of


class SealedRows:
    """Holds the rows of one site. Only the mechanism that clips and noises what it computes of them opens it.

    Args:
        samples: The rows.
        fingerprint: A digest of them, by which a run is continued with the same rows only.
        outputs: How many outputs a model for them has.
        unit: What the site calls a unit of several rows. Default: "unit".
    """

    def __init__(self, samples: Samples, fingerprint: str, outputs: int, unit: str = "unit"):
        self._samples, self.fingerprint, self.outputs = samples, fingerprint, outputs
        self.unit = "row" if samples.units is None else noun_of(unit)

    def opened(self) -> Samples:
        """Returns the rows."""
        return self._samples

    def size(self) -> tuple[int, int]:
        """Returns the number of rows and their bytes, which an estimate of memory needs and nobody else is told."""
        return len(self._samples), self._samples.nbytes


def noun_of(unit: str) -> str:
    """Returns what a unit is called, from what its column is called: "patient" of "Patient_ID". It is never "row", as
    where there are no units."""
    noun = (re.sub(r"[_ -]?id$", "", unit.strip(), flags=re.IGNORECASE) or unit).lower()
    return "unit" if noun == "row" else noun


def unit_of(samples: Samples) -> str:
    """Returns what is protected of samples: "row", or what they call a unit of several rows."""
    if samples.sealed is not None:
        return samples.sealed.unit
    return "row" if samples.units is None else "unit"


def rows_of_units(sets: Iterable[Samples], most: int) -> int:
    """Returns how many rows of each unit a private round computes, repeated ones included: as many as are looked at of
    a unit, or one where every row is a unit. It does not depend on how many rows any unit has, since what is computed
    for the others would tell of that one."""
    return most if any(unit_of(samples) != "row" for samples in sets) else 1


def sealed(samples: Samples, fingerprint: str, outputs: int, unit: str = "unit") -> Samples:
    """Returns samples without values, one per unit, which hold the given ones behind a seal. Whatever reads inputs,
    targets, units or subgroups of them finds nothing, and fails."""
    if samples.sealed is not None or not samples.here:
        return samples
    rows = SealedRows(samples, fingerprint, outputs, unit)
    return replace(Samples.elsewhere(units_of(samples), samples), sealed=rows)
