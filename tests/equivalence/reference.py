"""Every algorithm as a loop over nodes that exchange messages, written from the papers to check the stack against.

Slow on purpose. A node is an object with 1-D float64 vectors of its own and a dictionary with the public copy of every
neighbour; there is no mixed buffer and no stack. Compressors, projection and slopes are spelled out anew. Of fairmesh
it uses only the configured objects, to read their numbers, and the counter-based streams, so that batches and dithers
are the same integers. Nothing of fairmesh.networks or problems.oracle is used, and of fairmesh.algorithms only the
measured contraction of a compressor, a number that a run settles on before it begins.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

import fairmesh as fm
from fairmesh.algorithms.gossip import steady_contraction
from fairmesh.numerics import random_streams

SERVER = -1
FLOAT = 32  # billed bits of a number sent as it is


# --- draws -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=100_000)
def uniforms(seed: int, purpose: str, t: int, identity: int, count: int) -> np.ndarray:
    key = random_streams.keys(torch.tensor([seed]), purpose, t, torch.tensor([identity]))
    return random_streams.uniform(key, count, torch.float64).numpy()[0, 0]


@functools.lru_cache(maxsize=100_000)
def dithers(seed: int, purpose: str, t: int, identity: int, count: int) -> np.ndarray:
    """xi in [0, 1), the middles of 2^16 parts."""
    key = random_streams.keys(torch.tensor([seed]), purpose, t, torch.tensor([identity]))
    return (random_streams.Draw(key, torch.float64).dither(count).numpy()[0, 0] + 32768.5) / 65536


@functools.lru_cache(maxsize=100_000)
def draws_below(seed: int, purpose: str, t: int, identity: int, count: int, size: int) -> tuple[int, ...]:
    key = random_streams.keys(torch.tensor([seed]), purpose, t, torch.tensor([identity]))
    return tuple(random_streams.integers(key, count, torch.tensor(size)).flatten().tolist())


# --- rounding --------------------------------------------------------------------------------------------------------


class OnTheEdge(ArithmeticError):
    """A number lies so near a rounding boundary that the order of a sum decides to which side it goes. One in about a
    million does; the comparison then means nothing, and another seed has to be taken."""


def rounded(number, kind: type):
    """To float32, and on to float16 where that is asked for; its largest number stands for all beyond it."""
    largest = float(np.finfo(kind).max)
    low, high = (kind(np.float32(np.clip(number * factor, -largest, largest))) for factor in (1 - 1e-12, 1 + 1e-12))
    if np.any(low != high):
        raise OnTheEdge
    return high


def whole(numbers: np.ndarray, rounding: Callable) -> np.ndarray:
    if (rounding(numbers - 1e-12) != rounding(numbers + 1e-12)).any():
        raise OnTheEdge
    return rounding(numbers)


# --- messages --------------------------------------------------------------------------------------------------------


@dataclass
class Values:
    """Numbers as they are, or as float16."""

    values: np.ndarray

    def decode(self) -> np.ndarray:
        return self.values.astype(np.float64)

    def with_a_bit_flipped(self) -> "Values":
        """The largest number with its last bit flipped: of a float64, the last that a float32 would have."""
        flipped = self.values.copy()
        bits, last = (np.int16, 1) if flipped.dtype == np.float16 else (np.int64, 1 << 29)
        flipped.view(bits)[np.abs(flipped).argmax()] ^= last
        return Values(flipped)


@dataclass
class Scaled:
    """Whole numbers, and a norm for each block."""

    levels: np.ndarray
    norms: np.ndarray  # float32 or float16, one per block
    block: int
    unit: float

    def decode(self) -> np.ndarray:
        out = np.empty_like(self.levels)
        for k, norm in enumerate(self.norms):
            here = slice(k * self.block, (k + 1) * self.block)
            out[here] = self.levels[here] * (float(norm) * self.unit)
        return out

    def with_a_bit_flipped(self) -> "Scaled":
        """The largest norm with its last bit flipped."""
        norms = self.norms.copy()
        norms.view(np.int16 if norms.dtype == np.float16 else np.int32)[norms.argmax()] ^= 1
        return Scaled(self.levels, norms, self.block, self.unit)


def blocks(row: np.ndarray, block: int) -> Iterator[np.ndarray]:
    for start in range(0, len(row), block):
        yield row[start : start + block]


def tau(length: int, bits: int) -> float:
    return 1 + min(length / 2 ** (2 * bits), math.sqrt(length) / 2**bits)


def quantized(
    row: np.ndarray,
    dither: np.ndarray,
    bits: int,
    block: int,
    length: int,
    rounding: Callable = np.floor,
    kind: type = np.float32,
) -> Scaled:
    """||x|| / (2^b tau) floor(2^b x / ||x|| + xi), or sign(x) ||x|| / (2^b tau) ceil(2^b |x| / ||x|| + xi), block by
    block; the norm travels rounded."""
    levels, norms = [], []
    for x, xi in zip(blocks(row, block), blocks(dither, block)):
        norm = rounded(math.sqrt(float((x * x).sum())), kind)
        norms.append(norm)
        level = np.zeros_like(x)
        sent = (x != 0) & (norm > 0)
        sign = np.sign(x[sent]) if rounding is np.ceil else 1.0
        level[sent] = sign * whole(sign * 2**bits * x[sent] / float(norm) + xi[sent], rounding)
        levels.append(level)
    return Scaled(np.concatenate(levels), np.array(norms, dtype=kind), block, 1 / (2**bits * tau(length, bits)))


def kept(fraction: float, dim: int) -> int:
    return max(1, round(fraction * dim))


def first_of(row: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """The coordinates of the `count` smallest keys, ties by lowest index; zero elsewhere."""
    out = np.zeros_like(row)
    for k in sorted(range(len(row)), key=lambda k: (keys[k], k))[:count]:
        out[k] = row[k]
    return out


def compressed(compressor: fm.compressors.Compressor, row: np.ndarray, dither: np.ndarray) -> Values | Scaled:
    dim = len(row)
    if isinstance(compressor, fm.compressors.Identity):
        return Values(row)
    if isinstance(compressor, fm.compressors.Quantize):
        block = min(compressor.block or dim, dim)
        rounding = {"floor": np.floor, "ceil": np.ceil}[compressor.rounding]
        kind = {"float32": np.float32, "float16": np.float16}[compressor.norms]
        return quantized(row, dither, compressor.bits, block, block, rounding, kind)
    if isinstance(compressor, fm.compressors.TopK):
        largest = first_of(row, -np.abs(row), kept(compressor.fraction, dim))
        return Values(largest if compressor.values == "full" else rounded(largest, np.float16))
    if isinstance(compressor, fm.compressors.Sign):
        block = min(compressor.block or dim, dim)
        if np.abs(row).min() < 1e-14:
            raise OnTheEdge
        means = [rounded(np.abs(x).sum(), np.float32) / np.float32(len(x)) for x in blocks(row, block)]
        return Scaled(np.where(row >= 0, 1.0, -1.0), np.array(means, dtype=np.float32), block, 1.0)
    raise NotImplementedError(f"no reference for {compressor}")


def billed(compressor: fm.compressors.Compressor, dim: int) -> float:
    """The paper's bits for one message: b a coordinate; no sign, norm or index."""
    if isinstance(compressor, fm.compressors.Quantize):
        return compressor.bits * dim
    if isinstance(compressor, fm.compressors.Sign):
        return dim
    if isinstance(compressor, fm.compressors.TopK) and compressor.values == "float16":
        return 16 * kept(compressor.fraction, dim)
    if isinstance(compressor, fm.compressors.TopK):
        return FLOAT * kept(compressor.fraction, dim)
    return FLOAT * dim


# --- the adversary ---------------------------------------------------------------------------------------------------


def projected(point: np.ndarray) -> np.ndarray:
    """The nearest point of the simplex: subtract the one threshold that leaves a sum of one, drop what is negative."""
    descending = sorted(point, reverse=True)
    for support in range(len(point), 0, -1):
        threshold = (sum(descending[:support]) - 1) / support
        if descending[support - 1] > threshold:
            return np.array([max(x - threshold, 0.0) for x in point])
    raise ArithmeticError("unreachable: the largest entry alone is above its threshold")


def slope(regularizer: fm.regularizers.Regularizer, weights: np.ndarray, prior: np.ndarray, i: int) -> np.ndarray:
    """alpha times the gradient of r at node i's weights."""
    pairs = list(zip(weights, prior))
    if isinstance(regularizer, fm.ChiSquare):
        return np.array([-regularizer.strength * 2 * (w - p) / p for w, p in pairs])
    if isinstance(regularizer, fm.regularizers.KullbackLeibler):
        return np.array([-regularizer.strength * (math.log(max(w / p, regularizer.floor)) + 1) for w, p in pairs])
    if isinstance(regularizer, fm.regularizers.NoRegularizer):
        return np.zeros(len(weights))
    if isinstance(regularizer, fm.regularizers.OwnCoordinate):
        return np.array([-regularizer.strength * (w - p) if k == i else 0.0 for k, (w, p) in enumerate(pairs)])
    raise NotImplementedError(f"no reference for {regularizer}")


def step_size(schedule: fm.schedules.Schedule, t: int) -> float:
    if isinstance(schedule, fm.schedules.Constant):
        return schedule.value
    if isinstance(schedule, fm.schedules.Geometric):
        return schedule.start * schedule.ratio**t
    if isinstance(schedule, fm.schedules.Linear):  # one without an end stays where it is
        left = max(0.0, 1 - t / (schedule.rounds or math.inf))
        return schedule.start * left ** getattr(schedule, "power", 1)
    raise NotImplementedError(f"no reference for {schedule}")


# --- nodes -----------------------------------------------------------------------------------------------------------


class Worker:
    """One node's data, and the user's module filled with its numbers: loss and gradient by plain autograd."""

    def __init__(self, problem: fm.Problem, i: int, seed: int, calls: int):
        self.problem, self.i, self.seed, self.calls = problem, i, seed, calls
        self.inputs, self.targets = problem.sites[i].train.inputs, problem.sites[i].train.targets
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            given = problem.initial.model
            module = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
        self.module = module.double()
        self.parameters = list(self.module.parameters())
        self.numbers = nn.utils.parameters_to_vector(self.parameters).detach()
        self.start = self.numbers.numpy().copy()
        nn.utils.vector_to_parameters(self.numbers, self.parameters)  # from now on views into `numbers`
        self.seen: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def _indices(self, t: int, call: int) -> list[list[int]]:
        sampling, size = self.problem.sampling, len(self.inputs)
        if sampling.order == "full":
            return [list(range(size))]
        repeats = sampling.batches_per_step
        numbers = [call * repeats + k for k in range(repeats)]
        if sampling.order == "cyclic":
            firsts = [(t * self.calls * repeats + number) * sampling.batch for number in numbers]
            return [[(first + k) % size for k in range(sampling.batch)] for first in firsts]
        return [list(draws_below(self.seed, f"batch {k}", t, self.i, sampling.batch, size)) for k in numbers]

    def batches(self, t: int, call: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if (t, call) not in self.seen:
            self.seen[t, call] = [(self.inputs[b], self.targets[b]) for b in self._indices(t, call)]
        return self.seen[t, call]

    def loss_and_gradient(self, row: np.ndarray, t: int, call: int = 0) -> tuple[float, np.ndarray]:
        self.numbers.copy_(torch.from_numpy(row))
        total, losses = np.zeros_like(row), []
        batches = self.batches(t, call)
        for inputs, targets in batches:
            loss = self.problem.loss(self.module(inputs), targets)
            gradients = torch.autograd.grad(loss, self.parameters)
            total += torch.cat([gradient.flatten() for gradient in gradients]).numpy()
            losses.append(loss.item())
        gradient = total / len(batches)
        if self.problem.clip_norm is not None:
            gradient = gradient * min(1.0, self.problem.clip_norm / math.sqrt(float((gradient**2).sum())))
        return sum(losses) / len(batches), gradient + self.problem.weight_decay * row

    def error(self, row: np.ndarray, t: int, call: int) -> float:
        self.numbers.copy_(torch.from_numpy(row))
        wrong = [self.module(inputs).argmax(dim=1) != targets for inputs, targets in self.batches(t, call)]
        return float(torch.stack([share.double().mean() for share in wrong]).mean())


@functools.lru_cache(maxsize=64)
def workers(problem: fm.Problem, seed: int, calls: int) -> list[Worker]:
    return [Worker(problem, i, seed, calls) for i in range(problem.n)]


Tamper = Callable[[int, int, int, Values | Scaled], Values | Scaled]  # (round, sender, receiver, message) -> message


@dataclass
class Trace:
    """What a run went through: the states after each round, and what every node and the server sent."""

    models: list[np.ndarray] = field(default_factory=list)  # (n, dim), or (1, dim) at a server
    duals: list[np.ndarray] = field(default_factory=list)  # (n, n), or (1, n)
    copies: list[np.ndarray] = field(default_factory=list)  # (n, dim) each node's own public copy
    mixed: list[np.ndarray] = field(default_factory=list)  # (n, dim) sum_j W[i, j] x_hat_j, from what i itself holds
    dual_copies: list[np.ndarray] = field(default_factory=list)  # (n, n), where duals travel compressed
    tracker_copies: list[np.ndarray] = field(default_factory=list)  # (n, dim), where trackers are gossiped
    weights: list[np.ndarray] = field(default_factory=list)  # (n, 1) m lambda_i, where nobody knows all of lambda
    bits_of_nodes: np.ndarray = field(default_factory=lambda: np.zeros(0))
    bits_of_server: float = 0.0


@dataclass
class Node:
    worker: Worker
    model: np.ndarray
    dual: np.ndarray
    public: dict[int, np.ndarray]  # whose -> its public copy as this node knows it; its own among them
    public_duals: dict[int, np.ndarray]  # the same of duals that travel compressed


class Mesh:
    """Nodes that know their neighbours over all graphs of a schedule, and the weights of each round."""

    def __init__(self, problem: fm.Problem, topology: fm.topologies.Topology, seed: int, calls: int):
        self.n = problem.n
        self.weights = [mixing.matrix.toarray() for mixing in topology.build(self.n)]
        self.prior = problem.prior_of_sites.numpy()
        self.seed = seed
        local = workers(problem, seed, calls)
        self.dim = len(local[0].start)
        self.reach = [
            [j for j in range(self.n) if j != i and any(W[i, j] != 0 for W in self.weights)] for i in range(self.n)
        ]
        self.nodes = [
            Node(
                w,
                w.start.copy(),
                self.prior.copy(),
                {j: np.zeros(self.dim) for j in [i, *self.reach[i]]},
                {j: np.zeros(self.n) for j in [i, *self.reach[i]]},
            )
            for i, w in enumerate(local)
        ]
        self.bits = np.zeros(self.n)
        self._neighbours = [
            [[j for j in range(self.n) if j != i and W[i, j] != 0] for i in range(self.n)] for W in self.weights
        ]

    def at(self, t: int) -> np.ndarray:
        return self.weights[t % len(self.weights)]

    def neighbours(self, i: int, t: int) -> list[int]:
        return self._neighbours[t % len(self.weights)][i]

    def average_around(self, i: int, t: int, rows) -> np.ndarray:
        """sum_j W[i, j] rows[j] over i itself and its neighbours of this round, one by one."""
        total = self.at(t)[i, i] * rows[i]
        for j in self.neighbours(i, t):
            total = total + self.at(t)[i, j] * rows[j]
        return total

    def toward_others(self, i: int, t: int, public: dict[int, np.ndarray]) -> np.ndarray:
        """s_i - x_hat_i, from the public copies that node i holds."""
        return self.average_around(i, t, public) - public[i]

    def publish(self, rows: list, copies: list[dict], t: int, purpose: str, compressor, tamper=None) -> None:
        """Every node sends what its row has moved away from its public copy, to all who hold that copy."""
        outbox = []
        for i, row in enumerate(rows):
            dithered = (
                isinstance(compressor, fm.compressors.TopKQuantize) or getattr(compressor, "rounding", "") == "floor"
            )
            dither = (dithers if dithered else uniforms)(self.seed, purpose, t, i, len(row))
            outbox.append(compressed(compressor, row - copies[i][i], dither))
        decoded = [message.decode() for message in outbox]
        for i, held in enumerate(copies):
            for j in [i, *self.reach[i]]:
                arrived = decoded[j] if tamper is None else tamper(t, j, i, outbox[j]).decode()
                held[j] = held[j] + arrived
                if j != i:
                    self.bits[j] += billed(compressor, len(rows[j]))

    def gossip(self, descended: list[np.ndarray], t: int, rate: float, compressor, tamper: Tamper | None) -> None:
        """Moves every node toward its neighbours' public copies, then publishes what changed."""
        for i, node in enumerate(self.nodes):
            node.model = descended[i] + rate * self.toward_others(i, t, node.public)
        models, copies = [node.model for node in self.nodes], [node.public for node in self.nodes]
        self.publish(models, copies, t, "compression", compressor, tamper)

    def mix_duals(self, ascended: list[np.ndarray], t: int) -> None:
        """Algorithm 1's last line: duals travel as they are, to the neighbours of the round."""
        for i, node in enumerate(self.nodes):
            node.dual = self.average_around(i, t, ascended)
            self.bits[i] += FLOAT * self.n * len(self.neighbours(i, t))

    def gossip_duals(self, ascended: list[np.ndarray], t: int, compressor, regularizer) -> None:
        """Duals as compressed differences to public copies, back among the allowed weights at every node."""
        for i, node in enumerate(self.nodes):
            moved = ascended[i] + self.toward_others(i, t, node.public_duals)
            node.dual = projected(moved)
        duals, copies = [node.dual for node in self.nodes], [node.public_duals for node in self.nodes]
        self.publish(duals, copies, t, "dual compression", compressor)

    def recorded(self, trace: Trace, t: int, duals: bool, copies: bool) -> None:
        trace.models.append(np.stack([node.model for node in self.nodes]))
        if duals:
            trace.duals.append(np.stack([node.dual for node in self.nodes]))
        if copies:
            trace.copies.append(np.stack([node.public[i] for i, node in enumerate(self.nodes)]))
            trace.mixed.append(
                np.stack([self.average_around(i, t + 1, node.public) for i, node in enumerate(self.nodes)])
            )
        trace.bits_of_nodes = self.bits.copy()


# --- algorithms ------------------------------------------------------------------------------------------------------


def ad_gda(problem, topology, algorithm, rounds: int, seed: int = 0, tamper: Tamper | None = None) -> Trace:
    """Algorithm 1, line by line; local steps go on from where the first one led."""
    mesh, trace = Mesh(problem, topology, seed, algorithm.local_steps), Trace()
    for t in range(rounds):
        primal, dual = step_size(algorithm.primal_step, t), step_size(algorithm.dual_step, t)
        descended, ascended = [], []
        for i, node in enumerate(mesh.nodes):
            loss, gradient = node.worker.loss_and_gradient(node.model, t)
            ascent = slope(algorithm.regularizer, node.dual, mesh.prior, i)
            ascent[i] += loss if algorithm.loss_cap is None else min(loss, algorithm.loss_cap)
            half = projected(node.dual + dual * ascent)
            weight = {"simultaneous": node.dual, "dual-first": half}[algorithm.dual_order][i]
            model = node.model - primal * (weight * gradient)
            for call in range(1, algorithm.local_steps):
                model = model - primal * (weight * node.worker.loss_and_gradient(model, t, call)[1])
            descended.append(model)
            ascended.append(half)
        mesh.gossip(descended, t, algorithm.consensus_step, algorithm.compressor, tamper)
        if algorithm.dual_compressor is None:
            mesh.mix_duals(ascended, t)
        else:
            mesh.gossip_duals(ascended, t, algorithm.dual_compressor, algorithm.regularizer)
            trace.dual_copies.append(np.stack([node.public_duals[i] for i, node in enumerate(mesh.nodes)]))
        mesh.recorded(trace, t, duals=True, copies=True)
    return trace


class Rows:
    """What the nodes of a mesh know of all nodes' weights, for Tracked AD-GDA's ways to weigh: `weigh` gives m lambda_i
    from this round's losses, `exchange` comes after it."""

    def __init__(self, mesh: Mesh, algorithm: fm.TrackedADGDA):
        self.mesh, self.weighting, self.regularizer = mesh, algorithm.weighting, algorithm.regularizer
        self.prior, self.n = mesh.prior, mesh.n
        self.losses = np.zeros(mesh.n)
        self.prices, self.raised, self.means = np.zeros(mesh.n), np.zeros(mesh.n), np.zeros(mesh.n)

    def weigh(self, losses: np.ndarray, t: int) -> np.ndarray:
        nodes, n = self.mesh.nodes, self.n
        if isinstance(self.weighting, fm.weighting.PriorWeights):
            return n * self.prior
        if isinstance(self.weighting, fm.weighting.ProjectedAscent):
            weights = np.array([n * node.dual[i] for i, node in enumerate(nodes)])
            self.ascended = []
            for i, node in enumerate(nodes):
                ascent = slope(self.regularizer, node.dual, self.prior, i) / n
                ascent[i] += losses[i]
                moved = node.dual + step_size(self.weighting.step, t) * ascent
                self.ascended.append(projected(moved))
            return weights
        before, self.losses = (
            self.losses,
            self.weighting.loss_ema * self.losses + (1 - self.weighting.loss_ema) * losses,
        )
        self.means = self.means + self.losses - before  # each node's estimate of the mean loss
        seen = self.losses
        if self.weighting.relative:
            seen = seen / np.maximum(self.means, seen / n + 1e-6)
        seen = seen / (1 + step_size(self.weighting.strength_annealing, t))
        self.weights = n * self.prior * np.array([self.ratio(f, price) for f, price in zip(seen, self.prices)])
        return self.weights

    def ratio(self, loss: float, price: float) -> float:
        if isinstance(self.regularizer, fm.ChiSquare):
            return max(0.0, 1 + loss / (2 * self.regularizer.strength) - price)
        assert isinstance(self.regularizer, fm.regularizers.KullbackLeibler)
        return math.exp(min(4.0, loss / self.regularizer.strength - price))

    def exchange(self, t: int) -> None:
        mesh, weighting = self.mesh, self.weighting
        compressor = getattr(weighting, "compressor", None)
        if isinstance(weighting, fm.weighting.ProjectedAscent) and compressor is None:
            mesh.mix_duals(self.ascended, t)
        elif isinstance(weighting, fm.weighting.ProjectedAscent):
            mesh.gossip_duals(self.ascended, t, compressor, self.regularizer)
        elif isinstance(
            weighting, fm.weighting.ShadowPrice
        ):  # exact diffusion: step, correct by the step before, mix half
            raised = self.prices + weighting.step * (self.weights - self.n * self.prior)
            told = raised + self.prices - self.raised
            self.prices = np.array([(told[i] + mesh.average_around(i, t, told)) / 2 for i in range(self.n)])
            self.raised = raised
            self.means = np.array([mesh.average_around(i, t, self.means) for i in range(self.n)])
            for i in range(self.n):
                mesh.bits[i] += FLOAT * (2 if weighting.relative else 1) * len(mesh.neighbours(i, t))


def steady(algorithm: fm.TrackedADGDA, mesh: Mesh) -> float:
    """gamma: as given, or 2 delta / ||I - W|| to three digits, at most one; less where coordinates are left out, or
    rounded up."""
    if algorithm.consensus_step is not None:
        return algorithm.consensus_step
    largest = max(np.abs(np.linalg.eigvalsh(np.eye(mesh.n) - W)).max() for W in mesh.weights)
    compressor = algorithm.compressor
    leaves_out = fm.compressors.TopK | fm.compressors.RandomK | fm.compressors.TopKQuantize
    harsh = isinstance(compressor, leaves_out)
    harsh = harsh or getattr(compressor, "rounding", "") == "ceil"
    rate = (0.8 if harsh else 2) * steady_contraction(compressor, mesh.dim) / max(largest, 1e-6)
    return min(1.0, max(0.001, round(rate, 3)))


def drift_limit(algorithm: fm.TrackedADGDA, mesh: Mesh, rate: float) -> float:
    """max_drift: as given, or 24 gamma times the spectral gap of the mean of W over the rounds, at most two."""
    if algorithm.max_drift is not None:
        return algorithm.max_drift
    moduli = sorted(np.abs(np.linalg.eigvalsh(sum(mesh.weights) / len(mesh.weights))))
    return min(2.0, 24 * round(1 - moduli[-2], 4) * rate)


def tracked_ad_gda(problem, topology, algorithm, rounds: int, seed: int = 0, tamper: Tamper | None = None) -> Trace:
    """v_i += gamma sum_j w_ij (v_hat_j - v_hat_i) + h_i - h_i before, of momenta h_i of the weighted gradient; descent
    along v_i over the root of its mean squares; gossip of models and of v_i, each with public copies of its own."""
    steps_a_round = algorithm.local_steps
    mesh, trace = Mesh(problem, topology, seed, steps_a_round), Trace()
    rows, rate = Rows(mesh, algorithm), steady(algorithm, mesh)
    everyone = range(mesh.n)
    watched = steps_a_round > 1 and algorithm.max_drift != 0
    paces, sizes = [1 / steps_a_round if watched else 1.0 for _ in everyone], np.zeros(mesh.n)
    momenta, trackers, squares = ([np.zeros(mesh.dim) for _ in everyone] for _ in range(3))
    public = [{j: np.zeros(mesh.dim) for j in [i, *mesh.reach[i]]} for i in everyone]
    if algorithm.warm_start:
        for node in mesh.nodes:
            node.public = {j: node.worker.start.copy() for j in node.public}
    for t in range(rounds):
        eta = step_size(algorithm.primal_step, t)
        views = [
            algorithm.gradient_at_average * mesh.toward_others(i, t, node.public) for i, node in enumerate(mesh.nodes)
        ]
        answers = [node.worker.loss_and_gradient(node.model + view, t) for node, view in zip(mesh.nodes, views)]
        cap = math.inf if algorithm.loss_cap is None else algorithm.loss_cap
        weights = rows.weigh(np.array([min(loss, cap) for loss, _ in answers]), t)
        descended = []
        for i, node in enumerate(mesh.nodes):
            if algorithm.tracking:
                trackers[i] = trackers[i] + rate * mesh.toward_others(i, t, public[i])
            local = node.model
            for call in range(steps_a_round):
                gradient = node.worker.loss_and_gradient(local + views[i], t, call)[1]
                news = (1 - algorithm.beta1) * (weights[i] * gradient - momenta[i])
                momenta[i] = momenta[i] + news
                trackers[i] = trackers[i] + news if algorithm.tracking else momenta[i]
                sizes[i] = np.linalg.norm(trackers[i]) if call == 0 else sizes[i]
                steps = np.full(mesh.dim, eta)
                if algorithm.beta2 > 0:
                    squares[i] = algorithm.beta2 * squares[i] + (1 - algorithm.beta2) * trackers[i] ** 2
                    share = 1 - algorithm.beta2 ** (t * steps_a_round + call + 1)
                    steps = eta / math.sqrt(mesh.dim) / (np.sqrt(squares[i] / share) + 1e-8)
                local = local - paces[i] * steps * trackers[i]
            if watched:
                change = node.worker.loss_and_gradient(local + views[i], t)[1] - answers[i][1]
                allowed = drift_limit(algorithm, mesh, rate) * sizes[i] / np.linalg.norm(weights[i] * change)
                paces[i] = min(1.0, max(1 / steps_a_round, paces[i] * min(1.25, max(0.5, allowed))))
            descended.append(local)
        mesh.gossip(descended, t, rate, algorithm.compressor, tamper)
        if algorithm.tracking:
            mesh.publish(trackers, public, t, "tracker compression", algorithm.compressor)
            trace.tracker_copies.append(np.stack([public[i][i] for i in everyone]))
        rows.exchange(t)
        if getattr(algorithm.weighting, "compressor", None) is not None:
            trace.dual_copies.append(np.stack([node.public_duals[i] for i, node in enumerate(mesh.nodes)]))
        if isinstance(algorithm.weighting, fm.weighting.ShadowPrice):
            trace.weights.append(weights[:, None])
        mesh.recorded(
            trace,
            t,
            duals=isinstance(algorithm.weighting, fm.weighting.ProjectedAscent | fm.weighting.ExactMaximum),
            copies=True,
        )
    return trace


def choco_sgd(problem, topology, algorithm, rounds: int, seed: int = 0, tamper: Tamper | None = None) -> Trace:
    """Koloskova et al. 2019, Algorithm 2, for sum_i p_i f_i, with local steps."""
    mesh, trace = Mesh(problem, topology, seed, algorithm.local_steps), Trace()
    for t in range(rounds):
        descended = []
        for i, node in enumerate(mesh.nodes):
            model = node.model
            for call in range(algorithm.local_steps):
                _, gradient = node.worker.loss_and_gradient(model, t, call)
                model = model - step_size(algorithm.primal_step, t) * mesh.n * mesh.prior[i] * gradient
            descended.append(model)
        mesh.gossip(descended, t, algorithm.consensus_step, algorithm.compressor, tamper)
        mesh.recorded(trace, t, duals=False, copies=True)
    return trace


def dsgd(problem, topology, algorithm, rounds: int, seed: int = 0) -> Trace:
    """Lian et al. 2017, Algorithm 1: mix the models, subtract the gradient taken before mixing."""
    mesh, trace = Mesh(problem, topology, seed, 1), Trace()
    for t in range(rounds):
        before = [node.model for node in mesh.nodes]
        for i, node in enumerate(mesh.nodes):
            _, gradient = node.worker.loss_and_gradient(before[i], t)
            step = step_size(algorithm.primal_step, t) * mesh.n * mesh.prior[i]
            node.model = mesh.average_around(i, t, before) - step * gradient
            mesh.bits[i] += FLOAT * mesh.dim * len(mesh.neighbours(i, t))
        mesh.recorded(trace, t, duals=False, copies=False)
    return trace


def dr_dsgd(problem, topology, algorithm, rounds: int, seed: int = 0) -> Trace:
    """Ben Issaid et al. 2022, Algorithm 1: a step scaled by exp(loss / mu) / mu, then mixing."""
    mesh, trace = Mesh(problem, topology, seed, 1), Trace()
    for t in range(rounds):
        half = []
        for i, node in enumerate(mesh.nodes):
            loss, gradient = node.worker.loss_and_gradient(node.model, t)
            scale = math.exp(loss / algorithm.temperature) / algorithm.temperature * mesh.n * mesh.prior[i]
            half.append(node.model - step_size(algorithm.primal_step, t) * scale * gradient)
        for i, node in enumerate(mesh.nodes):
            node.model = mesh.average_around(i, t, half)
            mesh.bits[i] += FLOAT * mesh.dim * len(mesh.neighbours(i, t))
        mesh.recorded(trace, t, duals=False, copies=False)
    return trace


def drfa(problem, topology, algorithm, rounds: int, seed: int = 0) -> Trace:
    """Deng et al. 2020, Algorithm 1. Only clients that are drawn compute or send."""
    del topology
    n, tau_, trace = problem.n, algorithm.local_steps, Trace()
    clients = workers(problem, seed, tau_ + 1)
    model, weights, bits = clients[0].start, problem.prior_of_sites.numpy(), np.zeros(n)
    many = max(1, math.floor(algorithm.participation * n + 0.5))
    for t in range(rounds):
        eta, ascent = step_size(algorithm.primal_step, t), step_size(algorithm.dual_step, t)
        if algorithm.repeats:
            drawn = [drawn_by(weights, u) for u in uniforms(seed, "clients", t, SERVER, many)]
        else:
            clocks = -np.log(np.maximum(uniforms(seed, "clients", t, SERVER, n), 1e-12)) / np.maximum(weights, 1e-30)
            drawn = sorted(range(n), key=lambda i: (clocks[i], i))[:many]
        moment = math.floor(uniforms(seed, "snapshot", t, SERVER, 1)[0] * tau_)
        returned = {}
        for i in sorted(set(drawn)):
            trace.bits_of_server += FLOAT * len(model)
            local, snapshot = model, model
            for call in range(tau_):
                local = local - eta * clients[i].loss_and_gradient(local, t, call)[1]
                snapshot = local if call == moment else snapshot
            returned[i] = local, snapshot
            bits[i] += FLOAT * 2 * len(model)
        model = sum(returned[i][0] for i in drawn) / many
        snapshot = sum(returned[i][1] for i in drawn) / many

        chances = uniforms(seed, "probe", t, SERVER, n)
        estimates = np.zeros(n)
        probes = n if algorithm.probed == "everyone" else many
        for i in sorted(range(n), key=lambda i: (chances[i], i))[:probes]:
            trace.bits_of_server += FLOAT * len(model)
            by_loss = algorithm.ascends == "loss"
            value = (
                clients[i].loss_and_gradient(snapshot, t, tau_)[0] if by_loss else clients[i].error(snapshot, t, tau_)
            )
            estimates[i] = n / probes * value
            bits[i] += FLOAT
        weights = np.maximum(projected(weights + ascent * tau_ * estimates), algorithm.floor)
        weights = weights / weights.sum()
        trace.models.append(model[None])
        trace.duals.append(weights[None])
    trace.bits_of_nodes = bits
    return trace


def drawn_by(weights: np.ndarray, uniform: float) -> int:
    """The entry into whose share of [0, 1) a uniform falls."""
    reached = 0.0
    for i, weight in enumerate(weights):
        reached += weight / weights.sum()
        if uniform < reached:
            return i
    return len(weights) - 1


def afl(problem, topology, algorithm, rounds: int, seed: int = 0) -> Trace:
    """Mohri et al. 2019: the lambda-weighted gradient of all clients; clients whose lambda is zero send no gradient."""
    del topology
    n, trace = problem.n, Trace()
    clients = workers(problem, seed, 1)
    model, weights, bits = clients[0].start, problem.prior_of_sites.numpy(), np.zeros(n)
    for t in range(rounds):
        answers = [client.loss_and_gradient(model, t) for client in clients]
        trace.bits_of_server += FLOAT * len(model) * n
        for i in range(n):
            bits[i] += FLOAT * (1 + (len(model) if weights[i] != 0 else 0))
        model = model - step_size(algorithm.primal_step, t) * sum(w * g for w, (_, g) in zip(weights, answers))
        losses = np.array([loss for loss, _ in answers])
        weights = projected(weights + step_size(algorithm.dual_step, t) * losses)
        trace.models.append(model[None])
        trace.duals.append(weights[None])
    trace.bits_of_nodes = bits
    return trace


REFERENCES: dict[type, Callable[..., Trace]] = {
    fm.ADGDA: ad_gda,
    fm.TrackedADGDA: tracked_ad_gda,
    fm.ChocoSGD: choco_sgd,
    fm.algorithms.DSGD: dsgd,
    fm.algorithms.DRDSGD: dr_dsgd,
    fm.algorithms.DRFA: drfa,
    fm.algorithms.AFL: afl,
}
