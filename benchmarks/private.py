"""`python -m benchmarks private`: times a round of a private run next to a plain one, at the paper's batch sizes."""

import dataclasses
import statistics
from collections.abc import Iterator

import torch

from benchmarks.rounds import SETTINGS, CapturedRounds, Setting, device_times, host_times
from fairmesh.privacy.settings import Privacy
from fairmesh.problems.prepared import Prepared
from fairmesh.topology.graphs import Ring
from fairmesh.training.loop import Training
from fairmesh.training.options import Options, device_of
from fairmesh.training.plan import Plan

PRIVACY = Privacy(epsilon=4, delta=1e-5)
CASES = ("logistic-10", "fc-50", "cifar-cnn-20")


@dataclasses.dataclass(frozen=True)
class PrivateTiming:
    """Milliseconds of a round: medians, without and with privacy."""

    case: str
    units: int  # that a draw has at most
    plain_ms: float
    private_ms: float
    ratio: float


def timings(device: str, names: list[str] | None = None, fuse: bool = False) -> Iterator[PrivateTiming]:
    """Yields the timing of each case."""
    for name in names or CASES:
        yield timing(name, SETTINGS[name], device, fuse)


def timing(name: str, setting: Setting, device: str, fuse: bool = False) -> PrivateTiming:
    """Returns the timing of a case. On a CPU both take turns, so that other load slows them alike. On a GPU, rounds are
    fused if asked for, as runs of 3,000 rounds and more are."""
    plain = setting.problem()
    few = torch.arange(8)  # a private run has test rows of its own, though here nothing is measured
    tested = [dataclasses.replace(site, test=site.train.take(few)) for site in plain.sites]
    private = plain.changed(sites=tested, privacy=PRIVACY)
    plan = Plan.of(private, Ring(), setting.algorithm(), 400)
    assert plan.private is not None  # noqa: S101
    steps = [_step(plain, setting, device, False, fuse), _step(private, setting, device, True, fuse)]
    if device_of(device).type == "cuda":
        times = [device_times(step, 300) for step in steps]
    else:
        times = host_times(steps, 5, 12, device_of(device))
    first, second = map(statistics.median, times)
    most = max(release.most for release in plan.private.releases)
    return PrivateTiming(name, most, first, second, second / first)


def _step(problem: Prepared, setting: Setting, device: str, private: bool, fuse: bool):
    """Returns a function that runs one more round."""
    options = Options(device=device, count_bytes=True)
    plan = Plan.of(problem, Ring(), setting.algorithm(), 400, options=options)
    secret = plan.private.with_secrets(0) if plan.private and private else None
    training = Training(plan.problem, Ring(), plan.replicas, options, private=secret)
    if device_of(device).type == "cuda":
        captured = CapturedRounds(training.after_round, training.initial(), 0, device_of(device), fuse)
        return lambda kept=training: captured.advance()  # a graph reads the memory of what it was captured from
    state, done = training.initial(), 0

    def step() -> None:
        nonlocal state, done
        state, done = training.advance(state, done), done + 1

    return step
