"""`fairmesh run` with --overwrite, --with-references, --leave-one-out and --track."""

import json

import pytest

from fairmesh.report.runs import few_sentences
from tests.refusals import missing_from

FILE = """
rounds = 6
data = { name = "digits", nodes = 3 }
options = { measure_every = 6, compare_weights = false }
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(FILE)
    return tmp_path / "a.toml"


def test_overwrite_sets_a_run_aside_and_no_other_folder(called, file, tmp_path):
    run = ("run", file, "--set", 'algorithm="dsgd"', "--json")
    assert called(*run)[0] == 0
    code, _, err = called(*run)
    assert (code, missing_from(err, "runs/a", "--overwrite", "--resume")) == (2, [])
    assert called(*run, "--overwrite")[0] == 0
    assert called(*run, "--overwrite")[0] == 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"a", "a-old", "a-old-2"}
    assert missing_from(called(*run, "--overwrite", "--resume")[2], "--overwrite", "--resume") == []
    other = tmp_path / "letters"
    other.mkdir()
    (other / "letter.txt").write_text("dear")
    code, _, err = called(*run, "--overwrite", "--out", other)
    assert (code, missing_from(err, "letters", "not the folder of a run")) == (2, [])
    assert (other / "letter.txt").read_text() == "dear"


def test_diverged_run_makes_room_for_the_next_one(called, file, tmp_path):
    run = ("run", file, "--set", 'algorithm.name="dsgd"')
    assert called(*run, "--set", "algorithm.primal_step=1e30")[0] != 0
    assert (tmp_path / "runs/a/diverged.txt").exists()
    code, _, err = called(*run)
    assert (code, missing_from(err, "diverged", "a-diverged")) == (0, [])
    assert (tmp_path / "runs/a-diverged/diverged.txt").exists()
    assert not (tmp_path / "runs/a/diverged.txt").exists()


@pytest.mark.slow
def test_run_writes_references_and_sites_left_out(called, file, tmp_path):
    run = ("run", file, "--set", "splits=2", "--with-references", "--leave-one-out")
    code, out, _ = called(*run, "--json")
    found = json.loads(out)
    assert code == 0
    assert list(found["references"]) == ["local", "average", "pooled", "fine-tuned", "constant"]
    written = json.loads((tmp_path / "runs/a/leave_one_out.json").read_text())
    assert written == found["leave_one_out"]
    assert [len(row) for row in written["values"]["accuracy"]] == [3, 3]  # two splits
    code, out, _ = called(*run, "--resume")
    assert (code, missing_from(out, "each site alone", "constant answer")) == (0, [])
    assert called("run", file, "--set", "splits=2", "--resume", "--json")[0] == 0  # references still belong to the run
    assert list(json.loads((tmp_path / "runs/a/summary.json").read_text())["references"]) == list(found["references"])


def test_run_refuses_what_would_fail_after_the_last_round_before_the_first(called, file, tmp_path):
    two = ("--set", "data.nodes=2", "--leave-one-out")
    assert missing_from(called("run", file, *two)[2], "3 sites", "2") == []
    (tmp_path / "mine.py").write_text("def work(module, data, ctx):\n    return module\n")
    trainer = ("--set", 'trainer="mine.py:work"', "--set", 'algorithm={name="fedavg"}', "--with-references")
    assert missing_from(called("run", file, *trainer)[2], "--with-references", "trainer") == []
    assert not (tmp_path / "runs/a").exists()


def test_settings_that_cannot_be_swept_say_what_to_do(called, file):
    file.write_text(FILE + '[sweep]\n"data.seed" = [0, 1]\n')
    assert missing_from(called("run", file)[2], "data.seed", "splits = 10") == []
    file.write_text(FILE + '[sweep]\n"options.threads" = [1, 2]\n')
    assert missing_from(called("run", file)[2], "options.threads", "--set") == []
    file.write_text(FILE + '[sweep]\n"weighting.loss_ema" = [0.5, 0.6]\n')
    assert missing_from(called("run", file, "--with-references")[2], "sweep", "2") == []


def test_topology_without_edges_says_how_to_train_every_site_alone(called, file):
    file.write_text(FILE + '[topology]\nname = "edges"\nedges = []\n')
    assert missing_from(called("run", file)[2], "disconnected", '"local"') == []


def test_track_writes_next_to_the_run_and_an_unknown_tracker_is_refused_at_once(called, file, tmp_path):
    run = ("run", file, "--set", 'algorithm="dsgd"', "--json")
    code, _, err = called(*run, "--track", "tensorbord")
    assert (code, missing_from(err, "--track", "tensorboard")) == (2, [])
    assert not (tmp_path / "runs").exists()
    assert called(*run, "--track", "tensorboard")[0] == 0
    assert list((tmp_path / "runs/a/trackers/tensorboard").glob("events.*"))
    assert called(*run, "--resume")[0] == 0  # trackers are no part of the experiment


@pytest.mark.slow
def test_terminal_shows_few_of_many_sites_and_where_the_others_are(called, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"s{i % 40},{i * 7 % 13},{(i * 7 % 13 > 6) ^ (i % 11 == 0):d}\n" for i in range(800))
    (tmp_path / "t.csv").write_text(f"site,x,y\n{rows}")
    (tmp_path / "b.toml").write_text(
        'rounds = 2\nmetrics = ["brier"]\nalgorithm = "dsgd"\n[data]\nname = "table"\nfile = "t.csv"\ntarget = "y"\n'
        'site = "site"\n'
    )
    code, out, err = called("run", tmp_path / "b.toml")
    assert code == 0
    assert sum(line.startswith("s") and line[1].isdigit() for line in out.splitlines()) == 10
    assert len((out + err).splitlines()) < 40
    assert missing_from(out, "and 30 more", "report") == []


def test_sentences_on_many_sites_name_those_with_a_verdict_and_the_bad_ones_first():
    verdicts = ["worse" if i == 30 else "better" if i < 20 else "unclear" for i in range(40)]
    said = [f"s{i}: {verdict}" for i, verdict in enumerate(verdicts)]
    shown = few_sentences(said, verdicts)
    assert (len(shown), shown[0], "11 more" in shown[-1]) == (11, "s30: worse", True)
    assert few_sentences(said, ["unclear"] * 40) == []
    assert few_sentences(said[:12], verdicts[:12]) == said[:12]
