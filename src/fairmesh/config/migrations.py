"""Keys and names of experiment files that have changed, and how to rewrite files that use the old ones."""

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from fairmesh.config.registry import IMPORT

KEYS = {  # old key -> new key, inside [algorithm] and [sweep]
    "rate": "consensus_step",
    "scaling": "beta2",
    "weighing": "weighting",
    "vantage": "gradient_at_average",
    "ease": "strength_annealing",
    "momentum": "beta1",
    "fresh": "loss_ema",
}
COMPLEMENTS = {"momentum", "fresh"}  # the new value is 1 minus the old one
NAMES = {  # old -> new name of a weighting
    "price": "shadow-price",
    "maximum": "exact-maximum",
    "ascent": "projected-ascent",
    "fixed": "prior-weights",
}


def migrated(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an experiment's table with every old key and name replaced by its present one."""
    new, algorithm = dict(table), table.get("algorithm")
    if isinstance(algorithm, Mapping) and algorithm.get("name") == IMPORT:
        return new  # a class of the user's own, whose fields were never renamed
    for section in ("algorithm", "sweep"):
        if isinstance(new.get(section), Mapping):
            new[section] = migrated_section(new[section])
    return new


def migrated_section(value: Any) -> Any:
    """Returns the tables and lists of an [algorithm] or [sweep] section with present keys and names."""
    if isinstance(value, list):
        return [migrated_section(item) for item in value]
    if not isinstance(value, Mapping) or value.get("name") == IMPORT:
        return value
    new: dict[str, Any] = {}
    for key, item in value.items():
        *parents, leaf = key.split(".")  # [sweep] may have dotted keys
        if leaf == "weighing":
            item = _renamed_member(item)
        item = _complement(item) if leaf in COMPLEMENTS else migrated_section(item)
        new[".".join(KEYS.get(part, part) for part in (*parents, leaf))] = item
    return new


def _renamed_member(value: Any) -> Any:
    if isinstance(value, str):
        return NAMES.get(value, value)
    if isinstance(value, Mapping) and "name" in value:
        return {**value, "name": NAMES.get(value["name"], value["name"])}
    return value


def _complement(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_complement(item) for item in value]
    return round(1.0 - value, 12) if isinstance(value, int | float) else value


def migrated_text(text: str) -> tuple[str, bool]:
    """Rewrites the text of an experiment file.

    Returns:
        The new text, and whether its comments and layout were kept. They are lost only where the file is written in
        a way that this function cannot edit in place."""
    table = tomllib.loads(text)
    wanted = migrated(table)
    if wanted == table:
        return text, True
    edited = _edited(text)
    try:
        kept = tomllib.loads(edited) == wanted
    except tomllib.TOMLDecodeError:
        kept = False
    if kept:
        return edited, True
    import tomli_w

    return tomli_w.dumps(wanted), False


_NUMBERS = r"[-+\d.eE_]+|\[[^\]]*\]"


def _edited(text: str) -> str:
    """Returns the text with old keys replaced where they are a key, a part of a dotted key, or in a table's header."""
    for old in COMPLEMENTS:
        text = re.sub(rf"(?<![\w-]){old}(\"?\s*=\s*)({_NUMBERS})", _with_complement, text)
    for old, new in KEYS.items():
        text = re.sub(rf"(?<![\w-]){old}(?=[\w.\"-]*\s*=)(?![\w-])", new, text)
        text = re.sub(rf"(?m)^(\s*\[[^\]\n]*?)(?<![\w-]){old}(?![\w-])", rf"\g<1>{new}", text)
    for old, new in NAMES.items():
        text = re.sub(rf"(weighting\s*=\s*(?:\{{[^}}]*?name\s*=\s*)?[\"']){old}(?=[\"'])", rf"\g<1>{new}", text)
        text = re.sub(
            rf"(\[algorithm\.weighting\][^\[]*?name\s*=\s*[\"']){old}(?=[\"'])", rf"\g<1>{new}", text, flags=re.DOTALL
        )
    return text


def _with_complement(match: re.Match) -> str:
    def flip(number: re.Match) -> str:
        return repr(round(1.0 - float(number[0]), 12))

    old = match[0][: match[0].index("=")].strip().strip('"')
    return KEYS[old] + match[1] + re.sub(r"[-+]?\d[\d._eE+-]*", flip, match[2])
