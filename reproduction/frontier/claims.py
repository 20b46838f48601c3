"""The claims of reproduction/frontier.md, each with the recorded number."""

import itertools
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduction.frontier.recipes import CHOSEN, CIFAR, FASHION, JUDGED
from reproduction.lines import Line, lines_of
from reproduction.verdicts import DEGREE

LEVELS = {FASHION: 53.5, CIFAR: 39.06}  # percent: the published AD-GDA's worst node with 4 bits; its worst contrast
WORST = {FASHION: "worst", CIFAR: "worst_group"}
WITHIN = 3.0  # points
_ENOUGH, _MOONSHOT = 1300, 700  # bits per parameter and edge; the published run counts 20,000


def lines_by_row(results: Path, recipe: str) -> dict[str, Line]:
    """Returns a recipe's recorded lines by the names of their rows."""
    return {line["row"]: line for line in lines_of(results, recipe)}


def bytes_to(line: Line, level: float, worst: str) -> float | None:
    """Returns the bytes that the busiest node had sent when the worst accuracy first reached a level, in percent.

    The accuracy is averaged over placements. Returns None if it never reached the level."""
    curve = line["curve"]
    return next((sent for w, sent in zip(curve[worst], curve["bytes_busiest_node"]) if w >= level), None)


def bits_a_parameter(line: Line, sent: float) -> float:
    """Returns the bytes of the busiest node as bits per parameter and edge."""
    return 8 * sent / (DEGREE * line["parameters"])


def claims(results: Path) -> list[dict[str, Any]]:
    """Returns every claim with its recorded number; None and False where it was not run."""
    best = lines_by_row(results, "frontier_best")
    return [
        *_accuracy(best, FASHION, "uncompressed, long", 70.0, "worst-node accuracy, uncompressed"),
        *_accuracy(best, FASHION, "compressed, long", 66.0, "worst-node accuracy, compressed"),
        *_bits(best, FASHION, "worst-node"),
        *_accuracy(best, CIFAR, "compressed, long", 55.0, "worst-contrast accuracy, compressed"),
        *_bits(best, CIFAR, "worst-contrast"),
        *_defaults(lines_by_row(results, "frontier_defaults")),
        _no_code_of_its_own(),
    ]


def _claim(claim: str, measured: float | None, required: float, at_most: bool) -> dict[str, Any]:
    holds = measured is not None and (measured <= required if at_most else measured >= required)
    return {"claim": claim, "measured": measured, "required": required, "holds": holds}


def in_words(claim: dict[str, Any]) -> list[str]:
    """Returns a claim, its measured and its required number as cells of a table."""
    numbers = ("not run" if claim[name] is None else f"{claim[name]:g}" for name in ("measured", "required"))
    return [claim["claim"].replace("bits a parameter", "bits per parameter"), *numbers]


def _accuracy(best: dict[str, Line], setup: str, row: str, required: float, what: str) -> list[dict[str, Any]]:
    line = best.get(f"{setup}: {row}")
    measured = None if line is None or line["diverged"] else round(fmean(line["final"][WORST[setup]]), 2)
    return [_claim(f"{setup}: {what}, percent, at least", measured, required, at_most=False)]


def _bits(best: dict[str, Line], setup: str, which: str) -> list[dict[str, Any]]:
    line = best.get(f"{setup}: compressed, short")
    sent = None if line is None or line["diverged"] else bytes_to(line, LEVELS[setup], WORST[setup])
    bits = None if line is None or sent is None else round(bits_a_parameter(line, sent))
    # The JSON keeps the claim's first wording, by which results are found.
    text = f"{setup}: bits a parameter and edge until {which} accuracy is {LEVELS[setup]} %, at most"
    return [
        _claim(text, bits, _ENOUGH, at_most=True),
        _claim(f"{text} (moonshot)", bits, _MOONSHOT, at_most=True),
    ]


def _defaults(lines: dict[str, Line]) -> list[dict[str, Any]]:
    made = []
    for name in JUDGED:
        default, tuned = (lines.get(f"{name}: {kind}") for kind in ("default", "tuned"))
        diverged = None if default is None else len(default["diverged"])
        behind = None
        if default is not None and tuned is not None and not default["diverged"]:
            worst = [fmean(line["final"]["worst_group"]) for line in (default, tuned)]
            behind = round(worst[1] - worst[0], 2)
        made.append(_claim(f"{name}: placements of five that diverge with defaults, at most", diverged, 0, True))
        made.append(_claim(f"{name}: points by which defaults are worse than tuned, at most", behind, WITHIN, True))
    return made


def _no_code_of_its_own() -> dict[str, Any]:
    """Checks the source of the networks. That the runs agree is shown by tests/cluster and tests/mesh."""
    import fairmesh.networks

    files = Path(fairmesh.networks.__path__[0]).rglob("*.py")
    naming = [path.name for path in files if re.search("tracked|weighting", path.read_text(), re.IGNORECASE)]
    return _claim("files of networks/ that name Tracked AD-GDA, at most", len(naming), 0, at_most=True)


def chosen_defaults(results: Path) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Returns the chosen candidate and all candidates with their lags, the least first.

    A candidate's lag on a problem is the number of points by which its worst group is behind that of the best candidate
    there. The chosen candidate has the least lag on average over problems."""
    lags: list[dict[tuple[float, ...], float]] = []
    for line in lines_by_row(results, "frontier_choice").values():
        tried = {tuple(one[name] for name in CHOSEN): one["worst"] for one in line["search"]["tried"]}
        lags.append({numbers: round(100 * (max(tried.values()) - worst), 2) for numbers, worst in tried.items()})
    candidates: list[dict[str, Any]] = [
        dict(zip(CHOSEN, numbers)) | {"behind": [lag[numbers] for lag in lags]}
        for numbers in itertools.product(*CHOSEN.values())
    ]
    candidates.sort(key=lambda one: sum(one["behind"]))
    return {name: candidates[0][name] for name in CHOSEN}, candidates
