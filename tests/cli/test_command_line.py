"""The command line as a person and as a machine use it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fairmesh as fm
from fairmesh.cli.terminal import show_rows, show_table
from tests.refusals import missing_from

QUICK = """
rounds = 30
[data]
name = "digits"
[topology]
name = "ring"
[sampling]
batch = 8
[algorithm]
name = "ad-gda"
primal_step = 2.0
consensus_step = 0.5
compressor = { name = "quantize", bits = 4 }
[options]
measure_every = 10
"""


@pytest.fixture
def cli(monkeypatch, called, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.toml").write_text(QUICK)
    return called


def test_run_writes_a_folder_and_prints_its_summary_as_json(cli, tmp_path):
    code, out, err = cli("run", "quick.toml", "--json")
    assert code == 0
    assert err == ""
    summary = json.loads(out)
    assert summary["rounds"] == 30
    assert summary["nodes"] == 10
    assert 0 <= summary["worst"] <= summary["mean"] <= summary["best"] <= 1
    names = {path.name for path in Path(summary["folder"]).iterdir()}
    assert {"experiment.toml", "metrics.jsonl", "summary.json", "model.safetensors"} <= names


def test_run_prints_plainly_off_a_terminal(cli):
    code, out, err = cli("run", "quick.toml")
    assert code == 0
    assert "\x1b" not in out + err
    assert out.splitlines()[0].split("\t")[:3] == ["run", "algorithm", "worst accuracy"]
    assert "round 30/30" in err


def test_run_names_its_worst_site(cli):
    _, out, err = cli("run", "quick.toml")
    named = next(line for line in err.splitlines() if "worst sites" in line)
    shown = dict(zip(*(line.split("\t") for line in out.splitlines()[:2])))["worst accuracy"]
    assert shown.split(" (")[0] in named


def test_run_takes_set_seeds_and_out(cli, tmp_path):
    code, out, _ = cli(
        "run", "quick.toml", "--set", "rounds=12", "--set", "algorithm.compressor.bits=8",
        "--set", "topology.name=complete", "--seeds", "3", "--out", "elsewhere", "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["replicas"] == 3
    written = fm.load_experiment(tmp_path / "elsewhere" / "experiment.toml")
    assert (written.rounds, written.seeds) == (12, (0, 1, 2))
    assert written.algorithm.compressor == fm.compressors.Quantize(bits=8)
    assert written.topology == fm.topologies.Complete()


def test_run_of_the_written_experiment_gives_the_same_model(cli, tmp_path):
    cli("run", "quick.toml", "--out", "first")
    code, _, _ = cli("run", "first/experiment.toml", "--out", "second")
    assert code == 0
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "missing.toml"), ["missing.toml"]),
        (
            ("run", "quick.toml", "--set", "algorithm.consensus_stp=1"),
            ["algorithm.consensus_stp", "'consensus_step'"],
        ),
        (("run", "quick.toml", "--set", "ronds=3"), ["ronds", "'rounds'"]),
        (("run", "quick.toml", "--set", "rounds=many"), ["rounds", "'many'"]),
        (("run", "quick.toml", "--set", "rounds"), ["key=value"]),
        (("run", "quick.toml", "--set", "algorithm.name=adgda"), ["adgda", "'ad-gda'"]),
        (("run", "quick.toml", "--set", "algorithm.compressor.bits=40"), ["bits", "[1, 16]", "40"]),
        (("run", "quick.toml", "--device", "cuda"), ["CUDA"]),
        (("run", "quick.toml", "--device", "abacus"), ["device", "abacus"]),
        (("run", "quick.toml", "--seeds", "0"), ["--seeds"]),
        (("compare", "nowhere"), ["nowhere"]),
        (("report", "nowhere"), ["nowhere"]),
        (("topology", "rink", "--nodes", "5"), ["rink", "'ring'"]),
        (("topology", "torus", "--nodes", "5", "--set", "rows=2", "--set", "columns=2"), ["4 nodes", "5"]),
    ],
)
def test_command_line_names_mistakes_in_one_line(cli, arguments, words):
    if "cuda" in arguments:
        torch = pytest.importorskip("torch")
        if torch.cuda.is_available():
            return
    code, out, err = cli(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


def test_run_refuses_a_folder_that_is_not_empty(cli):
    cli("run", "quick.toml", "--out", "taken")
    code, _, err = cli("run", "quick.toml", "--out", "taken")
    assert code == 2
    assert "taken" in err
    assert "--resume" in err


@pytest.mark.slow
def test_resume_extends_a_finished_run(cli, tmp_path):
    cli("run", "quick.toml", "--out", "grown")
    code, out, _ = cli("run", "quick.toml", "--out", "grown", "--resume", "--set", "rounds=50", "--json")
    assert code == 0
    assert json.loads(out)["rounds"] == 50
    cli("run", "quick.toml", "--out", "whole", "--set", "rounds=50")
    assert (tmp_path / "grown/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.recorded
def test_processes_that_run_one_file_end_with_the_same_bits(cli, tmp_path):
    more = ("--set", "rounds=150")
    for seed in ("1", "2"):  # of Python's hashes, which order sets and thereby what memory is free where
        command = [sys.executable, "-m", "fairmesh", "run", "quick.toml", "--out", f"process {seed}", *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": seed}
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    assert cli("run", "quick.toml", "--out", "here", *more)[0] == 0
    for name in ("model.safetensors", "model-time-average.safetensors", "metrics.jsonl"):
        contents = {(tmp_path / folder / name).read_bytes() for folder in ("process 1", "process 2", "here")}
        assert len(contents) == 1, name


@pytest.mark.slow  # cluster/test_launching.py and training/test_resuming.py have the like
@pytest.mark.recorded  # as in the command's own process
def test_run_keeps_a_checkpoint_on_ctrl_c_and_resumes_to_the_same_end(cli, tmp_path):
    command = [sys.executable, "-m", "fairmesh", "run", "quick.toml", "--set", "rounds=4000", "--out", "stopped"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment)
    metrics = tmp_path / "stopped" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") > 3):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    reached = int(re.search(r"(\d+) of 4000", err)[1])
    assert reached < 4000
    rounds = f"rounds={reached + 7}"
    assert cli("run", "quick.toml", "--out", "stopped", "--resume", "--set", rounds)[0] == 0
    assert cli("run", "quick.toml", "--out", "whole", "--set", rounds)[0] == 0
    assert (tmp_path / "stopped/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()


def test_compare_draws_one_picture_and_tells_the_runs_apart(cli, tmp_path):
    cli("run", "quick.toml", "--out", "a")
    cli("run", "quick.toml", "--out", "b", "--set", "algorithm.dual_step=0.2")
    code, out, _ = cli("compare", "a", "b", "--json", "--plot", "both.png")
    assert code == 0
    assert set(json.loads(out)["runs"]) == {"a", "b"}
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_shows_a_row_for_each_value(cli):
    assignments = [part for text in ("sweep.consensus_step=[0.2, 0.4]", "seeds=[0, 1]") for part in ("--set", text)]
    code, out, _ = cli("run", "quick.toml", *assignments)
    assert code == 0
    header, *rows = (line.split("\t") for line in out.splitlines())
    assert {row[0] for row in rows} == {"quick: consensus_step 0.2", "quick: consensus_step 0.4"}
    assert all(len(row) == len(header) for row in rows)


def test_report_writes_a_page_with_the_settings(cli, tmp_path):
    cli("run", "quick.toml", "--out", "told")
    code, out, _ = cli("report", "told", "--json")
    assert code == 0
    page = Path(json.loads(out)["report"]).read_text()
    assert "bits = 4" in page
    assert "site 9 (mirrored)" in page


def test_topology_reports_rho_beta_and_the_theorems_gamma(cli, tmp_path):
    code, out, _ = cli("topology", "ring", "--nodes", "10", "--delta", "0.25", "--json")
    assert code == 0
    facts = json.loads(out)
    (mixing,) = fm.Ring().build(10)
    assert facts["rho"] == pytest.approx(mixing.gap)
    assert facts["beta"] == pytest.approx(mixing.beta)
    assert facts["gamma"] == pytest.approx(mixing.consensus_step_of_theorem(0.25))
    assert facts["edges"] == 10
    assert Path(tmp_path / facts["plot"]).stat().st_size > 0


REFUSED_AT_ONCE = [  # arguments, and what the refusal names
    ("run quick.toml --out taken", "--overwrite"),
    ("run quick.toml --out started", "--resume"),
    ("run quick.toml --out other --overwrite", "other"),
    ("run quick.toml --out other --resume", "checkpoint"),
    ("run missing.toml", "missing.toml"),
    ("launch quick.toml --processes 2 --out taken", "--overwrite"),
    ("launch quick.toml --processes 2 --out other --overwrite", "other"),
    ("launch missing.toml --processes 2", "missing.toml"),
    ("advise missing.toml", "missing.toml"),
    ("report missing", "missing"),
    ("compare taken missing", "missing"),
    ("export missing --onnx", "missing"),
    ("predict missing rows.csv", "missing"),
    ("node missing/site.toml", "site.toml"),
    ("status missing/site.toml", "site.toml"),
]
IN_ONE_PROCESS = """
import sys
import fairmesh.cli.cluster
from fairmesh.cli.main import main

fairmesh.cli.cluster.launched = lambda *given: "processes were started"
for line in sys.stdin:
    sys.argv = ["fairmesh", *line.split()]
    try:
        main()
    except SystemExit as end:
        print(end.code, "torch" in sys.modules, file=sys.stderr)
"""


def test_command_that_cannot_work_says_so_before_torch_is_imported_or_a_process_started(tmp_path):
    for folder, name in (("taken", "summary.json"), ("started", "checkpoint.safetensors"), ("other", "notes.txt")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    (tmp_path / "quick.toml").write_text(QUICK)
    lines = "\n".join(arguments for arguments, _ in REFUSED_AT_ONCE)
    done = subprocess.run(
        [sys.executable, "-c", IN_ONE_PROCESS], input=lines, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    said = done.stderr.splitlines()
    for (arguments, named), refusal, end in zip(REFUSED_AT_ONCE, said[::2], said[1::2], strict=True):
        assert refusal.startswith("error: "), arguments
        assert named in refusal, arguments
        assert end == "2 False", arguments


def test_public_names_can_all_be_imported():
    for name in fm.__all__:
        assert getattr(fm, name) is not None


def test_command_line_says_how_much_memory_a_run_takes(called, tmp_path):
    file = tmp_path / "small.toml"
    file.write_text('rounds = 2\ndata = "digits"\ntopology = "ring"\nalgorithm = "ad-gda"\n')
    assert missing_from(called("run", str(file), "--out", str(tmp_path / "out"))[2], "memory", "GiB") == []


@pytest.mark.parametrize("terminal", [True, False])
def test_table_shows_words_of_others_as_text(terminal, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("COLUMNS", "200")
    show_table([["site", "says"], ["a", "[red]all is well[/red] \x1b[2J"]])
    shown = capsys.readouterr().out
    assert "[red]all is well[/red]" in shown
    assert "\x1b[2J" not in shown


@pytest.mark.parametrize(("columns", "first"), [("200", ["run", "worst accuracy"]), ("50", ["run", "patients"])])
def test_table_of_runs_is_turned_on_a_narrow_terminal(columns, first, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", columns)
    table = [["run", "worst accuracy", "mean"], ["patients", "33.3 % (13.8 to 61.8)", "77.9 % (69.4 to 80.4)"]]
    show_rows(table)
    out = capsys.readouterr().out
    assert [missing_from(out.splitlines()[1], *first), missing_from(out, "33.3 % (13.8 to 61.8)")] == [[], []]
