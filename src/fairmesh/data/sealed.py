"""Training rows behind a seal: the rest of the program has their number of units and their form, and no values."""

from dataclasses import replace

from fairmesh.data.samples import Samples
from fairmesh.data.units import units_of


class SealedRows:
    """Holds the rows of one site. Only the mechanism that clips and noises what it computes of them opens it.

    Args:
        samples: The rows.
        fingerprint: A digest of them, by which a run is continued with the same rows only.
        outputs: How many outputs a model for them has.
    """

    def __init__(self, samples: Samples, fingerprint: str, outputs: int):
        self._samples, self.fingerprint, self.outputs = samples, fingerprint, outputs
        self.unit = "row" if samples.units is None else "unit"

    def opened(self) -> Samples:
        """Returns the rows."""
        return self._samples


def sealed(samples: Samples, fingerprint: str, outputs: int) -> Samples:
    """Returns samples without values, one per unit, which hold the given ones behind a seal. Whatever reads inputs,
    targets, units or subgroups of them finds nothing, and fails."""
    if samples.sealed is not None or not samples.here:
        return samples
    return replace(Samples.elsewhere(units_of(samples), samples), sealed=SealedRows(samples, fingerprint, outputs))
