"""The tutorials are notebooks with committed outputs: their code runs, and the outputs are those of that code."""

import nbformat
import pytest

from docs.tutorials.execute import code_of, digest_of, executed, kernel, kinds_of, tutorials

# Two take the road of the README, whose journey is a quick test; the clinics' commands and nodes are twenty processes.
IN_TEST_ALL = {"1-first-run", "4-what-each-site-gains", "6-three-clinics"}
TUTORIALS = [pytest.param(path, id=path.stem) for path in tutorials()]


@pytest.fixture(params=TUTORIALS)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def manager():
    with kernel() as started:  # one for all, since most of the time of a short run is the start of Python
        yield started


def check(path, made):
    kept = nbformat.read(path, as_version=4)
    for before, after in zip(code_of(kept), code_of(made), strict=True):
        shown = kinds_of(after) - {"stderr"}  # short runs may warn of what they are: short
        assert shown == kinds_of(before), f"other outputs than in {path.name}: make tutorials\n{after.source}"


@pytest.mark.parametrize(
    "path",
    [pytest.param(one, id=one.stem, marks=pytest.mark.slow if one.stem in IN_TEST_ALL else ()) for one in tutorials()],
)
@pytest.mark.quick_cases(6)
@pytest.mark.filterwarnings("ignore")  # of the libraries that talk to the kernel
def test_tutorial_runs_in_its_short_form_and_shows_what_it_is_committed_with(path, manager):
    check(path, executed(path, manager, short=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_tutorial_runs_in_full(path, manager):
    check(path, executed(path, manager))


def test_tutorial_has_the_outputs_of_its_code(path):
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata["fairmesh"]["executed"] == digest_of(notebook), f"{path.name} was changed: make tutorials"
    assert any("image/png" in kinds_of(cell) for cell in code_of(notebook)), "a tutorial has a picture"
    assert not any("stderr" in kinds_of(cell) for cell in code_of(notebook)), "a tutorial shows no warnings"


def test_tutorial_has_one_cell_of_parameters_with_short_values(path):
    tagged = [cell for cell in nbformat.read(path, as_version=4).cells if "short" in cell.metadata]
    assert len(tagged) == 1
    assert "parameters" in tagged[0].metadata["tags"]
    assert all(f"{name} = " in tagged[0].source for name in tagged[0].metadata["short"])
