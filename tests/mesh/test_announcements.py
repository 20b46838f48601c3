"""The page on security lists what sites announce as it is declared: `python -m tests.mesh.test_announcements`."""

import re
from random import Random

import pytest

from fairmesh.mesh.announcements import KINDS
from tests.mesh import fuzz
from tests.mesh.credentials import terms_of
from tests.mesh.test_docs import SECURITY

HEAD = "| kind | what it tells | its fields | about | size and rate at most |\n|---|---|---|---|---|\n"
TERMS = terms_of(("a", "b", "c"), rounds=30).by("a")


def table() -> str:
    """What sites may announce, as the page has it."""
    lines = []
    for kind, announced in KINDS.items():
        fields = "; ".join(f"`{name}`: {field.words}" for name, field in announced.fields.items())
        means = f". Together: {announced.meaning.__doc__}" if announced.meaning.__doc__ else ""
        rate = f"{announced.at_most >> 10} KiB; {announced.per_second:g} per second, {announced.at_once:g} at once"
        lines.append(f"| `{kind}` | {announced.tells} | {fields}{means} | {announced.about} | {rate} |\n")
    return HEAD + "".join(lines)


def test_page_on_security_lists_every_kind_as_it_is_declared():
    assert table() in SECURITY.read_text(encoding="utf-8"), "run: python -m tests.mesh.test_announcements"


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_values_are_those_that_a_field_holds_and_words_say_what(kind):
    draws = Random(0)
    for name, field in KINDS[kind].fields.items():
        assert field.words, name
        values = [field.draw(draws, TERMS) for _ in range(50)]
        assert [value for value in values if not field(value, TERMS)] == []
    assert fuzz.sound(kind, TERMS, draws).keys() == KINDS[kind].fields.keys()


if __name__ == "__main__":
    page = SECURITY.read_text(encoding="utf-8")
    SECURITY.write_text(re.sub(re.escape(HEAD) + r"(\|.*\n)*", lambda _: table(), page), encoding="utf-8")
