"""Which settings of an experiment let neighbours read training rows from messages, and a site's consent to them.

A message, less what gossip adds, is the gradient of one batch at a model that the neighbours know
(docs/results/security.md has what was read from it). The rules look at the experiment's table alone, so that they are
the same before and after anything is imported."""

from collections.abc import Mapping
from typing import Any, TypeGuard

from fairmesh.algorithms import Algorithm
from fairmesh.compression.compressors import FLOAT_BITS, Compressor, Identity
from fairmesh.config.tables import from_table
from fairmesh.config.trusted import import_paths
from fairmesh.errors import BadInput
from fairmesh.mesh.enrol.manifest import Handout
from fairmesh.mesh.enrol.roster import SiteFile
from fairmesh.problems.batches import Sampling
from fairmesh.problems.objective import Objective
from fairmesh.training.defaults import Default, default_for

ALLOW = "allow_revealing = true"
LEAST_ROWS = 32  # of a batch
MOST_BITS = 2.0  # per parameter, of all that a message says about the gradient of one batch
MOST_BITS_OF_UPDATES = 8.0  # of what a training function makes of a whole round
_ENOUGH = 'compressor = { name = "sign", block = 64 }'
_ENOUGH_FOR_UPDATES = 'compressor = { name = "quantize", bits = 4, block = 256 }'


_LARGE = 10**6  # parameters of the model that bits are counted for


def revealing(table: Mapping[str, Any]) -> list[str]:
    """Returns why messages of an experiment would show training rows to neighbours, with what to do; nothing if they
    would not, as far as was measured."""
    algorithm = algorithm_of(table)
    if algorithm and (algorithm.needs_server or not algorithm.sends):
        return []  # refused by every node
    return list(filter(None, (_by_bits(table), _by_batch(table))))


def refuse_revealing(site: SiteFile, handout: Handout) -> None:
    """Refuses messages that would show training rows to neighbours, unless the site's own file allows them."""
    reasons = revealing(handout.table)
    if reasons and not site.allow_revealing:
        raise BadInput(
            f"neighbours could read training rows of this site: {'; '.join(reasons)}. Agree on other settings with the "
            f"mesh's founder; or, if this site accepts it, write {ALLOW} at the beginning of {site.path}. What was "
            'read: "Security of a mesh", in the documentation'
        )


def commented(table: Mapping[str, Any]) -> str:
    """Returns lines for the beginning of a new site file, with which its operator can allow an experiment."""
    reasons = revealing(table)
    return f"# Neighbours could read training rows: {'; '.join(reasons)}.\n# {ALLOW}\n\n" if reasons else ""


def _by_bits(table: Mapping[str, Any]) -> str:
    bits = bits_per_parameter(table)
    updates = "trainer" in table
    most, enough = (MOST_BITS_OF_UPDATES, _ENOUGH_FOR_UPDATES) if updates else (MOST_BITS, _ENOUGH)
    shown = "what the training function makes of a round" if updates else "the gradient of one batch"
    if bits is None:
        return f"only the experiment's own code knows how exactly messages show {shown}"
    if bits <= most:
        return ""
    exact = "uncompressed" if bits >= FLOAT_BITS else f"with {bits:g} bits per parameter, more than {most:g}"
    sender = _sender(table)
    can_compress = sender and sender.gossip_settings()
    advice = f"set {enough} in [algorithm]" if can_compress else "leave [algorithm] out, or name one that compresses"
    return f"every message shows {shown}, {exact} ({advice})"


def _by_batch(table: Mapping[str, Any]) -> str:
    try:
        sampling = from_table(Sampling, table.get("sampling", {}), "sampling")
    except BadInput:
        return ""  # refused where the experiment is read
    rows = sampling.batch * sampling.batches_per_step
    if "trainer" in table or sampling.order == "full" or rows >= LEAST_ROWS:
        return ""
    return f"a batch has {rows} rows, fewer than {LEAST_ROWS} (set batch = {LEAST_ROWS} or more in [sampling])"


def _sender(table: Mapping[str, Any]) -> Algorithm | None:
    """Returns the algorithm, also if own code decides something that says nothing about gradients, as its weighting."""
    section = table.get("algorithm")
    if isinstance(section, Mapping):
        section = {key: value for key, value in section.items() if key == "compressor" or not import_paths(value)}
        table = {**table, "algorithm": section}
    return algorithm_of(table)


def bits_per_parameter(table: Mapping[str, Any]) -> float | None:
    """Returns the bits per model parameter of what a message in a round says about gradients, without norms and heads;
    None if only the experiment's own code knows."""
    algorithm, options = _sender(table), table.get("options")
    parts = algorithm and algorithm.message()
    if not parts:
        return None
    in_doubles = isinstance(options, Mapping) and options.get("dtype") == "float64"
    as_they_are = 2 * FLOAT_BITS if in_doubles else FLOAT_BITS
    vectors = [part.compressor for part in parts if part.content == "vectors"]
    return sum(c.nominal_bits(_LARGE) / _LARGE if compresses(c) else as_they_are for c in vectors)


def compresses(compressor: Compressor | None) -> TypeGuard[Compressor]:
    """Returns whether something is sent as anything but its numbers as they are."""
    return compressor is not None and not isinstance(compressor, Identity)


def algorithm_of(table: Mapping[str, Any]) -> Algorithm | None:
    """Returns the algorithm of an experiment, or None if only the experiment's own code knows it."""
    section = table.get("algorithm")
    if import_paths(section):
        return None
    try:
        if section is not None:
            return from_table(Algorithm, section, "algorithm")
        return default_of(table).algorithm
    except BadInput:
        return None


def default_of(table: Mapping[str, Any]) -> Default:
    """Returns what an experiment uses if it names no algorithm.

    Raises:
        BadInput: Its objective cannot be read.
    """
    objective = from_table(Objective, table.get("objective", {}), "objective")
    return default_for(objective, "trainer" in table)
