"""Pictures that `fm.plot` and `fm.report` draw, as files and in notebooks."""

import matplotlib
import pytest
from matplotlib import pyplot

import fairmesh as fm
from fairmesh.report.plots import look_of
from fairmesh.report.style import new_figure
from tests.refusals import refused


@pytest.fixture(scope="module")
def problem():
    return fm.Experiment(fm.data.Digits(nodes=3, odd=1), algorithm=fm.algorithms.DSGD()).problem()


@pytest.fixture(scope="module")
def result(problem):
    return fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.5), rounds=4, measure_every=2)


def test_plot_without_a_path_returns_what_a_notebook_shows(result):
    figure = fm.plot({"mine": result, "yours": result})
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == ["mine", "yours"]
    assert fm.report.picture(result.problem.sites)._repr_png_().startswith(b"\x89PNG")


def test_plot_against_some_axes_has_a_panel_for_each(result):
    assert [axis.get_xlabel() for axis in fm.plot(result, against=["rounds"]).axes] == ["rounds"]
    for wrong in ("rounds", ["hours"], []):
        with refused("against", "bytes_busiest_node", repr(wrong)):
            fm.plot(result, against=wrong)


@pytest.mark.parametrize("panels", [1, 3])
def test_plot_fits_a_paper_and_names_each_run_once(result, panels):
    figure = fm.plot({"mine": result, "$yours$": result}, against=None if panels == 3 else ["rounds"])
    width = figure.get_size_inches()[0]
    assert width <= (3.5 if panels == 1 else 7.2), "a column of a paper, or its text"
    texts = [text.get_text().replace("\\", "") for text in figure.legends[0].get_texts()]
    assert texts == ["mine", "$yours$", "worst site", "mean over sites"]
    assert min(text.get_fontsize() for text in figure.legends[0].get_texts()) >= 7


def test_plot_writes_vectors_with_text_as_text_and_the_same_file_again(result, tmp_path):
    for name in ("a.svg", "a.pdf"):
        fm.plot(result, tmp_path / name, against=["rounds"])
        first = (tmp_path / name).read_bytes()
        fm.plot(result, tmp_path / name, against=["rounds"])
        assert (tmp_path / name).read_bytes() == first
    assert "accuracy, %</text>" in (tmp_path / "a.svg").read_text()
    assert "<image" not in (tmp_path / "a.svg").read_text()
    assert b"/Type3" not in (tmp_path / "a.pdf").read_bytes(), "publishers refuse fonts of type 3"


def test_plot_of_more_runs_than_colours_gives_each_its_own_look():
    looks = {tuple(look_of(k).values()) for k in range(64)}
    assert len(looks) == 64


def test_plot_leaves_the_backend_of_the_users_own_plots_alone():
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    try:
        new_figure(2, 2)
        assert matplotlib.get_backend() == "svg"
        assert not pyplot.get_fignums()
    finally:
        matplotlib.use(before)


def test_plot_sites_shows_each_model_at_every_site_with_its_interval(problem, result, tmp_path):
    alone = fm.train(problem, fm.Ring(), fm.algorithms.Local(), rounds=4, measure_every=4)
    axis = fm.report.plot_sites({"alone": alone, "together": result}).axes[0]
    assert [text.get_text() for text in axis.get_yticklabels()] == [site.name for site in problem.sites]
    shown = axis.collections[1].get_offsets()[:, 0].tolist()
    assert shown == pytest.approx([100 * value for value in result.final[0]["accuracy"]["sites"]])
    low, high = axis.lines[problem.n].get_xdata()  # the first interval of the second series
    assert [low / 100, high / 100] == pytest.approx(result.evidence()["sites"][0]["interval"])
    fm.report.plot_sites({"together": result}, tmp_path / "sites.svg")
    assert (tmp_path / "sites.svg").exists()


def test_plot_sites_refuses_results_of_other_sites(result):
    other = fm.run(fm.Experiment(fm.data.Digits(nodes=2, odd=0), algorithm=fm.algorithms.DSGD(0.5), rounds=2))
    with refused("same sites", "site 2 (mirrored)"):
        fm.report.plot_sites({"one": result, "other": other})
    with refused("same sites", "none"):
        fm.report.plot_sites({})
