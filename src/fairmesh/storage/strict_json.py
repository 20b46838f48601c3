"""Strict JSON: numbers that are not finite are written as null."""

import json
import math
from typing import Any


def as_json(value: Any, **style: Any) -> str:
    """Returns strict JSON. Numbers that are not finite, as in a diverged replica, become null."""

    def strict(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: strict(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [strict(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(strict(value), allow_nan=False, **style)


def with_nan(value: Any) -> Any:
    """Returns parsed output of `as_json`, with null replaced by NaN."""
    if isinstance(value, dict):
        return {key: with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_nan(item) for item in value]
    return math.nan if value is None else value
