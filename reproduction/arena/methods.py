"""The methods of the arena, each with its defaults and, if there is something to tune, with six candidates."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fairmesh.algorithms import ADGDA, QFFL, TERM, Algorithm, ChocoSGD, FedAvg, Local, Pooled, TrackedADGDA
from fairmesh.algorithms.schedules import Limited, Measured
from fairmesh.algorithms.weighting import PriorWeights
from fairmesh.compression.compressors import Quantize
from fairmesh.personalization import Mixture
from fairmesh.regularizers.builtin import ChiSquare
from fairmesh.training.defaults import DEFAULT_ALGORITHM, default_objective
from reproduction.sites.methods import METHODS as BENCH
from reproduction.sites.methods import Method, tracked

RESEARCH = Path(__file__).parents[2] / "examples" / "research"
RIVALS = {"FGDRO-KL": "fgdro_kl", "D-AdaST": "d_adast", "AAggFF": "aaggff"}  # files of examples/research
_STEPS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)


def _rival(name: str) -> Method | None:
    """Returns the method of an example: its algorithm with the defaults of its class, and its candidates. None if the
    example is not there."""
    path = RESEARCH / f"{RIVALS[name]}.py"
    if not path.is_file():
        return None
    candidates: tuple[Algorithm, ...] = _module_at(path).CANDIDATES
    algorithm = type(candidates[0])()
    local_steps = getattr(algorithm, "local_steps", 1)
    return Method(name, algorithm, candidates, topology=None, steps_per_round=local_steps, robust=True)


def _module_at(path: Path) -> Any:
    """Returns the module in a file. It is loaded once, so that its classes are the same everywhere."""
    name = f"reproduction_arena_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be loaded")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _server(algorithm: Any, name: str = "", strengths: tuple[float, ...] = ()) -> tuple[Algorithm, ...]:
    """Returns six candidates of an algorithm with a server: six steps, or three for each of two strengths."""
    if not name:
        return tuple(replace(algorithm, primal_step=Limited(0.7 * factor, power=3.0)) for factor in _STEPS)
    return tuple(
        replace(algorithm, primal_step=Limited(0.7 * factor, power=3.0), **{name: strength})
        for strength in strengths
        for factor in (0.5, 1.0, 2.0)
    )


_FEDAVG, _QFFL, _TERM = FedAvg(), QFFL(), TERM()
_POOLED, _CHOCO = Pooled(), ChocoSGD()
_FIXED = TrackedADGDA(weighting=PriorWeights())
_ADGDA = ADGDA(compressor=Quantize(bits=4))

_LIST = (
    Method("Constant", None),
    Method("Local", Local(), topology=None, own_models=True, regularised=True),
    Method(
        "Pooled",
        _POOLED,
        tuple(replace(_POOLED, primal_step=replace(_POOLED.primal_step, start=0.7 * factor)) for factor in _STEPS),  # type: ignore[arg-type]
        topology=None,
    ),
    Method("FedAvg", _FEDAVG, _server(_FEDAVG), topology=None, steps_per_round=_FEDAVG.local_steps),
    Method(
        "q-FFL", _QFFL, _server(_QFFL, "q", (0.2, 2.0)), topology=None, steps_per_round=_QFFL.local_steps, robust=True
    ),
    Method(
        "TERM", _TERM, _server(_TERM, "tilt", (0.5, 3.0)), topology=None, steps_per_round=_TERM.local_steps, robust=True
    ),
    Method(
        "CHOCO-SGD",
        _CHOCO,
        tuple(replace(_CHOCO, primal_step=Measured(factor=factor)) for factor in _STEPS),
        topology=None,
    ),
    Method(
        "AD-GDA",
        _ADGDA,
        tuple(
            replace(_ADGDA, primal_step=Measured(factor=4.0 * factor), regularizer=ChiSquare(strength))
            for strength in (0.001, 0.01)
            for factor in (0.5, 1.0, 2.0)
        ),
        topology=None,
        robust=True,
    ),
    Method("Tracked AD-GDA", TrackedADGDA(), tracked(TrackedADGDA()), topology=None, robust=True),
    *(method for name in RIVALS if (method := _rival(name)) is not None),
    replace(BENCH["Fixed"], topology=None),
    Method("Mixture", _FIXED, topology=None, personalization=Mixture()),
    Method(
        "Default",
        DEFAULT_ALGORITHM,
        topology=None,
        objective=default_objective(),
        as_by_default=True,
        records=("personal", "common", "local"),
        robust=True,
    ),
)

METHODS = {method.name: method for method in _LIST}
ALONE, FIXED, MIXTURE, DEFAULT, SITES_MODEL = "Local", "Fixed", "Mixture", "Default", "Site's model"
CANDIDATES = 6
