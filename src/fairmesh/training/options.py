"""Options of a run: measurements, checkpoints, device, memory."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from fairmesh.config.ranges import Count, Natural, Positive, Within
from fairmesh.config.tables import Instead, checked, to_table
from fairmesh.errors import BadInput
from fairmesh.metrics.over_sites import LEVEL, WORST_NEEDS_ROWS
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.stacking import Precision

_SHORT = 'For gradients in half precision: precision = "bf16"; the models themselves stay in float32.'


@checked
@dataclass(frozen=True)
class Options:
    """How a run is measured and carried out.

    Only `dtype`, `precision` and `lying_neighbours` change what a run computes; `fuse`, `trace` and `threads` change
    rounding errors.

    Args:
        measure_every: Rounds between measurements, >= 1; the last round is always measured. Default: 50.
        checkpoint_every: Rounds between checkpoints, >= 1; None for a tenth of the run. Only with `out`. Default: None.
        device: "cpu", "cuda" or "cuda:1", ... Default: "cpu".
        threads: Threads of this process on the CPU while it trains, >= 1; None for as many as torch takes, which
            `OMP_NUM_THREADS` sets. Another number changes rounding errors. Default: None.
        dtype: "float32" or "float64". Default: "float32".
        precision: How gradients are computed. "float32" leaves torch's settings as they are; "tf32" multiplies in TF32
            on a GPU; "bf16" runs the model under torch's autocast with bfloat16. Models, messages and measurements
            keep the dtype. Default: "float32".
        own_models: Whether to measure each node's own model too, next to the network's average. Default: False.
        keep_best: Whether to keep the model of the best measured round by validation data. Between organisations this
            is done by default, also without validation data. Default: False.
        best_by: What makes a round the best: the metric at the "worst" site, its "mean" over sites, or a mean over the
            worst sites, "cvar" or "worst_share" as in `fm.metrics.over_sites`. With "last", only the last round counts,
            and nothing else is kept. Default: "worst".
        cvar_level: The share of the sites that "cvar" and "worst_share" are means over, in summaries, in the report and
            for `best_by`, in (0, 1]. Default: 0.2.
        worst_needs_rows: How many test rows a site needs to be the worst one in tables, reports and comparisons, >= 0;
            how many units, if rows belong to units. If no site has as many, all count. Default: 5.
        on_divergence: "stop" raises `Diverged`; "mark" lets the other replicas continue. Default: "stop".
        compare_weights: Whether to train once more with fixed weights, before the run, and to say afterwards at which
            sites the weights helped. Takes twice as long. With `choose_weights`, only where it hands out robust weights
            that differ from fixed ones. None for yes if the algorithm was left out. Default: None.
        choose_weights: Whether held-out rows decide if the model with robust weights or the one with fixed weights is
            handed out. Both are trained before the run without a fifth of the rows, fold by fold. By the same models
            each site gets the model that suits it, unless the run has another personalization. None for yes if the
            algorithm was left out and `compare_weights` is not False; a named algorithm returns its own model unless
            this is True. Default: None.
        lying_neighbours: How many neighbours of each node may send anything, >= 0. If > 0, gossip is clipped: a node
            moves towards the public copy of a neighbour by at most a radius that follows from its other neighbours.
            reproduction/clipping.md measures what this protects from, and what it costs unusual sites. Default: 0.
        count_bytes: Whether to count the exact bytes of every message as encoded. Default: True.
        memory_gib: Memory in GiB that the run may take, > 0; None for nine tenths of what is free. A run that needs
            more is refused before its first round. Default: None.
        trace: "auto" traces model and loss once on a CPU and replays the operations, if the replay agrees with the
            model itself (docs/results/performance.md); code that depends on Python state then sees it only once. "no"
            calls the model every time. Default: "auto".
        fuse: Whether to compile a round into few kernels on a GPU: "yes", "no", or "auto" for long runs. Default:
            "auto".

    Example:
        >>> import fairmesh as fm
        >>> fm.Options(measure_every=10, own_models=True).measure_every
        10
    """

    measure_every: Count = 50
    checkpoint_every: Count | None = None
    device: str = "cpu"
    threads: Count | None = None
    dtype: Annotated[Literal["float32", "float64"], Instead("bfloat16", _SHORT), Instead("float16", _SHORT)] = "float32"
    precision: Precision = "float32"
    own_models: bool = False
    keep_best: bool = False
    best_by: Literal["worst", "mean", "cvar", "worst_share", "last"] = "worst"
    cvar_level: Annotated[float, Within("(0, 1]", "0.2 is the worst fifth of the sites")] = LEVEL
    worst_needs_rows: Natural = WORST_NEEDS_ROWS
    on_divergence: Literal["stop", "mark"] = "stop"
    compare_weights: bool | None = None
    choose_weights: bool | None = None
    lying_neighbours: Natural = 0
    count_bytes: bool = True
    memory_gib: Positive | None = None
    trace: Literal["auto", "no"] = "auto"
    fuse: Literal["auto", "yes", "no"] = "auto"

    def __post_init__(self):
        if self.keep_best and self.best_by == "last":
            raise BadInput('keep_best keeps another round than the last, but best_by = "last"; remove one of them')
        if self.precision != "float32" and self.dtype != "float32":
            raise BadInput(f"precision = {self.precision!r} shortens float32, but dtype is {self.dtype!r}; remove one")
        if self.precision == "tf32" and self.device.startswith("cpu"):
            raise BadInput("precision = 'tf32' is for GPUs, but device is 'cpu'; use device = 'cuda', or remove it")

    def identity(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, without those that may change during a run."""
        not_part = _NOT_PART if self.keep_best else (*_NOT_PART, "measure_every", "best_by")
        if not (self.keep_best and self.best_by in ("cvar", "worst_share")):
            not_part = (*not_part, "cvar_level")
        return {name: value for name, value in to_table(self, defaults=False).items() if name not in not_part}


# Options that are no part of a run's identity, since they change no model, or only by rounding errors. All others are.
_NOT_PART = (
    *("checkpoint_every", "own_models", "worst_needs_rows", "on_divergence", "compare_weights"),
    "choose_weights",
    *("count_bytes", "device", "threads", "trace", "fuse", "memory_gib"),
)
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@contextmanager
def with_threads(options: Options) -> Iterator[None]:
    """Sets the number of threads of this process meanwhile, if the options give one."""
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def device_of(name: str) -> torch.device:
    """Returns the device. Refuses one that is not available."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise BadInput(f"unknown device {name!r}: use 'cpu' or 'cuda'")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadInput("no CUDA device is available; use device = 'cpu', or install a CUDA build of torch")
    return device


def home_of_data(problem: Prepared, device: torch.device) -> torch.device:
    """Returns the device of the training data: the device itself if the data takes less than half of its free memory,
    else the CPU."""
    if device.type == "cpu":
        return device
    if any(samples.stream for samples in problem.train_sets):
        return torch.device("cpu")
    size = sum(samples.nbytes for samples in problem.train_sets)
    free, _ = torch.cuda.mem_get_info(device)
    return device if size < free // 2 else torch.device("cpu")
