"""`fairmesh keys`: what experiment files may say, from the classes themselves."""

from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

import fairmesh as fm
from fairmesh.cli.keys import page
from fairmesh.cli.main import app
from fairmesh.config.reference import Key, keys_of, reached
from fairmesh.config.registry import FAMILIES
from tests.refusals import refused


def keys(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["keys", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_reference_page_is_current():
    written = Path(__file__).parents[2] / "docs" / "reference" / "keys.md"
    assert written.read_text(encoding="utf-8") == page(), "write it again: fairmesh keys > docs/reference/keys.md"


def test_reference_page_explains_every_registered_class_under_a_heading_of_its_own():
    import fairmesh.testing  # noqa: F401  all families are registered

    assert set(FAMILIES) - set(reached(fm.Experiment)) == set()
    headings = [line for line in page().splitlines() if line.startswith("#")]
    assert len(set(headings)) == len(headings)
    for members in FAMILIES.values():
        for name in members:
            assert any(line.endswith(f'`name = "{name}"`') for line in headings)


def test_keys_of_a_class_have_types_and_defaults_as_files_write_them():
    found = {key.name: key for key in keys_of(fm.TrackedADGDA)}
    assert found["beta1"][1:3] == ("number", "`0.9`")
    assert found["tracking"][1:3] == ("true or false", "`true`")
    assert found["consensus_step"].default == "left out"
    assert found["primal_step"].default.startswith('`{ name = "polynomial", start = 0.7, power = 3.0 }`')
    assert keys_of(fm.data.Table)[1] == Key("target", "text", "", "The column to predict.")


def test_keys_of_a_class_refuse_a_field_without_explanation():
    @dataclass(frozen=True)
    class Bare:
        """A class.

        Args:
            told: It is told.
        """

        told: int
        untold: int

    with refused("Bare", "untold", "Args"):
        keys_of(Bare)


def test_keys_command_prints_a_class_a_section_or_all_that_share_a_name():
    assert "threshold" in keys("sensitivity")
    assert keys("dice").count("## ") == 2  # a loss and a metric
    assert 'name = "ad-gda"' in keys("algorithm")
    assert "measure_every" in keys("options")


def test_keys_command_names_the_nearest_of_an_unknown_name():
    from fairmesh.config.reference import found_by

    with refused("sensitivty", "sensitivity"):
        found_by(fm.Experiment, "sensitivty")
