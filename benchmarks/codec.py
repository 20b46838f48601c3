"""`python -m benchmarks codec`: compares encoded training messages with their entropy and with the paper's count."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairmesh import compression
from fairmesh.algorithms import ADGDA
from fairmesh.algorithms.schedules import Geometric
from fairmesh.compression.codes import Code, Levels, Sparse
from fairmesh.compression.compressors import (
    Compressor,
    Identity,
    Quantize,
    Sign,
    TopK,
    TopKQuantize,
)
from fairmesh.data.datasets import Data, Digits, FashionMNIST
from fairmesh.data.datasets.sources import SOURCES, found
from fairmesh.errors import BadInput
from fairmesh.experiment import Experiment, topology_of
from fairmesh.numerics.random_streams import Draw
from fairmesh.problems.batches import Sampling
from fairmesh.problems.models import FullyConnected
from fairmesh.regularizers.builtin import ChiSquare
from fairmesh.topology.graphs import Circulant
from fairmesh.training.loop import Training
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of

_COMPRESSORS: dict[str, tuple[Compressor, float]] = {  # name -> compressor, a consensus step at which it trains
    "4 bit, one norm": (Quantize(4), 0.15),
    "4 bit, blocks of 512": (Quantize(4, block=512), 0.8),
    "6 bit, one norm": (Quantize(6), 0.5),
    "8 bit, one norm": (Quantize(8), 0.8),
    "4 bit, ceil (published)": (Quantize(4, rounding="ceil"), 0.3),
    "top 10 %": (TopK(0.1), 0.2),
    "top 10 %, 4 bit": (TopKQuantize(0.1, 4), 0.1),
    "sign": (Sign(), 0.1),
    "none": (Identity(), 1.0),
}
_MOMENTS = {"early": 5, "middle": 100, "late": 400}


@dataclass(frozen=True)
class Case:
    """One message. `entropy_bytes` is the zeroth-order entropy of its symbols plus norms or values plus header."""

    case: str
    dim: int
    entropy_coded: bool
    bytes: int
    entropy_bytes: float
    packed_bytes: int
    nominal_bytes: float
    encode_ms: float
    decode_ms: float


def _entropy(symbols: np.ndarray) -> float:
    """Returns the zeroth-order entropy in bytes."""
    _, counts = np.unique(symbols, return_counts=True)
    shares = counts / counts.sum()
    return float(-(counts * np.log2(shares)).sum() / 8)


def entropy_bytes(code: Code) -> float:
    """Returns the least number of bytes that a coder of single symbols could need, header included."""
    if isinstance(code, Levels):
        return compression.CODED_HEADER_BYTES + code.norms.nbytes + _entropy(code.levels.numpy())
    if isinstance(code, Sparse):
        values = code.values.numpy()
        return compression.CODED_HEADER_BYTES + _entropy(values != 0) + np.count_nonzero(values) * values.itemsize
    return float(len(compression.encode({"part": code}, 0)))


def packed_bytes(code: Code) -> int:
    """Returns the bytes of the message with bit-packed levels."""
    if not isinstance(code, Levels):
        return len(compression.encode({"part": code}, 0))
    spread = int(code.levels.max() - code.levels.min())
    return compression.HEADER_BYTES + 10 + code.norms.nbytes + -(-code.levels.numel() * spread.bit_length() // 8)


def _median_ms(function: Callable[[], Any], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - start))
    return float(np.median(times))


def measured(name: str, code: Code, compressor: Compressor, repeats: int = 30) -> Case:
    """Encodes and decodes a row's message. Returns its sizes and times."""
    dim = next(t for t in code if isinstance(t, Tensor)).shape[-1]
    zero = torch.zeros(1, dim, dtype=code.decode().dtype)
    template = {"model": compressor.compress(zero, _draw(zero.dtype))}
    message = compression.encode({"model": code}, 7)
    decoded = compression.decode(message, template, 7)["model"]
    if not torch.equal(decoded.decode(), code.decode()):
        raise BadInput(f"{name}: the decoded message differs from the encoded one")
    return Case(
        case=name,
        dim=dim,
        entropy_coded=isinstance(code, Levels | Sparse),
        bytes=len(message),
        entropy_bytes=entropy_bytes(code),
        packed_bytes=packed_bytes(code),
        nominal_bytes=compressor.nominal_bits(dim) / 8,
        encode_ms=_median_ms(partial(compression.encode, {"model": code}, 7), repeats),
        decode_ms=_median_ms(partial(compression.decode, message, template, 7), repeats),
    )


def _training(data: Data, hidden: int, compressor: Compressor, consensus_step: float, options: Options) -> Training:
    experiment = Experiment(
        data=data,
        topology=Circulant((1, 2)),
        algorithm=ADGDA(Geometric(1.0, 0.998), 0.01, consensus_step, compressor, ChiSquare(0.01)),
        rounds=1,
        model=FullyConnected(hidden),
        sampling=Sampling(batch=20),
        options=options,
    )
    problem = experiment.problem()
    return Training(
        problem,
        topology_of(experiment, problem.n),
        replicas_of(experiment.algorithms(), [0], None, problem.n),
        options,
    )


class _Tap:
    """A network that keeps the last message."""

    def __init__(self, network: Any):
        self._network = network
        self.parts: dict[str, Any] = {}

    def exchange(self, parts: Any, round_index: Tensor) -> Any:
        self.parts = dict(parts)
        return self._network.exchange(parts, round_index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def _messages(data: Data, hidden: int, compressor: Compressor, consensus_step: float) -> Iterator[tuple[str, Code]]:
    """Yields the compressed model of node 0 early, in the middle and late in training."""
    training = _training(data, hidden, compressor, consensus_step, Options(count_bytes=False))
    training.network = tap = _Tap(training.network)  # type: ignore[assignment]
    state, done = training.initial(), 0
    for moment, rounds in _MOMENTS.items():
        for done in range(done, rounds):  # noqa: B020
            state = training.advance(state, done)
        done = rounds
        code = tap.parts["model"].code
        yield moment, code._replace(**{k: v[0, :1].clone() for k, v in code._asdict().items() if isinstance(v, Tensor)})


def codec_cases() -> Iterator[Case]:
    """Yields messages from digits, from Fashion-MNIST where its files are present, and from large Gaussian rows.

    Times are measured on one thread."""
    sources: dict[str, tuple[Data, int]] = {"digits, FC-200": (Digits(split="class"), 200)}
    if found(SOURCES["fashion-mnist"]) is not None:
        sources["Fashion-MNIST, FC-25"] = (FashionMNIST(), 25)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for source, (data, hidden) in sources.items():
            for name, (compressor, consensus_step) in _COMPRESSORS.items():
                for moment, code in _messages(data, hidden, compressor, consensus_step):
                    yield measured(f"{source}, {name}, {moment}", code, compressor)
        for dim, repeats in ((20_000, 100), (10_000_000, 3)):
            for name in ("4 bit, one norm", "4 bit, blocks of 512"):
                compressor = _COMPRESSORS[name][0]
                rows = torch.randn(1, dim, generator=torch.Generator().manual_seed(0))
                code = compressor.compress(rows, _draw(rows.dtype))
                yield measured(f"Gaussian, {name}", code, compressor, repeats)
    finally:
        torch.set_num_threads(threads)


def _draw(dtype: torch.dtype) -> Draw:
    return Draw(torch.zeros(1, dtype=torch.int64), dtype)


def counting_cost(device: str, rounds: int = 60) -> dict[str, float]:
    """Returns the milliseconds of a simulated round with and without counting bytes: 50 nodes, rows the size of FC-25.

    The two kinds of rounds alternate."""
    data = Digits(nodes=50, split="class")
    options = Options(device=device, count_bytes=True)
    trainings = [
        _training(data, 265, Quantize(4, block=512), 0.5, replace(options, count_bytes=counted))
        for counted in (True, False)
    ]
    states = [training.initial() for training in trainings]
    times: list[list[float]] = [[], []]
    for t in range(rounds):
        for k, training in enumerate(trainings):
            if device != "cpu":
                torch.cuda.synchronize()
            start = time.perf_counter()
            states[k] = training.advance(states[k], t)
            if device != "cpu":
                torch.cuda.synchronize()
            times[k].append(1e3 * (time.perf_counter() - start))
    counted, plain = (float(np.median(t[10:])) for t in times)
    return {"counted_ms": counted, "plain_ms": plain, "slowdown": counted / plain - 1}
