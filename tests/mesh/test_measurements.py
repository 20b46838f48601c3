"""Sites measure every few rounds and tell each other; all have the same table, and choose the same best round."""

import dataclasses
import hashlib
import json
import time

import pytest
import torch
from safetensors.torch import load_file

import fairmesh as fm
from fairmesh.experiment import load_experiment
from fairmesh.mesh.announcements import KINDS, wrong
from fairmesh.mesh.node import measurements
from fairmesh.mesh.node.claims import CONTRADICTIONS
from fairmesh.mesh.node.measurements import BEST, PROGRESS, TABLE, Measurements, Schedule
from fairmesh.mesh.node.watching import Aside
from fairmesh.mesh.wire.bulletin import Announcement, Bulletin
from fairmesh.mesh.wire.links import Links
from fairmesh.storage.run_folder import read_records
from fairmesh.training.best_round import RoundScores, decided_in_words
from tests.mesh import fleet
from tests.mesh.credentials import terms_of
from tests.mesh.experiments import experiment
from tests.mesh.lives import Lives, Point
from tests.mesh.scenarios import Run
from tests.refusals import missing_from

NAMES = ("a", "b", "c")
SAMPLES = torch.randn(6, 2), torch.arange(6) % 2
PROBLEM = fm.Problem(torch.nn.Linear(2, 2), [fm.Site(SAMPLES, test=SAMPLES, name=name) for name in NAMES]).prepared
SCHEDULE = Schedule(rounds=50, every=10, best_by="worst", seed=0)
DUE = (0, 10, 20, 30, 40, 50)
ACCURACIES = {
    "a": (0.1, 0.5, 0.9, 0.8, 0.7, 0.6),
    "b": (0.1, 0.6, 0.8, 0.9, 0.9, 0.9),
    "c": (0.1, 0.7, 0.7, 0.6, 0.5, 0.4),
}


@pytest.fixture(autouse=True)
def unsmoothed(monkeypatch):
    """Compares each measurement by itself, so that the best round can be read from the numbers."""
    monkeypatch.setattr(RoundScores, "smoothing", 0.0)


class Board:
    """What all sites have announced; `lost` sites hear nothing."""

    def __init__(self):
        self.said, self.lost, self.sizes = {}, set(), []

    def of(self, own):
        return Half(self, own)


class Half:
    """The board as one site uses it."""

    terms = terms_of(NAMES)

    def __init__(self, board, own):
        self._board, self._own, self._heard = board, own, {}

    def announce(self, kind, body):
        assert kind == "measured"
        text = json.dumps(body)
        self._board.sizes.append(len(text))
        body = json.loads(text)
        assert wrong("measured", body, self.terms.by(self._own)) == ""
        self._board.said[self._own] = body

    def entry(self, site, kind):
        body = self.of(site, kind)
        return Announcement(site, kind, 0, body, b"") if body else None

    def superseded(self):
        return []

    def of(self, site, kind):
        if self._own not in self._board.lost:
            self._heard = dict(self._board.said)
        return self._heard.get(site, {})


class Site:
    """One site's measurements, which can be started again."""

    def __init__(self, folder, name, board, schedule=SCHEDULE, landmarks=(), problem=PROBLEM):
        self.folder, self.name, self.board, self.schedule = folder / name, name, board, schedule
        self.folder.mkdir()
        self.landmarks, self.problem, self.warnings = landmarks, problem, []
        self.enter()

    def enter(self, generation=1, start=0, names=NAMES):
        report = lambda level, what, **fields: self.warnings.append(fields)  # noqa: E731
        self.table = Measurements(self.folder, self.name, self.board.of(self.name), Aside(report))
        here = [site for site in self.problem.sites if site.name in names]
        problem = fm.Problem(self.problem.initial.model, here).prepared
        self.table.enter(generation, start, self.schedule, problem, names, lambda: self.landmarks)

    def measure(self, done, accuracy, loss=1.0):
        self.table.add(done, [accuracy, loss], 0.5, (8.0 * done, done))
        self.table.offer(done, torch.full((3,), float(done)))

    def lines(self):
        return read_records(self.folder / PROGRESS)

    def models(self):
        return sorted(int(path.stem.removeprefix("round-")) for path in (self.folder / BEST).glob("*"))


@pytest.fixture
def board():
    return Board()


@pytest.fixture
def sites(tmp_path, board):
    return {name: Site(tmp_path, name, board) for name in NAMES}


def exchange(sites, times=3):
    for _ in range(times):
        for site in sites.values():
            site.table.exchange()


def measured(sites, until=50, accuracies=ACCURACIES, since=0):
    for k, done in enumerate(DUE):
        if since <= done <= until:
            for name, site in sites.items():
                site.measure(done, accuracies[name][k])
            exchange(sites)


def ended(sites):
    open_questions = []
    for _ in range(4):
        open_questions = [site.table.open_questions() for site in sites.values()]
    assert open_questions == [[]] * len(sites)
    return {site.table.best() for site in sites.values()}


def test_every_site_writes_a_line_per_measured_round_with_all_sites_values(sites):
    measured(sites)
    files = {(site.folder / PROGRESS / "metrics.jsonl").read_bytes() for site in sites.values()}
    assert len(files) == 1
    lines = sites["b"].lines()
    assert [line["round"] for line in lines] == list(DUE)
    line = lines[2]["accuracy"]
    assert (line["sites"], line["worst"], line["best"]) == ([0.9, 0.8, 0.7], 0.7, 0.9)
    assert line["mean"] == pytest.approx(0.8)
    assert lines[2]["lambda"] == pytest.approx([1 / 3] * 3)  # shares, although each site says 0.5
    assert (lines[2]["bytes_busiest_node"], lines[2]["bytes_total"]) == (20, 60)


def test_weights_that_have_no_shares_are_left_out(sites):
    for name, site in sites.items():
        site.table.add(0, [0.5, 1.0], -1.0 if name == "b" else 0.5, (0.0, 0))
    exchange(sites)
    assert ["lambda" in line for line in sites["a"].lines()] == [False]
    assert sites["a"].table.weights() is None


def test_round_that_a_site_has_not_measured_yet_has_no_line(sites):
    for name in "ab":
        sites[name].measure(0, 0.5)
    exchange(sites)
    assert sites["a"].lines() == []


def test_announcements_that_are_lost_are_repeated_until_they_are_acknowledged(sites, board):
    board.lost = {"c"}
    c = {"c": sites.pop("c")}
    measured(sites, until=30)
    board.lost = set()
    measured(c, until=30)
    sites |= c
    exchange(sites)
    assert [line["round"] for line in sites["c"].lines()] == list(DUE[:4])
    exchange(sites)
    assert board.said["a"]["rows"] == []  # all have them


@pytest.mark.slow
def test_long_run_keeps_announcements_small_and_loses_no_row(tmp_path, board):
    schedule = Schedule(rounds=1000, every=1, best_by="worst", seed=0)
    sites = {name: Site(tmp_path, name, board, schedule) for name in NAMES}
    for site in sites.values():
        for done in range(1001):
            site.table._rows[site.name][done] = [done, 0.12345678901234567, 1 / 3, 0.1 + 0.2, 1e9 * done, done, None]
    exchange(sites, 24)
    assert max(board.sizes) < KINDS["measured"].at_most / 2
    assert [len(site.table.records) for site in sites.values()] == [1001] * 3


def test_nothing_is_announced_without_news(sites, board):
    measured(sites, until=20)
    exchange(sites)
    count = len(board.sizes)
    exchange(sites, 20)
    assert len(board.sizes) == count


def test_restart_keeps_rows_as_they_were_and_adds_no_line_twice(sites):
    measured(sites, until=20)
    with open(sites["a"].folder / TABLE, "ab") as file:
        file.write(b'{"site": "b", "row": [30, 0.')  # a crash cut this short
    sites["a"].enter()
    sites["a"].measure(20, 0.123)  # another machine measures other last digits
    exchange(sites)
    assert [line["round"] for line in sites["a"].lines()] == [0, 10, 20]
    assert sites["a"].lines() == sites["b"].lines()
    measured(sites)
    assert sites["a"].lines() == sites["b"].lines()
    assert len(sites["a"].lines()) == 6


def test_going_back_drops_later_rounds_and_puts_their_lines_aside(sites):
    measured(sites, until=40)
    before = sites["a"].lines()
    for site in sites.values():
        site.enter(generation=2, start=15)
    assert [line["round"] for line in sites["a"].lines()] == [0, 10]
    assert sites["a"].models() == [10] or sites["a"].models() == []
    aside = sites["a"].folder / "metrics-generation-1.jsonl"
    assert [json.loads(line)["round"] for line in aside.read_text().splitlines()] == [one["round"] for one in before]
    other = {name: tuple(value / 2 for value in values) for name, values in ACCURACIES.items()}
    measured(sites, accuracies=other, since=20)
    assert sites["a"].lines() == sites["c"].lines()
    assert [line["accuracy"]["worst"] for line in sites["a"].lines()][:3] == [0.1, 0.5, 0.35]


def test_generation_that_restores_a_site_after_a_measured_round_leaves_that_round_out(sites):
    """Each node measures the state with which it begins. The others would never hear of that row."""
    measured(sites, until=20)
    for site in sites.values():
        site.schedule = SCHEDULE._replace(since=21)
        site.enter(generation=2, start=20)
    measured(sites, since=20)
    assert [line["round"] for line in sites["a"].lines()] == [30, 40, 50]
    first, *others = (site.table.digests() for site in sites.values())
    assert others == [first] * 2
    assert ended(sites) == {30}


def test_announcement_of_an_earlier_generation_is_not_mixed_in(sites):
    measured(sites, until=20)
    sites["a"].enter(generation=2, start=0)
    sites["a"].measure(0, 0.2)
    exchange({"a": sites["a"]})
    assert sites["a"].lines()[1:] == []


def test_rows_of_a_site_that_left_are_dropped_so_that_curves_are_over_the_same_sites(sites, board):
    measured(sites, until=10)
    del sites["c"]
    measured(sites, until=20, since=20)
    for site in sites.values():
        site.enter(generation=2, start=25, names=("a", "b"))
    exchange(sites)
    assert sites["a"].lines() == sites["b"].lines()
    assert [line["accuracy"]["sites"] for line in sites["a"].lines()] == [[0.1, 0.1], [0.5, 0.6], [0.9, 0.8]]


def at_all(*accuracies):
    return dict.fromkeys(NAMES, accuracies)


LUCKY = at_all(0.1, 0.9, 0.2, 0.8, 0.8, 0.3)
UNFAIR = at_all(0, 0.9, 0.6, 0, 0, 0) | {"c": (0, 0.5, 0.6, 0, 0, 0)}


@pytest.mark.parametrize(
    ("accuracies", "best_by", "smoothing", "best"),
    [
        pytest.param(ACCURACIES, "worst", 0.0, 20, id="worst"),
        pytest.param(ACCURACIES, "mean", 0.0, 20, id="mean"),
        pytest.param(ACCURACIES, "last", 0.0, None, id="last"),
        pytest.param(UNFAIR, "worst", 0.0, 20, id="worst differs from mean"),
        pytest.param(UNFAIR, "mean", 0.0, 10, id="mean differs from worst"),
        pytest.param(at_all(0.1, 0.2, 0.2, 0.2, 0.2, 0.3), "worst", 0.0, 50, id="last round is the best"),
        pytest.param(at_all(0.1, 0.2, 0.2, 0.2, 0.1, 0.1), "worst", 0.0, 30, id="last of ties"),
        pytest.param(LUCKY, "worst", 0.0, 10, id="lucky"),
        pytest.param(LUCKY, "worst", 0.5, 40, id="not a lucky one"),
        pytest.param(at_all(float("nan"), 0.2, 0.1, 0.1, 0.1, 0.1), "worst", 0.0, 10, id="never NaN"),
    ],
)
@pytest.mark.quick_cases("all")
def test_all_sites_choose_the_same_best_round(tmp_path, board, monkeypatch, accuracies, best_by, smoothing, best):
    monkeypatch.setattr(RoundScores, "smoothing", smoothing)
    sites = {name: Site(tmp_path, name, board, SCHEDULE._replace(best_by=best_by)) for name in NAMES}
    measured(sites, accuracies=accuracies)
    assert ended(sites) == {best}
    if accuracies is ACCURACIES:
        assert all(site.models() == ([] if best is None else [best]) for site in sites.values())
    if best not in (None, DUE[-1]):  # a node has the last one in its state
        assert {float(site.table.model(best)[0]) for site in sites.values()} == {best}
    assert sites["a"].table.chosen_on == "test"


def checkpointed(sites):
    """Measures all rounds but the last, with a checkpoint after each; yields the rounds."""
    for done in DUE[:-1]:
        measured(sites, done, since=done)
        for site in sites.values():
            site.table.store_models()
            site.table.drop_models()
        yield done


def test_only_models_that_can_still_be_asked_for_are_kept(sites):
    for _ in checkpointed(sites):
        assert all(len(site.models()) <= 2 for site in sites.values())
    assert sites["a"].models() == [20]


def test_best_round_before_a_kept_checkpoint_is_kept_for_going_back(tmp_path, board):
    sites = {name: Site(tmp_path, name, board, landmarks=(0, 15, 30)) for name in NAMES}
    assert tuple(checkpointed(sites)) == DUE[:-1]
    assert sites["a"].models() == [10, 20]
    for site in sites.values():
        site.enter(generation=2, start=15)
    bad = {name: (*values[:2], 0.0, 0.0, 0.0, 0.0) for name, values in ACCURACIES.items()}
    measured(sites, accuracies=bad)
    assert ended(sites) == {10}


def test_round_whose_model_one_site_has_lost_is_not_chosen(sites):
    measured(sites, until=30)
    for site in sites.values():
        site.table.store_models()
    for path in (sites["c"].folder / BEST).glob("round-000000000020*"):
        path.write_bytes(b"damaged")
    sites["c"].enter()
    assert any("damaged" in str(fields) for fields in sites["c"].warnings)
    measured(sites, since=40)
    assert ended(sites) == {50}  # the only one that all have: each site keeps what was best


def test_site_whose_rows_are_missing_is_named_at_the_end(sites):
    measured({name: sites[name] for name in "ab"})
    exchange(sites)
    assert sites["a"].table.open_questions() == ["c"]


def test_what_was_announced_at_the_end_is_the_same_after_a_restart(sites):
    measured(sites)
    sites["a"].table.open_questions()
    announced = sites["a"].board.said["a"]["kept"]
    sites["a"].enter()
    for k, done in enumerate(DUE):
        sites["a"].measure(done, ACCURACIES["a"][k])  # it repeats its rounds
    assert ended(sites) == {20}
    assert sites["a"].board.said["a"]["kept"] == announced == [20]


def test_site_that_tells_two_things_is_named_and_the_digests_show_who_heard_what(sites, board):
    measured(sites, until=20)
    rows = sites["b"].table._rows["b"]
    rows[20] = [20, 0.99, *rows[20][2:]]
    board.said["b"] = board.said["b"] | {"rows": [rows[20]]}
    sites["a"].table.exchange()
    assert [fields["site"] for fields in sites["a"].warnings] == ["b"]
    assert missing_from(sites["a"].warnings[0]["reason"], "20", "before") == []
    assert sites["a"].lines()[2]["accuracy"]["sites"][1] == 0.8
    here, there = sites["a"].table.digests(), sites["b"].table.digests()
    assert [name for name in NAMES if here[name] != there[name]] == ["b"]


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("rows", [[0, 0.5, 1.0, 0.5, 0, 0, None], [7, 0.5, 1.0, 0.5, 0, 0, None]], [0]),
        ("columns", ["loss", "weight", "bits", "bytes", "sent"], []),
    ],
    ids=["between two measured rounds", "other columns"],
)
@pytest.mark.quick_cases("all")
def test_rows_of_other_rounds_or_columns_are_ignored_and_their_site_is_named(sites, board, field, value, accepted):
    sites["b"].measure(0, 0.5)
    sites["b"].table.exchange()
    board.said["b"][field] = value
    sites["a"].table.exchange()
    assert sites["a"].warnings[0]["site"] == "b"
    assert missing_from(sites["a"].warnings[0]["reason"], *(["loss, weight"] if field == "columns" else [])) == []
    assert list(sites["a"].table._rows.get("b", {})) == accepted


@pytest.mark.parametrize("line", [
    '{"site": "b", "row": [10, 0.5, 1.0, 0.5, 0, null]}', f'{{"site": "b", "row": [10, 0.5, 1.0, 0.5, 0, {10**400}]}}',
    '{"site": "b", "row": [10, 0.5, 1.0, 0.5, 0, NaN]}', '{"site": "b", "row": 7}', '{"site": "b"}', "[]", "%&/",
])  # fmt: skip
def test_lines_on_disk_that_cannot_be_true_are_passed_over_and_named_at_every_start(sites, line):
    measured(sites, until=10)
    path = sites["a"].folder / TABLE
    kept = [one for one in path.read_text().splitlines() if '"b", "row": [10' not in one]
    path.write_text("\n".join([*kept[:2], line, *kept[2:]]) + "\n")
    sites["a"].enter()
    assert sites["a"].warnings[-1]["site"] in ("a", "b")
    assert missing_from(sites["a"].warnings[-1]["reason"], "line") == []
    assert [record["round"] for record in sites["a"].lines()] == [0]
    measured(sites)  # b tells the row again
    assert sites["a"].lines() == sites["b"].lines()
    assert len(sites["a"].lines()) == 6


def test_view_of_the_run_that_fails_does_not_end_the_node(sites):
    def fails(records):
        raise ZeroDivisionError("of a consumer that only shows")

    for site in sites.values():
        site.table.after_record = fails
    measured(sites)
    assert [missing_from(fields["reason"], "ZeroDivisionError") for fields in sites["a"].warnings] == [[]]
    assert ended(sites) == {20}


def test_validation_data_decides_if_there_is_some(tmp_path, board):
    held = [fm.Site(SAMPLES, test=SAMPLES, validation=SAMPLES, name=name) for name in NAMES]
    problem = fm.Problem(PROBLEM.initial.model, held).prepared
    sites = {name: Site(tmp_path, name, board, problem=problem) for name in NAMES}
    for k, done in enumerate(DUE):
        for site in sites.values():
            site.table.add(done, [k / 10, 1.0, (0.1, 0.9, 0.5, 0.5, 0.5, 0.5)[k], 1.0], None, (0.0, 0))
            site.table.offer(done, torch.zeros(3))
    assert ended(sites) == {10}
    assert sites["a"].table.chosen_on == "validation"
    assert sites["a"].table.records[1]["validation"]["accuracy"]["worst"] == 0.9


STEPS = {"primal_step": 0.02, "dual_step": 0.01, "consensus_step": 0.5}
OVERFITTING = experiment(
    200,
    algorithm={"name": "ad-gda", "compressor": {"name": "quantize", "bits": 6}} | STEPS,
    data={"name": "import", "path": "few.py:sites"},
    model={"name": "import", "path": "few.py:Wide"},
    loss="squared-error",
    options={"measure_every": 4, "checkpoint_every": 15},
)
FEW = """
import torch
import fairmesh as fm

WIDTH = 60

class Wide(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Linear(WIDTH, 1))

def sites():
    def noisy(seed, count):
        draws = torch.Generator().manual_seed(seed)
        inputs = torch.randn(count, WIDTH, generator=draws)
        return inputs, inputs[:, :1] + 2 * torch.randn(count, 1, generator=draws)
    return [fm.Site(noisy(k, 12), test=noisy(k + 100, 60), name=f"s{k}") for k in range(3)]
"""


def _overfitting(folder):
    folder.mkdir()
    (folder / "experiment.toml").write_text(OVERFITTING)
    (folder / "few.py").write_text(FEW)
    fleet.provisioned(folder, folder / "experiment.toml", NAMES)
    return folder


def _files(folder):
    """Returns the result of each site, file by file; the same at all of them."""
    results = [folder / name / "state" / "result" for name in NAMES]
    names = sorted(path.name for path in results[0].iterdir())
    found = {name: {(result / name).read_bytes() for result in results} for name in names}
    assert all(len(contents) == 1 for contents in found.values()), found.keys()
    return {name: contents.pop() for name, contents in found.items()}


def _smoothly_best(rounds, losses):
    """Returns the round whose worst loss is least, if each earlier measurement of a site counts half as much."""
    worst = {}
    for t, done in enumerate(rounds):
        weights = [0.5 ** (t - s) for s in range(t + 1)]
        sums = (sum(w * x for w, x in zip(weights, site)) for site in zip(*losses[: t + 1]))
        worst[done] = max(sums) / sum(weights)
    return min(worst, key=lambda done: worst[done])


@pytest.mark.slow
def test_run_that_is_best_early_gives_that_round_at_every_site_also_after_crashes(tmp_path, monkeypatch):
    """Few rows and many columns: the test loss falls, then rises."""
    monkeypatch.undo()  # measurements are smoothed, as usual
    with Lives(_overfitting(tmp_path / "calm"), list(NAMES)) as calm:
        calm.start_all()
        calm.finish(120)
    expected = _files(calm.folder)
    points = {
        "a": [Point("after checkpoint", 60), Point("computed", 200)],
        "b": [Point("before checkpoint", 100)],
        "c": [Point("result confirmed", 200)],
    }
    with Lives(_overfitting(tmp_path / "crashed"), list(NAMES), points) as crashed:
        crashed.start_all()
        crashed.finish(200)
    assert _files(crashed.folder) == expected
    summary = json.loads(expected["summary.json"])
    (best,) = summary["best_round"]
    assert 0 < best < 150
    assert (summary["best_by"], summary["best_chosen_on"]) == ("worst", "test")
    lines = [json.loads(line) for line in expected["metrics.jsonl"].decode().splitlines()]
    assert [line["round"] for line in lines] == list(range(0, 201, 4))
    assert best == _smoothly_best(
        [line["round"] for line in lines[:-1]], [line["loss"]["sites"] for line in lines[:-1]]
    )
    end = lines[-1]
    assert end["best_model"]["loss"]["worst"] < end["loss"]["worst"]
    # The best model is the average of the sites' models of that round, as a simulation that ends there has it.
    shorter = dataclasses.replace(load_experiment(crashed.folder / "experiment.toml"), rounds=best)
    simulated = fm.run(shorter, process_group=fleet.KnowingSecrets(NAMES))
    found = load_file(crashed.folder / "a" / "state" / "result" / "model-best.safetensors")
    for name, tensor in simulated.state_dict().items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_metrics_are_there_during_the_run_and_after_a_site_left(tmp_path):
    """c stops for good; a and b go on without it, with curves over the two of them."""
    states = {name: tmp_path / name / "state" for name in NAMES}
    (tmp_path / "few.py").write_text(FEW)

    def slow(point, step):
        if point == "computed":
            time.sleep(0.02)

    with Run(tmp_path, list(NAMES), OVERFITTING) as run:
        run.start("a", "b")
        run.start("c", observe=slow)  # the others wait for it, and so it does not say that it waits for them
        metrics = states["a"] / PROGRESS / "metrics.jsonl"
        run.until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5, 90)
        assert all(len(line["loss"]["sites"]) == 3 for line in read_records(metrics.parent))
        run.crash("c")
        run.until(lambda: run.status("a")["paused_for"][-1:] == ["c"], 90)
        assert run.status("a")["seconds_left"] is None
        run.vote("a", "b", out=["c"])
        run.end("a", "b")
    both = [(states[name] / "result" / "metrics.jsonl").read_bytes() for name in "ab"]
    assert both[0] == both[1]
    lines = [json.loads(line) for line in both[0].decode().splitlines()]
    assert [line["round"] for line in lines] == list(range(0, 201, 4))
    assert all(len(line["loss"]["sites"]) == 2 for line in lines)
    aside = states["a"] / "metrics-generation-1.jsonl"
    assert len(json.loads(aside.read_text().splitlines()[0])["loss"]["sites"]) == 3


# Running hashes of messages


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _measured_with_hashes(sites, until, of=lambda sender, receiver, done: _hashed(f"{sender} {done}")):
    """Lets all sites measure, each with the hashes of what it sent, and of what came from the others."""
    for done in (due for due in DUE if due <= until):
        for name, site in sites.items():
            came = {other: of(other, name, done) for other in NAMES if other != name}
            site.table.add(done, [0.5, 1.0], 0.5, (8.0 * done, done), _hashed(f"{name} {done}"), came)
    exchange(sites)


def _blamed(sites) -> dict[str, dict[str, tuple]]:
    return {name: {site: one[:2] for site, one in found.table.contradicted.items()} for name, found in sites.items()}


def test_site_that_sent_one_neighbour_something_else_is_named_there_with_the_rounds_also_after_a_restart(sites):
    def lying(sender, receiver, done):
        return _hashed(f"{sender} {done}{'!' if (sender, receiver) == ('b', 'a') and done > 10 else ''}")

    _measured_with_hashes(sites, 40, lying)
    assert _blamed(sites) == {"a": {"b": (10, 20)}, "b": {}, "c": {}}
    assert sites["a"].table.contradicted["b"].signed == sites["c"].table.signed_by("b", 20) == _hashed("b 20")
    assert sites["c"].table.agrees_with("b", 20)
    assert not sites["a"].table.agrees_with("b", 20)
    sites["a"].enter()
    assert _blamed(sites)["a"] == {"b": (10, 20)}


def test_honest_sites_are_never_blamed_after_restarts_or_in_another_generation(sites):
    """In which hashes begin anew: those of rounds before belong to messages that nobody has any more."""
    _measured_with_hashes(sites, 30)
    sites["a"].enter()
    for site in sites.values():
        site.enter(generation=2, start=20)
    del sites["b"].table._rows["b"][20]  # it measures the first round again, with hashes of this generation
    again = lambda sender, receiver, done: _hashed(f"{sender} {done} again")  # noqa: E731
    for done in (20, 30):
        for name, site in sites.items():
            came = {other: again(other, name, done) for other in NAMES if other != name}
            site.table.add(done, [0.5, 1.0], 0.5, (8.0 * done, done), again(name, "", done), came)
    exchange(sites)
    sites["b"].enter(generation=2, start=20)
    assert _blamed(sites) == {"a": {}, "b": {}, "c": {}}
    assert sites["b"].table.agrees_with("a", 30)


def test_site_that_does_not_know_its_hash_is_not_compared_and_not_blamed(sites):
    for done in (0, 10):
        sites["b"].table.add(done, [0.5, 1.0], 0.5, (0.0, 0))
    sites["a"].table.add(10, [0.5, 1.0], 0.5, (0.0, 0), _hashed("a"), {"b": _hashed("b")})
    exchange(sites)
    assert _blamed(sites) == {"a": {}, "b": {}, "c": {}}
    assert sites["a"].table.unsigned() == sites["c"].table.unsigned() == ["b"]  # which all name


def test_hash_that_the_disk_has_changed_blames_nobody(sites):
    _measured_with_hashes(sites, 10)
    path = sites["a"].folder / TABLE
    came = f'"b": "{_hashed("b 10")}"'  # not the one that b has signed
    assert came in path.read_text()
    path.write_text(path.read_text().replace(came, f'"b": "{_hashed("b 11")}"'))
    sites["a"].enter()
    assert _blamed(sites)["a"] == {}
    exchange(sites)
    assert _blamed(sites)["a"] == {}


def test_site_that_signs_two_hashes_of_one_round_is_named_with_both_announcements(sites, board):
    _measured_with_hashes(sites, 20)
    row = sites["b"].table._rows["b"][20]
    board.said["b"] = board.said["b"] | {"rows": [[*row[:-1], _hashed("another")]]}
    exchange(sites)
    for name in "ac":
        (found,) = sites[name].table.contradicted.values()
        assert found == (10, 20, _hashed("b 20"), _hashed("another"), True)
        (proof,) = map(json.loads, (sites[name].folder / CONTRADICTIONS).read_text().splitlines())
        assert [one["site"] for one in proof["announcements"]] == ["b", "b"]
        assert [one["body"]["rows"][-1][-1] for one in proof["announcements"]] == [_hashed("b 20"), _hashed("another")]
    sites["a"].enter()
    assert sites["a"].table.contradicted["b"].both


# Whose numbers decide


def test_result_says_whose_numbers_chose_the_best_round_and_which_it_would_be_without_each_site(sites):
    """c says that it is bad in all rounds but the second, so that this one is chosen for all."""
    lied = ACCURACIES | {"c": (0.0, 0.59, 0.1, 0.1, 0.1, 0.1)}
    for name, site in sites.items():
        for done, accuracy in zip(DUE, lied[name]):
            site.measure(done, accuracy)
    exchange(sites)
    decided = {name: site.table.decided(10) for name, site in sites.items()}
    assert decided["a"] == decided["b"] == decided["c"]
    assert decided["a"] == {
        "round": 10, "metric": "accuracy", "worst": "a", "value": 0.5, "without": {"c": 30},
    }  # fmt: skip
    assert missing_from(decided_in_words(decided["a"]), "round 10", "a was the worst", "0.5", "30 without c") == []


def test_what_a_site_says_first_about_its_kept_models_counts_also_after_a_restart(sites, board):
    """Sums at the end depend on the best round, and a node that restarts must send them as before. c says later that it
    kept none, which would make the last round the best."""
    measured(sites)
    assert ended(sites) == {20}
    board.said["c"] = board.said["c"] | {"kept": []}
    exchange({name: sites[name] for name in "ab"}, 1)
    sites["a"].enter()
    assert [sites[name].table.best() for name in "ab"] == [20, 20]
    assert [site.table.open_questions() for site in (sites["a"], sites["b"])] == [[], []]
    assert "different things" in sites["b"].warnings[-1]["reason"]
    for name in "ab":  # all sites are told, since it sets them against each other in the sums
        assert sites[name].table.contradicted["c"].both
        (proof,) = map(json.loads, (sites[name].folder / CONTRADICTIONS).read_text().splitlines())
        assert [one["body"]["kept"] for one in proof["announcements"]] == [[20], []]


def test_result_says_which_site_kept_no_model_of_the_round_that_is_best_by_the_numbers(sites, board):
    measured(sites)
    sites.pop("c").table.open_questions()
    board.said["c"] = board.said["c"] | {"kept": []}
    assert ended(sites) == {50}
    decided = sites["a"].table.decided(50)
    assert (decided["by_numbers"], decided["not_kept_by"]) == (20, ["c"])
    assert "By all numbers it would be round 20, of which c kept no model" in decided_in_words(decided)


def test_site_that_withholds_its_metrics_is_named_and_does_not_fill_the_disks_of_the_others(sites, monkeypatch):
    monkeypatch.setattr(measurements, "_PENDING_AT_LEAST", 2)
    monkeypatch.setattr(measurements, "_PENDING_BYTES", 0)
    silent = sites.pop("c")
    for k, done in enumerate(DUE[:-1]):
        for name, site in sites.items():
            site.measure(done, ACCURACIES[name][k])
            site.table.store_models()
            site.table.drop_models()
        exchange(sites)
    assert [site.models() for site in sites.values()] == [[30, 40]] * 2
    assert [[one["site"] for one in site.warnings] for site in sites.values()] == [["c"]] * 2
    for site in sites.values():
        site.measure(50, 0.5)
    for done, accuracy in zip(DUE, ACCURACIES["c"]):
        silent.measure(done, accuracy)
    exchange(every := sites | {"c": silent})
    assert ended(every) == {50}  # of which all have the model


def _tells_c_other_metrics() -> None:
    """A member that signs other metrics of the last round for its neighbour c."""
    to, next_frames, news, add = [""], Links._next_frames, Bulletin.news, Measurements.add

    def noted(self, neighbour, stream):
        to[0] = neighbour.name
        return next_frames(self, neighbour, stream)

    def lied(self, since, stream=None):
        number, text = news(self, since, stream)
        entries = json.loads(text) if text and to[0] == "c" else []
        for k, table in enumerate(entries):
            known = self.entry(self.name, "measured")
            if (table["site"], table["kind"]) == (self.name, "measured") and known.body["rows"][-1][0] == 30:
                rows = [[0.999 if cell == 0.01 else cell for cell in row] for row in known.body["rows"]]
                entries[k] = self._signed_here(known._replace(body=known.body | {"rows": rows})).table()
        return number, json.dumps(entries).encode() if entries else text

    def low(self, done, metrics, *more):
        return add(self, done, [0.01 if done == 30 and 0 <= value <= 1 else value for value in metrics], *more)

    Links._next_frames, Bulletin.news, Measurements.add = noted, lied, low


@pytest.mark.slow
def test_site_that_tells_others_different_metrics_is_named_before_sums_are_sent_and_can_be_voted_out(tmp_path):
    names, options = list("abcd"), {"checkpoint_every": 4, "measure_every": 5, "best_by": "worst"}
    with Run(tmp_path, names, experiment(30, 4, options=options)) as run:
        run.start("a", "b", "c")
        run.start("d", before=_tells_c_other_metrics)
        what = "sites have heard different metrics"
        run.until(lambda: all(any(event["site"] == "d" for event in run.events(name, what)) for name in "abc"), 60)
        run.until(lambda: all("refusing" in run.status(name) for name in "abc"))
        assert [run.status(name)["refusing"] for name in "abc"] == [[], [], []]
        run.vote("a", "b", "c", out=["d"])
        run.end("a", "b", "c")
