"""Outcomes as a file, and those of several processes as one."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from fairmesh.config.tables import from_table, to_table
from fairmesh.errors import BadInput
from fairmesh.evidence.outcomes import Answers, Outcomes
from fairmesh.metrics.base import NamedMetric

_FORMAT = 2
_TENSORS = ("losses", "right", "outputs", "targets", "rows", "units")  # of Answers


def joined(parts: Sequence[Outcomes]) -> Outcomes:
    """Returns the outcomes of several processes as one. Each site is judged by the first process that has its rows.

    Args:
        parts: What each process found for the sites that it has.
    """
    first, answers, of_sites = parts[0], [], []
    places: dict[tuple[str, bytes], int] = {}  # sites that share rows and model share answers, also across processes
    for k in range(len(first.of_sites)):
        numbers = []
        for i in range(len(first.sites)):
            p = next((p for p, part in enumerate(parts) if part.of_sites[k][i] >= 0), None)
            if p is None:
                numbers.append(-1)
                continue
            found = parts[p].answers[parts[p].of_sites[k][i]]
            key = found.digest, found.losses.numpy().tobytes()
            if key not in places:
                places[key] = len(answers)
                answers.append(found)
            numbers.append(places[key])
        of_sites.append(tuple(numbers))
    return replace(first, answers=tuple(answers), of_sites=tuple(of_sites))


def packed(outcomes: Mapping[str, Outcomes]) -> bytes:
    """Returns outcomes as the content of a safetensors file.

    Args:
        outcomes: The outcomes by name, such as that of the model ("final") and the number of the sweep's variant.
    """
    tensors, tables = {}, {}
    for name, one in outcomes.items():
        for k, answers in enumerate(one.answers):
            for what in _TENSORS:
                if (tensor := getattr(answers, what)) is not None:
                    tensors[f"{name}/{k}/{what}"] = tensor.contiguous().clone()
        plain = [of.name for of in fields(one) if of.name not in ("answers", "functions", "guessed_overlaps")]
        tables[name] = {key: getattr(one, key) for key in plain} | {
            "guessed_overlaps": list(one.guessed_overlaps.items()),
            "digests": [answers.digest for answers in one.answers],
            "metrics": {key: to_table(f) for key, f in one.functions.items() if isinstance(f, NamedMetric)},
        }
    # one key, since safetensors writes several in no fixed order, and equal outcomes must be equal files
    return save(tensors, {"outcomes": json.dumps({"format": _FORMAT, "tables": tables})})


def read_outcomes(path: str | os.PathLike) -> dict[str, Outcomes]:
    """Returns the outcomes in a file, by name.

    Args:
        path: The path of the file.

    Raises:
        BadInput: The file does not exist or is no file of outcomes.
    """
    try:
        return unpacked(Path(path).read_bytes())
    except FileNotFoundError:
        raise BadInput(f"{path} does not exist") from None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path}: {error}") from error


def unpacked(content: bytes) -> dict[str, Outcomes]:
    """Returns the outcomes in the content of a file, by name.

    Args:
        content: What `packed` returned.
    """
    length = int.from_bytes(content[:8], "little")
    about = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["outcomes"])
    if about.get("format") != _FORMAT:
        had = f"outcomes of format {about.get('format')}, but this version of fairmesh reads {_FORMAT}"
        raise BadInput(f"{had}; compare with the version that wrote them, or run the experiment again")
    tensors, found = load(content), {}
    for name, table in about["tables"].items():
        answers = []
        for k, digest in enumerate(table.pop("digests")):
            keys = {what: f"{name}/{k}/{what}" for what in _TENSORS}
            answers.append(Answers(digest, **{what: tensors[key] for what, key in keys.items() if key in tensors}))
        metrics = {key: from_table(NamedMetric, one, key) for key, one in table.pop("metrics").items()}
        guessed = dict(table.pop("guessed_overlaps"))
        plain = {key: _frozen(value) for key, value in table.items()}
        found[name] = Outcomes(answers=tuple(answers), functions=metrics, guessed_overlaps=guessed, **plain)
    return found


def _frozen(value: Any) -> Any:
    """Returns lists as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
