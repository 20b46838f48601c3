"""`help()` of everyday names is short, and about what a user needs."""

import pydoc

import pytest

import fairmesh as fm


def test_help_of_a_problem_shows_its_arguments_and_no_internals():
    text = pydoc.plain(pydoc.render_doc(fm.Problem))
    for wanted in ("sites: One `Site` per node", "models_at_once: How many", "The number of nodes", "Example:"):
        assert wanted in text
    for internal in ("label_smoothing", "keeping(", "on_outputs", "slower_stacked", "of `Learning`"):
        assert internal not in text


@pytest.mark.parametrize("name", ["train", "Problem", "Experiment", "Site", "Options", "TrackedADGDA"])
def test_help_of_everyday_names_fits_a_few_screens(name):
    text = pydoc.plain(pydoc.render_doc(getattr(fm, name)))
    left_by_copying = text.count("__slotnames__") * 2  # Python adds it to a class, with a blank line, once it is copied
    assert len(text.splitlines()) - left_by_copying < 200
