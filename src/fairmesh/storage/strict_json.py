"""Strict JSON: numbers that are not finite are written as null."""

import json
import math
from collections.abc import Callable
from typing import Any


def as_json(value: Any, **style: Any) -> str:
    """Returns strict JSON. Numbers that are not finite, as in a diverged replica, become null."""
    return json.dumps(
        _changed(value, lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf),
        allow_nan=False,
        **style,
    )


def with_nan(value: Any) -> Any:
    """Returns parsed output of `as_json`, with null replaced by NaN."""
    return _changed(value, lambda leaf: math.nan if leaf is None else leaf)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _changed(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(inner, change) for inner in value]
    return change(value)
