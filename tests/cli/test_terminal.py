"""What commands print: words of other sites cannot control the terminal, whatever is in them."""

import contextlib
import io

import pytest

from fairmesh.cli.node import _by_concern
from fairmesh.cli.terminal import few, put, say, show, show_rows, show_table
from fairmesh.errors import BadInput, printable
from fairmesh.mesh.node.watching import Log

HOSTILE = "north\x1b]0;owned\x07\x1b[2J\rall is well\x9b31m\N{RIGHT-TO-LEFT OVERRIDE}exe\x00\x7f"
FORBIDDEN = "\x1b\x07\r\x9b\N{RIGHT-TO-LEFT OVERRIDE}\x00\x7f"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def left_in(text: str) -> set[str]:
    return {character for character in FORBIDDEN if character in text}


@pytest.mark.parametrize(
    "show_it",
    [
        lambda: say(f"{HOSTILE} refuses: {HOSTILE}"),
        lambda: put(HOSTILE),
        lambda: show(HOSTILE),
        lambda: show_rows([["site", HOSTILE], [HOSTILE, "1"]]),
        lambda: show_table([["site", HOSTILE], [HOSTILE, "1"]], f"mesh {HOSTILE} [red]"),
    ],
    ids=["say", "put", "show", "rows", "table"],
)
@pytest.mark.parametrize("stream", [_Terminal, io.StringIO], ids=["terminal", "file"])
@pytest.mark.quick_cases("all")
def test_names_and_reasons_cannot_control_a_terminal(stream, show_it, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")  # then rich writes no commands of its own
    shown = stream()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        show_it()
    assert "north" in shown.getvalue()
    assert left_in(shown.getvalue()) == set()


def test_log_on_a_terminal_and_in_a_file_shows_no_control_characters_of_others(tmp_path):
    shown = _Terminal()
    with contextlib.closing(Log(tmp_path, shown)) as log:
        log("warning", "refused", site=HOSTILE, reason=f"{HOSTILE}\nfinished")
    for text in (shown.getvalue(), (tmp_path / "log.jsonl").read_text()):
        assert "north" in text
        assert left_in(text) == set()
    assert "\nfinished" not in shown.getvalue()


def test_errors_that_end_a_command_are_printed_without_control_characters(monkeypatch, capsys, called):
    def fails(*arguments: object) -> None:
        raise BadInput(f"{HOSTILE} is no site\nall checks passed")

    monkeypatch.setattr("fairmesh.cli.node.SiteFile.read", fails)
    monkeypatch.setattr("fairmesh.cli.terminal.read_toml", lambda path: {})
    code, out, err = called("status", "site.toml")
    assert (code, left_in(out + err)) == (2, set())
    assert "\nall checks passed" not in err


def test_text_without_control_characters_stays_as_it_is():
    assert printable("Besançon 東京 λ = 0.5 %\nmore") == "Besançon 東京 λ = 0.5 %\n  more"


def test_few_shows_ten_rows_of_many_in_an_order_and_how_many_more_there_are():
    table = [["site", "round"], *([f"s{k}", str(k)] for k in range(40))]
    assert few(table[:13]) == table[:13]
    *shown, last = few(table, [*range(39, -1, -1)])
    assert shown == [table[0], *table[:-11:-1]]
    assert ("30 more" in last[0], len(last)) == (True, 2)


def test_status_of_many_sites_begins_with_this_one_and_those_that_are_silent_or_behind():
    heard = {"heard_s_ago": 1.0, "again_s": 5.0, "round": 90}
    sites = {f"s{k}": heard for k in range(40)}
    sites |= {"s7": None, "s8": heard | {"heard_s_ago": 900.0}, "s9": heard | {"round": 80}}
    names = list(sites)
    assert [names[i] for i in _by_concern({"site": "s20", "sites": sites})[:4]] == ["s20", "s7", "s8", "s9"]
