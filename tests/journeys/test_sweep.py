"""A sweep as tuning.md shows it, to a plot, a comparison with a rival and a table."""

import re

import pytest

import fairmesh as fm
from fairmesh.report.runs import Run
from tests.journeys.user import User, shown


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A folder with the finished sweep, and with one setting of it as a rival; what the runs printed."""
    user = User(tmp_path_factory.mktemp("sweep"))
    text = shown("docs/howto/tuning.md", "toml", "# sweep.toml")
    user.writes("sweep.toml", text)
    user.writes("single.toml", re.sub(r"\[sweep\].*?(?=\n\[)", "", text, flags=re.S))
    return user, {name: user.runs(f"fairmesh run {name}.toml") for name in ("sweep", "single")}


@pytest.mark.slow
def test_table_plot_report_and_comparison_show_the_chosen_setting(walked):
    user, seen = walked
    table = re.search(r"^(sweep: [^\t]*)\t[^\t]*\t([\d.]+) % .*?\t([\d.]+) %", seen["sweep"], re.M)
    assert table, seen["sweep"]
    name, worst, mean = table.groups()
    user.runs("fairmesh report runs/sweep")
    assert worst in (user.folder / "runs" / "sweep" / "report.html").read_text()
    compared = user.runs("fairmesh compare runs/sweep runs/single --plot compared.png")
    assert re.search(rf"^{re.escape(name)}\t[^\t]*\t{worst} %", compared, re.M), compared

    figure = fm.plot(Run.from_folder(user.folder / "runs" / "sweep"), against=["rounds"])
    ends = [100 * float(line.get_ydata()[-1]) for line in figure.axes[0].get_lines() if len(line.get_ydata()) > 2]
    ends += [end / 100 for end in ends]  # the axis may be in per cent
    for value in (worst, mean):
        assert any(abs(end - float(value)) < 0.06 for end in ends), (value, ends)


@pytest.mark.slow
def test_comparison_says_how_many_candidates_each_run_had_and_keeps_an_existing_picture(walked):
    user, _ = walked
    compared = user.runs("fairmesh compare runs/sweep runs/single")
    assert re.search(r"\b9\b", compared), compared
    picture = user.folder / "compare.png"
    picture.write_bytes(b"mine")
    refused = user.runs("fairmesh compare runs/sweep runs/single", code=2)
    assert "--overwrite" in refused
    assert picture.read_bytes() == b"mine"
    user.runs("fairmesh compare runs/sweep runs/single --overwrite")
