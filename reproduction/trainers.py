"""Which algorithm suits the updates of training functions: the worst site and the mean, by problem and local work.

`python -m reproduction.trainers --write reproduction/results/trainers.json` trains every case that the file does not
have yet; `--show` prints the tables of the recorded runs. `SELECTION` are the problems on which the default of
`fm.train` was chosen, among `CANDIDATES`. `HELD_OUT` are those on which it was compared with others afterwards.

The functions are those of `train_with`, called for all nodes of all runs at once: `Together` takes the same steps with
stacked tensors, in a small part of the time. `reproduction/tests/test_trainers.py` compares the two.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fairmesh as fm
from fairmesh.problems import oracle as oracle_module
from fairmesh.problems.local_work import LocalWorker, Node, Work
from fairmesh.problems.row_loss import batch_loss
from fairmesh.problems.stacking import gradients
from fairmesh.trainers.local_trainer import LocalContext, SiteData
from reproduction.recorded import write_or_show

RESULTS = Path(__file__).parent / "results" / "trainers.json"
SEEDS = (0, 1, 2, 3, 4)  # each with its own placement
BATCH = 32
EPOCH = 0  # steps: as many batches as the site's rows fill


@dataclass(frozen=True)
class LocalWork:
    """What a site does in a round."""

    optimizer: str  # "sgd" or "adamw"
    rate: float
    steps: int  # or EPOCH
    rounds: int

    def __str__(self) -> str:
        steps = "an epoch" if self.steps == EPOCH else f"{self.steps} steps"
        return f"{steps} of {self.optimizer}, {self.rounds} rounds"

    def steps_at(self, rows: int) -> int:
        return self.steps or math.ceil(rows / BATCH)


LENGTHS = {EPOCH: 30, 20: 20, 200: 10}  # steps -> rounds
KINDS = (("sgd", 0.1), ("adamw", 3e-3))
WORKS = [LocalWork(*kind, steps, rounds) for kind in KINDS for steps, rounds in LENGTHS.items()]
SHORT = [work for work in WORKS if work.steps != 200]
MEDIUM = [work for work in WORKS if work.steps != 200 or work.optimizer == "sgd"]
LONG = LocalWork("sgd", 0.1, 200, 30)  # to see what falls apart in the long run


def logistic() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 2))


def convolutional() -> nn.Module:
    layers = [nn.Conv2d(1, 6, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, 10)]
    return nn.Sequential(nn.Unflatten(1, (1, 8)), *layers)


def hospitals(count: int) -> list[fm.Site]:
    from examples.hospitals import sites

    return sites(count)


@dataclass(frozen=True)
class Problem:
    """A model and the sites that train it."""

    name: str
    model: Callable[[], nn.Module]
    sites: Callable[[], list[fm.Site]]
    works: list[LocalWork]

    def with_trainer(self, trainer: Any) -> fm.Problem:
        torch.manual_seed(0)
        return fm.Problem(self.model(), self.sites(), sampling=fm.Sampling(batch=BATCH), trainer=trainer)


MIRRORED = Problem("two of ten sites mirrored, logistic", logistic, fm.data.Digits(odd=2).sites, [*WORKS, LONG])
CLASSES = Problem("one digit per site, logistic", logistic, fm.data.Digits(split="class").sites, WORKS)
HOSPITALS = Problem("six hospitals, perceptron", perceptron, lambda: hospitals(6), WORKS)
SELECTION = [MIRRORED, CLASSES, HOSPITALS]
HELD_OUT = [
    Problem("two of ten sites mirrored, CNN", convolutional, fm.data.Digits(odd=2, seed=1).sites, SHORT),
    Problem("one digit per site, CNN", convolutional, fm.data.Digits(split="class", seed=1).sites, SHORT),
    Problem(
        "six of ten sites small and shifted, logistic",
        logistic,
        fm.data.Digits(odd=6, instrument="shifted", sizes=(240,) * 4 + (40,) * 6, seed=1).sites,
        MEDIUM,
    ),
    Problem("twelve hospitals, perceptron", perceptron, lambda: hospitals(12), MEDIUM),
]


# Algorithms -----------------------------------------------------------------------------------------------------------

FOUR_BITS = fm.compressors.Quantize(bits=4, block=256)
Algorithms = dict[str, fm.algorithms.Algorithm]


def others(n: int) -> list[Algorithms]:
    """Returns algorithms to compare with, for n sites, in groups that run as one batch."""
    compressed: dict[str, Any] = {"consensus_step": 0.5, "compressor": FOUR_BITS}
    return [
        {"FedAvg, a server": fm.algorithms.FedAvg(1.0, beta1=0.0, beta2=0.0, local_steps=1)},
        {"CHOCO-SGD": fm.ChocoSGD(1.0, **compressed)},
        {f"AD-GDA, dual step {step:g}": fm.ADGDA(float(n), step, **compressed) for step in (0.01, 0.1)},
        {"tracked, fixed weights": replace(tracked(1.0, 0.0, 0.05), weighting=fm.weighting.PriorWeights())},
    ]


def tracked(step: float, beta1: float, strength: float) -> fm.TrackedADGDA:
    regularizer = fm.ChiSquare(strength)
    return fm.TrackedADGDA(step, beta1=beta1, beta2=0.0, compressor=FOUR_BITS, regularizer=regularizer)


def name_of(step: float, beta1: float, strength: float) -> str:
    return f"tracked, step {step:g}, beta1 {beta1:g}, chi-square {strength:g}"


CANDIDATES = [
    (1.0, 0.0, 0.05),
    (0.5, 0.0, 0.05),
    (1.0, 0.5, 0.05),
    (0.5, 0.5, 0.05),
    (0.25, 0.5, 0.05),
    (1.0, 0.9, 0.05),
    (0.5, 0.9, 0.05),
    (1.0, 0.0, 0.5),
    (1.0, 0.5, 0.1),
    (1.0, 0.5, 0.2),
    (0.5, 0.5, 0.2),
]
DEFAULT = (1.0, 0.5, 0.1)
NAIVE = (1.0, 0.0, 0.05)  # whole updates, no memory
BOLD, TIMID = (1.0, 0.5, 0.05), (0.5, 0.5, 0.05)  # twice as sharp weights as the default; and half as long steps


def groups_of(problem: Problem, work: LocalWork, n: int) -> list[Algorithms]:
    """Returns what is trained on a problem."""
    chosen = [NAIVE, DEFAULT] if problem in HELD_OUT else [NAIVE, BOLD, TIMID, DEFAULT] if work == LONG else CANDIDATES
    return [*others(n), {name_of(*one): tracked(*one) for one in chosen}]


# Local work -----------------------------------------------------------------------------------------------------------


def train_with(work: LocalWork) -> Callable[..., None]:
    """Returns a training function as a user would write it. Its optimizer continues from round to round."""

    def train(module: nn.Module, data: SiteData, ctx: LocalContext) -> None:
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[work.optimizer]
        optimizer = kind(module.parameters(), lr=work.rate)
        if ctx.state:
            optimizer.load_state_dict(ctx.state["optimizer"])
        for rows in _batches(work, len(data), ctx.seed):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(data.inputs[rows]), data.targets[rows]).backward()  # type: ignore[index]
            optimizer.step()
        ctx.state["optimizer"] = optimizer.state_dict()

    return train


def _batches(work: LocalWork, rows: int, seed: int) -> Tensor:
    """Returns the rows of each step, (steps, BATCH)."""
    return torch.randint(rows, (work.steps_at(rows), BATCH), generator=torch.Generator().manual_seed(seed))


class Together:
    """Does the local work of all nodes at once, with the steps of `train_with`. Takes the place of `LocalWorker`.

    Args:
        work: What a site does in a round.
        given: What `LocalWorker` takes: the training function, the model, the nodes, their rows and their batches.
    """

    def __init__(self, work: LocalWork, *given: Any):
        self._work, self._model, self._division = work, given[1], given[3]
        self._worker = LocalWorker(*given)  # which knows the nodes and their data
        self._data: dict[str, tuple[int, SiteData]] = {}  # of each site, with its first row in the pool
        self._pool: tuple[Tensor, Tensor] | None = None
        self._memory: dict[str, Tensor] = {}
        self._gradients: Callable[..., Any] | None = None

    def work(self, rows: Tensor, round_index: Tensor, call: int, memory: Tensor, at_work: Tensor | None) -> Work:
        """Returns the work of a round, as `LocalWorker.work` does. The optimizers' states stay in this object."""
        models, own = rows.split([self._model.dim, self._model.own_dim], dim=-1)
        nodes, rows = self._worker._nodes_at_work(int(round_index), at_work), models.flatten(0, 1)
        if self._gradients is None:
            self._prepare(rows, nodes, self._division.sizes_in(round_index))
        chosen = [_batches(self._work, len(self._data[node.site][1]), node.seed) for node in nodes]
        lengths = torch.tensor([len(one) for one in chosen]).unsqueeze(-1)
        firsts = torch.tensor([self._data[node.site][0] for node in nodes])[:, None, None]
        drawn = nn.utils.rnn.pad_sequence(chosen, batch_first=True) + firsts  # (nodes, steps, BATCH)
        keys, after = torch.zeros(len(rows), dtype=torch.int64), rows
        for step in range(drawn.shape[1]):
            inputs, targets = (part[drawn[:, step]] for part in self._pool)
            slopes, _ = self._gradients(after, inputs, targets, keys)
            after = torch.where(step < lengths, self._stepped(after, slopes, step < lengths), after)
        return Work(torch.full_like(models[..., :1], torch.nan), models - after.view_as(models), own, memory)

    def _prepare(self, rows: Tensor, nodes: list[Node], sizes: Tensor) -> None:
        loss = batch_loss(self._model, nn.functional.cross_entropy, None)
        self._gradients = gradients(self._model, loss, None, len(rows), trace=True)
        self._memory = {name: torch.zeros_like(rows) for name in ("first", "second")}
        self._memory["count"] = torch.zeros(len(rows), 1)
        first = 0
        for node in nodes:
            if node.site not in self._data:
                data = self._worker._data_of(node, int(sizes[node.replica, node.place]))
                self._data[node.site] = first, data
                first += len(self._data[node.site][1])
        sites = [site for _, site in self._data.values()]
        self._pool = torch.cat([site.inputs for site in sites]), torch.cat([site.targets for site in sites])

    def _stepped(self, rows: Tensor, slopes: Tensor, at_work: Tensor) -> Tensor:
        """Returns rows after a step of torch.optim.SGD or torch.optim.AdamW with its defaults."""
        if self._work.optimizer == "sgd":
            return rows - self._work.rate * slopes
        kept = self._memory
        kept["count"] = kept["count"] + at_work
        kept["first"] = torch.where(at_work, torch.lerp(kept["first"], slopes, 0.1), kept["first"])
        kept["second"] = torch.where(at_work, torch.lerp(kept["second"], slopes**2, 0.001), kept["second"])
        count = kept["count"].clamp(min=1)
        size = (kept["second"] / (1 - 0.999**count)).sqrt_() + 1e-8
        return rows * (1 - 0.01 * self._work.rate) - self._work.rate / (1 - 0.9**count) * kept["first"] / size


# Runs and tables ------------------------------------------------------------------------------------------------------


def measured(problem: Problem, work: LocalWork, algorithms: Algorithms) -> list[dict[str, Any]]:
    """Returns a row for each algorithm of a group."""
    with patch.object(oracle_module, "LocalWorker", partial(Together, work)):
        result = fm.train(
            problem.with_trainer(train_with(work)),
            fm.Ring(),
            list(algorithms.values()),
            rounds=work.rounds,
            seeds=SEEDS,
            placements="by-seed",
            measure_every=work.rounds,
            on_divergence="mark",
            count_bytes=False,
        )
    worst, average = result.values("worst"), result.values("mean")
    rows = []
    for k, name in enumerate(algorithms):
        of = slice(k * len(SEEDS), (k + 1) * len(SEEDS))
        diverged = sum(k * len(SEEDS) <= r < (k + 1) * len(SEEDS) for r in result.diverged)
        row = {"problem": problem.name, "work": str(work), "rounds": work.rounds, "algorithm": name}
        rows.append(row | {"worst": worst[of], "mean": average[of], "diverged": diverged})
    return rows


def table(rows: list[dict[str, Any]], problems: list[Problem], works: list[LocalWork], what: str) -> str:
    """Returns a Markdown table of the worst site or the mean in percent: a line per algorithm, a column per problem.

    A cell has the mean over these kinds of local work and over the placements, and the standard deviation over the
    placements. The last column says how far an algorithm is behind the best one at most, over problems and works."""
    cells = {(row["problem"], row["work"], row["algorithm"]): row[what] for row in rows}

    def values(problem: Problem, work: LocalWork, name: str) -> list[float]:
        return [100 * value for value in cells[problem.name, str(work), name]]

    names = [
        name
        for name in dict.fromkeys(row["algorithm"] for row in rows)
        if all((p.name, str(work), name) in cells for p in problems for work in works if work in p.works)
    ]
    lines = [f"| | {' | '.join(problem.name for problem in problems)} | largest gap to the best |"]
    lines.append("|---" * (len(problems) + 2) + "|")
    for name in names:
        shown, behind = [], []
        for problem in problems:
            found = {work: values(problem, work, name) for work in works if work in problem.works}
            for work, mine in found.items():
                behind.append(max(mean(values(problem, work, other)) for other in names) - mean(mine))
            spread = mean(stdev(mine) for mine in found.values())
            shown.append(f"{mean(mean(mine) for mine in found.values()):.1f} ± {spread:.1f}")
        lines.append(f"| {name} | {' | '.join(shown)} | {max(behind):.1f} |")
    return "\n".join(lines)


def main() -> None:
    given = write_or_show(__doc__).parse_args()
    path = RESULTS if given.show else given.write
    rows = json.loads(path.read_text()) if path.exists() else []
    if given.show:
        long = [problem for problem in SELECTION if LONG in problem.works]
        for title, problems, works in (
            ("Chosen on", SELECTION, WORKS),
            (f"In the long run ({LONG})", long, [LONG]),
            ("Confirmed on", HELD_OUT, WORKS),
        ):
            for measure in ("worst", "mean"):
                print(f"{title}: {measure}, %\n\n{table(rows, problems, works, measure)}\n")
        return
    known = {(row["problem"], row["work"], row["algorithm"]) for row in rows}
    for problem in [*SELECTION, *HELD_OUT]:
        n = len(problem.sites())
        for work in problem.works:
            for every in groups_of(problem, work, n):
                group = {name: one for name, one in every.items() if (problem.name, str(work), name) not in known}
                if group:
                    rows += (found := measured(problem, work, group))
                    path.write_text(json.dumps(rows, indent=1) + "\n")
                    for row in found:
                        print(*(row[key] for key in ("problem", "work", "algorithm")), end=": ")
                        print(f"{100 * mean(row['worst']):.1f}, {100 * mean(row['mean']):.1f}", flush=True)


if __name__ == "__main__":
    main()
