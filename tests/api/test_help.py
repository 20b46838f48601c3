"""`help()` of everyday names is short, and about what a user needs."""

import pydoc

import pytest

import fairmesh as fm


def test_help_of_a_problem_shows_its_arguments_and_no_internals():
    text = pydoc.plain(pydoc.render_doc(fm.Problem))
    assert len(text.splitlines()) < 140
    for wanted in ("sites: One `Site` per node", "models_at_once", "The number of nodes", "Example:"):
        assert wanted in text
    for internal in ("label_smoothing", "__dataclass_fields__", "keeping(", "on_outputs", "slower_stacked"):
        assert internal not in text
    assert "keeping" in dir(fm.Problem(*_smallest()))


def _smallest():
    torch = pytest.importorskip("torch")
    return torch.nn.Linear(2, 2), [(torch.zeros(4, 2), torch.arange(4) % 2)] * 2


@pytest.mark.parametrize("name", ["train", "Experiment", "Site", "Options", "TrackedADGDA"])
def test_help_of_everyday_names_fits_a_few_screens(name):
    text = pydoc.plain(pydoc.render_doc(getattr(fm, name)))
    assert len(text.splitlines()) < 200
