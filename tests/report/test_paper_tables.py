"""Tables of `fairmesh compare` for papers, read back: LaTeX by a small reader, CSV as pandas reads it."""

import csv
import io
import json
import re
from dataclasses import replace

import pytest

import fairmesh as fm
from fairmesh.cli.report import compare
from fairmesh.report.comparison import compared
from fairmesh.report.paper_tables import as_csv, as_latex, escaped
from fairmesh.report.runs import Run
from tests.refusals import missing_from, refused

DATA = fm.data.Digits(nodes=3, odd=1)
STEPS = {"base": 0.5, "same": 0.5, "worse": 0.01}
HOSTILE = r"100% \input{secret} & #1 $x_2^3$ ~a <b> [2cm] *"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("runs")
    options = fm.Options(measure_every=6)
    for name, step in STEPS.items():
        fm.run(fm.Experiment(DATA, fm.Ring(), fm.algorithms.DSGD(step), rounds=12, options=options), out=base / name)
    return base


@pytest.fixture
def found(folders):
    return lambda *names: compared([Run.from_folder(folders / name) for name in names])


def cells_of(latex):
    """Returns the rows of each tabular, as LaTeX would read them: it refuses commands that a table must not have, and
    braces that do not match."""
    body = "\n".join(line for line in latex.splitlines() if not line.startswith("%"))
    assert set(re.findall(r"\\([a-zA-Z]+)", body)) <= {
        "begin", "end", "toprule", "midrule", "bottomrule", "textbf", "char", "lambda",
        "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar",
    }  # fmt: skip
    bare = re.sub(r"\\[\\{}&%$#_]", lambda m: r"\\" if m[0] == r"\\" else "", body)
    assert bare.count("{") == bare.count("}")
    assert "%" not in bare
    assert "#" not in bare
    tables = []
    for columns, inside in re.findall(r"\\begin\{tabular\}\{([lr]+)\}\n(.*?)\\end\{tabular\}", body, flags=re.S):
        rows = [line.strip() for line in inside.splitlines() if not re.fullmatch(r"\s*\\(top|mid|bottom)rule", line)]
        assert all(row.endswith(r"\\") for row in rows)
        split = [re.split(r"(?<!\\)&", row.removesuffix(r"\\")) for row in rows]
        assert {len(row) for row in split} == {len(columns)}
        tables.append([[cell.strip() for cell in row] for row in split])
    return tables


def test_latex_has_a_row_for_each_run_and_the_intervals_of_the_terminal(found):
    both = found("base", "worse")
    latex = as_latex(both)
    (table,) = cells_of(latex)
    header, base, worse = table
    assert missing_from(header[2], "accuracy", r"\%") == []
    low, high = (100 * end for end in both.shown[0].evidence["worst"]["interval"])
    assert f"({low:.1f}--{high:.1f})" in base[2]
    assert worse[0] == "worse"
    assert missing_from(latex, "booktabs", "95 % intervals") == []


def test_latex_marks_the_best_only_where_it_is_clearly_better(found):
    (table,) = cells_of(as_latex(found("worse", "base")))
    assert [row[0] for row in table if any("textbf" in cell for cell in row)] == ["base"]
    assert [k for k, cell in enumerate(table[2]) if "textbf" in cell] == [2, 3]
    for alike in (found("base", "same"), found("base")):
        assert "textbf" not in as_latex(alike)
    assert "textbf" not in as_latex(found("base", "worse", "same")), "two are best"


def test_latex_with_sites_has_a_second_table_with_all_of_them(found):
    _, sites = cells_of(as_latex(found("base", "worse"), sites=True))
    assert [row[0] for row in sites[1:]] == [escaped(site.name) for site in DATA.sites()]
    assert sites[0][1:] == ["base", "worse"]
    assert all("--" in cell for row in sites[1:] for cell in row[1:])


def test_names_are_text_in_latex_and_in_a_spreadsheet(found):
    both = found("base", "worse")
    hostile = [replace(run, label=label) for run, label in zip(both.shown, (HOSTILE, "=cmd|'/c calc'!A1\nnew line"))]
    told = replace(both, shown=hostile, verdicts={}, warnings=[f"{HOSTILE}\n\\input{{secret}}"])
    (table,) = cells_of(as_latex(told))
    assert len(table) == 3
    assert "{[}2cm]" in table[1][0]
    rows = list(csv.DictReader(io.StringIO(as_csv(told))))
    assert {row["run"] for row in rows} == {HOSTILE, "'=cmd|'/c calc'!A1 new line"}


def test_csv_has_plain_numbers_with_their_intervals(found):
    both = found("base", "worse")
    rows = list(csv.DictReader(io.StringIO(as_csv(both, sites=True))))
    worst = next(row for row in rows if (row["run"], row["metric"], row["of"]) == ("base", "accuracy", "worst"))
    known = both.shown[0].evidence["worst"]
    assert [float(worst[key]) for key in ("value", "low", "high")] == [known["value"], *known["interval"]]
    assert worst["site"] == known["site"]
    sites = [row for row in rows if (row["run"], row["metric"], row["of"]) == ("worse", "accuracy", "site")]
    assert [row["site"] for row in sites] == [site.name for site in DATA.sites()]
    assert [int(row["n"]) for row in sites] == [site["n"] for site in both.shown[1].evidence["sites"]]
    losses = [row for row in rows if row["metric"] == "loss"]
    assert all(float(row["value"]) > 0 and row["low"] == row["high"] == "" for row in losses)
    assert not [row for row in csv.DictReader(io.StringIO(as_csv(both))) if row["of"] == "site"]


def test_compare_writes_tables_and_replaces_them_only_if_asked_to(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    paths = [folders / "base", folders / "worse"]
    (tmp_path / "mine.csv").write_text("mine")
    with refused("mine.csv", "--csv", "--overwrite"):
        compare(paths, latex=tmp_path / "new.tex", csv=tmp_path / "mine.csv")
    assert not (tmp_path / "new.tex").exists(), "nothing is written if something is refused"
    compare(paths, latex=tmp_path / "new.tex", csv=tmp_path / "mine.csv", overwrite=True)
    assert (tmp_path / "new.tex").read_text() == as_latex(compared([Run.from_folder(path) for path in paths]))
    assert (tmp_path / "mine.csv").read_text() != "mine"
    assert not (tmp_path / "compare.png").exists(), "who asks for a table gets no picture"


def test_compare_prints_one_table_alone(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dash = type(tmp_path)("-")
    compare([folders / "base"], csv=dash)
    assert next(csv.reader(io.StringIO(capsys.readouterr().out)))[:2] == ["run", "algorithm"]
    with refused("--latex -", "--csv -"):
        compare([folders / "base"], latex=dash, csv=dash)
    with refused("--latex -", "--json"):
        compare([folders / "base"], latex=dash, json_=True)
    compare([folders / "base"], latex=tmp_path / "a.tex", json_=True)
    assert json.loads(capsys.readouterr().out)["plot"] is None
