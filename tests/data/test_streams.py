"""Datasets that are read when a batch needs them give the runs that the same items in memory give."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

import fairmesh as fm
from fairmesh.data import streams
from fairmesh.data.rows import Ahead, Reader
from fairmesh.data.samples import Samples
from fairmesh.errors import LostProcess
from fairmesh.storage.state_tree import flatten_state
from fairmesh.training.cuda_graph import recorded_round
from fairmesh.training.loop import Training
from fairmesh.training.memory_estimate import footprint
from fairmesh.training.options import Options
from fairmesh.training.replicas import replicas_of
from tests import toys
from tests.refusals import missing_from, refused

OWN = torch.Generator().manual_seed(0)  # which fairmesh cannot seed


class Scans(Dataset):
    """Items that are computed from their number."""

    def __init__(self, k: int = 0, length: int = 20, labels: int = 2):
        self._k, self._length, self._labels, self.reads = k, length, labels, []

    def __len__(self):
        return self._length

    def __getitem__(self, i):
        self.reads.append(i)
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(1000 * self._k + i))
        return inputs, (i + self._k) % self._labels


class Broken(Scans):
    """One item fails in a way of the test's own."""

    def __init__(self, fails, at: int = 13):
        super().__init__(k=1, length=200)
        self._fails, self._at = fails, at

    def __getitem__(self, i):
        return self._fails(i) if i == self._at else super().__getitem__(i)


class Noisy(Scans):
    """Random transforms with all three generators."""

    def __getitem__(self, i):
        inputs, label = super().__getitem__(i)
        return inputs + torch.rand(4) + random.random() + np.random.rand(), label  # noqa: NPY002


def problem(sets, **settings) -> fm.Problem:
    torch.manual_seed(0)
    sites = [fm.Site(one, test=one, name=f"clinic {k}") for k, one in enumerate(sets)]
    return fm.Problem(torch.nn.Linear(4, 2), sites, **{"sampling": fm.Sampling(batch=3)} | settings).prepared


def streams_of(kind=Scans, count: int = 3, workers: int = 0, **settings) -> list[fm.data.Streamed]:
    return [fm.data.Streamed(kind(k), workers, **settings) for k in range(count)]


def trained(problem: fm.Problem, rounds: int = 4, **settings) -> fm.Result:
    return fm.train(problem, fm.Ring(), fm.ADGDA(primal_step=0.1), rounds, **settings)


def same(a: fm.Result, b: fm.Result) -> bool:
    return torch.equal(a.row(), b.row()) and a.final[0]["loss"] == b.final[0]["loss"]


@pytest.mark.parametrize(
    ("workers", "sampling", "objective"),
    [
        (0, fm.Sampling(3, "random", batches_per_step=2), fm.Objective()),
        (0, fm.Sampling(3, "shuffled"), fm.Objective(judged_on="held-out")),
        (0, fm.Sampling(3, "full"), fm.Objective(judged_on="validation")),
        (2, fm.Sampling(3, "random"), fm.Objective(judged_on="held-out")),
    ],
)
def test_streamed_run_is_bit_for_bit_the_one_in_memory(workers, sampling, objective):
    sets = [Scans(k, 20 + k) for k in range(3)]
    streamed = [fm.data.Streamed(s, workers, labels=[s[i][1] for i in range(len(s))]) for s in sets]
    settings = {"sampling": sampling, "objective": objective, "validation": Scans(7, 9)}
    held, *others = (
        trained(problem(given, **settings), seeds=[0, 1], measure_every=2)
        for given in (sets, streamed, [sets[0], streamed[1], sets[2]])
    )
    assert all(same(held, other) for other in others)


def test_splits_and_kept_sites_of_streams_are_read_by_their_rows():
    samples = Samples.of(fm.data.Streamed(Scans(length=30)), "a set")
    some = samples.take(torch.tensor([7, 3, 29])).take(torch.tensor([False, True, True]))
    whole = Samples.of(Scans(length=30), "a set")
    assert torch.equal(some.read(torch.arange(2)).inputs, whole.inputs[[3, 29]])
    kept = problem(streams_of()).keeping([1])
    assert kept.here == [1]


def test_streams_read_only_what_batches_need():
    sets = [Scans(k, length=10_000) for k in range(2)]
    one = problem([fm.data.Streamed(s) for s in sets])
    assert footprint(one, fm.algorithms.DSGD()).fixed < 1 << 26
    for s in sets:
        assert len(s.reads) < 100
        s.reads.clear()
    sites = [fm.Site(site.train, test=Scans()) for site in one.sites]
    trained(fm.Problem(torch.nn.Linear(4, 2), sites, sampling=fm.Sampling(3)), 5)
    assert all(len(s.reads) < 5 * 3 + 400 for s in sets)  # batches, and 256 for the best constant answer


def test_random_transforms_repeat_and_do_not_depend_on_the_workers():
    first, *others = (trained(problem(streams_of(Noisy, workers=workers)), 3) for workers in (0, 0, 2))
    assert all(same(first, other) for other in others)


def test_random_items_differ_by_round_and_not_between_evaluations_and_leave_the_process_s_generators_alone():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    samples, rows = Samples.of(fm.data.Streamed(Noisy()), "a set"), torch.tensor([4])
    samples.some()
    assert torch.equal(samples.read(rows).inputs, samples.read(rows).inputs)
    assert not torch.equal(samples.stream.read_here([4], [1])[0], samples.stream.read_here([4], [2])[0])
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert np.array_equal(np.random.get_state()[1], state[2])  # noqa: NPY002


def unreadable(i):
    raise FileNotFoundError(f"scan {i}.png")


def killed(i):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("fails", "workers", "error"), [(unreadable, 0, fm.BadInput), (killed, 1, LostProcess)])
def test_item_that_cannot_be_read_is_named_and_the_run_resumes_when_it_is_mended(fails, workers, error, tmp_path):
    def one(at: int) -> fm.Problem:
        sets = [Scans(0), Broken(fails, at), Scans(2)]
        sites = [fm.Site(fm.data.Streamed(s, workers), name=f"clinic {k}") for k, s in enumerate(sets)]
        torch.manual_seed(0)
        return fm.Problem(torch.nn.Linear(4, 2), sites, sampling=fm.Sampling(3, "cyclic"), test=Scans()).prepared

    whole, bad = trained(one(at=-1), 6), one(at=13)  # item 13 is in round 4
    assert 13 not in bad.sites[1].train.stream.seen_rows
    with refused("clinic 1", 13, "resume", error=error):
        trained(bad, 6, out=tmp_path, checkpoint_every=1)
    resumed = trained(one(at=-1), 6, out=tmp_path, resume=True)
    assert len(resumed.records) > 0
    assert torch.equal(whole.row(), resumed.row())


def test_worker_that_is_killed_once_is_replaced(tmp_path):
    def once(i):
        if not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return Scans(1)[i]

    sampling = fm.Sampling(3, "cyclic")
    found = [trained(problem([fm.data.Streamed(s, 2)], sampling=sampling), 6) for s in (Scans(1, 200), Broken(once))]
    assert (tmp_path / "killed").exists()
    assert torch.equal(found[0].row(), found[1].row())


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_that_is_asked_for_again_is_the_same(workers):
    reader = Reader([Samples.of(fm.data.Streamed(Noisy(), workers), "a set")])
    ahead = Ahead(reader, 1)

    def wanted(rounds: torch.Tensor) -> torch.Tensor:
        return torch.stack([rounds[:, None] + torch.arange(3), 5 * rounds[:, None] + torch.arange(3)], dim=1)

    def at(number: int) -> torch.Tensor:
        return ahead.at("batch", number, wanted)[0]

    for number in (0, 1, 2, 7):
        first = at(number)
        kept = first.clone()
        first.zero_()
        assert all(torch.equal(at(number).clone(), kept) for _ in range(2))


def test_streams_with_other_items_do_not_resume_a_run(tmp_path):
    trained(problem(streams_of()), 2, out=tmp_path)
    for sets in ([Scans(k) for k in (0, 1, 5)], [Scans(k, 20 + (k == 2)) for k in range(3)]):
        with refused("problem.data", error=fm.errors.CheckpointError):
            trained(problem([fm.data.Streamed(s) for s in sets]), 4, out=tmp_path, resume=True)


@pytest.mark.parametrize(
    ("fails", "named"),
    [
        (lambda i: (torch.zeros(5), 0), ("clinic 1", 1, "[5]", "collate")),
        (lambda i: (torch.full((4,), torch.nan), 0), ("clinic 1", 1, "not finite")),
        (lambda i: (torch.zeros(4), 2), ("clinic 1", "labels", "0..1")),
        (lambda i: (torch.rand(4, generator=OWN), 0), ("clinic 1", 0, "each time", "seeded")),
        (unreadable, ("clinic 1", "scan 1.png")),
        (lambda i: (torch.zeros(4), 0, "ward 3"), ("clinic 1", "subgroups")),
    ],
)
def test_bad_items_are_refused_before_round_0(fails, named):
    at = 0 if "each time" in named or "subgroups" in named else 1
    with refused(*named):
        problem([fm.data.Streamed(Scans()), fm.data.Streamed(Broken(fails, at))])


def test_label_that_the_model_does_not_know_is_named_when_it_is_read():
    bad = problem([fm.data.Streamed(Broken(lambda i: (torch.zeros(4), 2)))], sampling=fm.Sampling(20, "cyclic"))
    with refused("clinic 0", "item 13", "2 classes"):
        fm.train(bad, fm.Ring(), fm.algorithms.DSGD(0.1), 1)


def test_recorded_rounds_read_batches_that_are_handed_in_from_outside():
    def training() -> Training:
        one = problem(streams_of(), objective=fm.Objective(judged_on="held-out", rejoin=1.0))
        return Training(one, fm.Ring(), replicas_of([fm.ADGDA(primal_step=0.1)], [0, 1], None, 3), Options())

    plain, recorded = training(), training()
    state = plain.initial()
    for t in range(4):
        state = plain.advance(state, t)
    source = recorded.oracle.source
    source.capture(True)
    change, buffers = recorded_round(recorded.after_round, recorded.initial(), 0, torch.device("cpu"))
    for t in range(4):
        source.feed(t)
        change(*buffers)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(flatten_state(state).values(), buffers[:-1]))


def padded(items):
    images = torch.zeros(len(items), 1, 4, 4)
    for k, (image, _) in enumerate(items):
        images[k, :, : image.shape[1]] = image
    return images, torch.tensor([label for _, label in items])


def test_images_of_varying_size_train_by_a_collate_function():
    images = toys.Items(20, lambda i: (torch.full((1, 3 + i % 2, 4), i / 20.0), i % 2))
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 2))
    with refused("clinic", "collate"):
        problem([fm.data.Streamed(images)])
    sites = [fm.Site(fm.data.Streamed(images, collate=padded)) for _ in range(2)]
    assert trained(fm.Problem(model, sites, sampling=fm.Sampling(3)), 2).rounds == 2


@pytest.mark.parametrize(
    ("given", "limit", "words"),
    [
        (Scans, 1 << 30, ("all in memory",)),
        (Scans, 100, ("streamed", "Dataset of more than", "workers")),
        (lambda k: fm.data.Streamed(Scans(k), 1, prefetch=3), 100, ("as asked for", "workers = 1", "3 rounds")),
    ],
)
def test_large_datasets_are_streamed_and_the_run_says_why(given, limit, words, monkeypatch):
    monkeypatch.setattr(streams, "HELD_UP_TO", limit)
    said = []
    trained(problem([given(k) for k in range(2)]), 1, announce=said.append)
    assert any(not missing_from(text, *words) for text in said)


def test_labels_are_those_of_the_dataset_if_it_keeps_them_apart():
    dataset = Scans(length=30)
    dataset.targets = [k % 2 for k in range(30)]
    some = Samples.of(fm.data.Streamed(Subset(dataset, [5, 2, 9])), "a set")
    assert some.labels.tolist() == [1, 0, 1]
    assert some.class_counts(2) == [1, 2]
    dataset.targets = [7] * 30  # something else
    assert Samples.of(fm.data.Streamed(dataset), "a set").labels is None
    with refused("labels", "item 0", 7):
        assert Samples.of(fm.data.Streamed(dataset, labels=[7] * 30), "a set").labels


@pytest.mark.parametrize(
    ("dataset", "settings", "named"),
    [
        (Scans(), {"workers": -1}, ("workers", -1)),
        (Scans(), {"prefetch": 0}, ("prefetch", 0)),
        (Scans(), {"labels": [1]}, ("labels", 1, 20)),
        (torch.utils.data.DataLoader(Scans()), {}, ("DataLoader", "dataset")),
        ((torch.zeros(3), torch.zeros(3)), {}, ("tuple", "memmap")),
    ],
)
def test_streamed_refuses_what_has_no_items_by_index_and_settings_out_of_range(dataset, settings, named):
    with refused(*named):
        fm.data.Streamed(dataset, **settings)


def test_references_of_streamed_sites_are_trained_but_for_models_of_their_own():
    one = problem(streams_of(count=2))
    compared = fm.compare_with_references(
        one, fm.Ring(), fm.algorithms.DSGD(0.1), 2, references=["local", "pooled", "constant"]
    )
    assert sorted(compared.references) == ["constant", "pooled"]
    assert missing_from(compared.failed["local"], "clinic 0", "memory") == []


def test_personalization_and_balanced_weights_say_that_they_need_samples_in_memory():
    one = problem(streams_of(count=2))
    with refused("personalization", "memory", "memmap"):
        trained(one, 1, personalization=fm.personalization.Mixture())
    with refused("balanced", "labels="):
        problem([fm.data.Streamed(Scans())], loss=fm.losses.CrossEntropy(class_weights="balanced"))


SCRIPT = """
    import os, resource, sys
    import torch
    import fairmesh as fm

    class Scans(torch.utils.data.Dataset):  # 1 MB each
        def __init__(self, length):
            self.length = length
        def __len__(self):
            return self.length
        def __getitem__(self, i):
            if os.environ.get("PIDS"):
                open(os.environ["PIDS"], "a").write(f"{os.getpid()}\\n")
            return torch.full((250_000,), i / 2_000), i % 2

    test = fm.data.Streamed(Scans(100))
    sites = [fm.Site(fm.data.Streamed(Scans(2_000), workers=2), test=test) for _ in range(3)]
    used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + (600 << 20),) * 2)
    problem = fm.Problem(torch.nn.Linear(250_000, 2), sites, sampling=fm.Sampling(8))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), int(sys.argv[1]), measure_every=1000, announce=print)
    print("rounds", result.rounds, "grown", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@pytest.mark.slow
def test_sites_larger_than_the_memory_limit_train_in_the_memory_of_batches():
    run = [sys.executable, "-c", textwrap.dedent(SCRIPT), "5"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert "rounds 5" in done.stdout, done.stderr  # 6 GB of items, under 600 MB
    assert "5.59 GiB" in done.stdout
    assert int(done.stdout.split("grown")[1]) < 600


@pytest.mark.slow
def test_workers_end_when_the_process_that_trains_is_killed(tmp_path):
    pids = tmp_path / "pids"
    run = [sys.executable, "-c", textwrap.dedent(SCRIPT), "100000"]
    parent = subprocess.Popen(run, env=os.environ | {"PIDS": str(pids)}, stdout=subprocess.DEVNULL)
    while not pids.exists() or len(set(pids.read_text().split())) < 3:
        assert parent.poll() is None
        time.sleep(0.2)
    parent.kill()
    parent.wait()
    workers = set(map(int, pids.read_text().split())) - {parent.pid}
    for _ in range(100):
        workers = {pid for pid in workers if Path(f"/proc/{pid}").exists()}
        if not workers:
            return
        time.sleep(0.2)
    raise AssertionError(f"workers {workers} are left")
