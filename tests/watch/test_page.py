"""The page as text: what is on it, for whom, and what hostile words become."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import get_args

import pytest

from fairmesh.errors import in_bytes
from fairmesh.watch.answers import answers
from fairmesh.watch.now import UNSEEN
from fairmesh.watch.page import SCRIPT, STYLE, live_page, rendered, snapshot
from fairmesh.watch.view import Curve, Curves, Estimate, Line, Missing, Privacy, Site, SiteState, Variant, Verdict, View
from tests.report.pages import Page
from tests.watch.examples import HOSTILE, NOW, VIEWS, node, private, simulation, sixty

EMPTY = View("run", "new", "starting", "it starts", "fine", seen_at=0.0, news_at=None)
QUESTIONS = 5


def answer(view: View, question: str) -> str:
    [found] = [f"{one.answer}. {one.detail}" for one in answers(view) if one.question.startswith(question)]
    return found


def text_of(page: str) -> str:
    words: list[str] = []
    parser = HTMLParser()
    parser.handle_data = words.append
    parser.feed(page)
    return "".join(words)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.quick_cases("all")
def test_page_is_well_formed_and_the_sentence_is_its_heading(name):
    view = VIEWS[name]()
    for page in (snapshot(view), live_page(view, rendered(view))):
        seen = Page(page)
        assert [words.lower().lstrip("▲■") for words in seen.texts["h1"]] == [view.sentence.lower()]
        assert len(re.findall("<dt>", rendered(view)["answers"])) == QUESTIONS


def test_page_has_no_element_or_attribute_of_a_hostile_name():
    page = snapshot(sixty())
    seen = Page(page)
    tags = {tag for tag, _ in seen.elements}
    assert not tags & {"img", "script", "iframe", "object"}
    attributes = {name for _, of in seen.elements for name in of}
    assert not {name for name in attributes if name.startswith("on")} | (attributes & {"src", "style"})
    assert HOSTILE in text_of(page)


def test_snapshot_needs_no_other_file_and_no_script():
    page = snapshot(node())
    assert "<script" not in page
    assert "page.css" not in page
    targets = re.findall(r'(?:href|src|action|url\()="?([^"\s>)]+)', page)
    assert targets
    assert all(target.startswith(("#", "data:")) for target in targets)
    assert "unsafe" not in page
    assert "does not change" in page


def test_live_page_has_no_style_or_script_inside():
    page = live_page(node(), rendered(node()))
    assert "<style" not in page
    assert re.findall(r"<script[^>]*>", page) == ['<script type="module" src="page.js">']
    assert not re.findall(r"https?://", page.replace("http://www.w3.org/2000/svg", ""))
    assert not re.findall(r"https?://", SCRIPT + STYLE)


def test_every_section_has_a_place_on_the_page():
    made = rendered(node())
    page = live_page(node(), made)
    assert all(f'id="{name}"' in page for name in made)


def test_page_of_nothing_yet_is_a_page():
    page = snapshot(EMPTY)
    assert "no news yet" in page
    assert rendered(EMPTY)["sites"] == rendered(EMPTY)["pictures"] == ""
    Page(page)


def test_page_withstands_numbers_that_are_none():
    bad = [
        Site(f"site {k}", value=Estimate(v, (v, v)), weight=v, prior=v, alone=Estimate(v), epsilon=v)
        for k, v in enumerate((math.nan, math.inf, -math.inf, 1e308))
    ]
    view = replace(
        simulation(),
        sites=tuple(bad),
        curves=Curves((0, 1), Curve((math.nan, None)), Curve((math.inf, 1.0)), (Curve((None, None)),) * 4),
        privacy=Privacy(math.inf, 8.0, 1e-5),
        worst=Estimate(math.nan),
        edges=(),
    )
    assert "nan" not in re.sub(r"<[^>]*>", "", snapshot(view)).lower()


def test_page_shows_a_site_in_every_state():
    for state in get_args(SiteState):
        view = replace(node(), sites=tuple(replace(site, state=state) for site in node().sites))
        assert f">{state}<" in re.sub(r"<span aria-hidden[^/]*/span> ", "", rendered(view)["sites"])


def test_table_marks_what_a_site_only_says_itself():
    page = rendered(node())["sites"]
    rows = {re.findall(r'scope="row">(\w+)', row)[0]: row for row in page.split("<tr")[2:]}
    assert "claim" not in rows["west"]
    assert rows["east"].count('class="claim"') >= 4
    assert "only the site itself says" in page


def test_table_of_sixty_sites_shows_the_first_dozen_in_the_order_of_concern_and_folds_the_rest():
    view = replace(sixty(), order=tuple(reversed(range(60))))
    shown, folded = rendered(view)["sites"].split("<details>")
    assert re.findall(r"site-\d\d", shown)[0] == "site-57"
    assert shown.count("<tr data-key") == 12
    assert folded.count("<tr data-key") == 48


def test_worst_site_is_named_in_a_word_and_every_cell_says_its_column():
    page = rendered(simulation())["sites"]
    assert re.findall(r'scope="row">(\w+) <small>([^<]*)', page) == [("north", "worst")]
    heads = re.findall(r'scope="col"[^>]*>([^<]*)', page)[1:]
    assert re.findall(r'<td[^>]* data-label="([^"]*)"', page) == heads * 4
    assert page.count("<td") == len(heads) * 4


def test_table_has_only_columns_with_something_in_them():
    heads = set(re.findall(r'scope="col"[^>]*>([^<]*)', rendered(simulation())["sites"]))
    assert {"site", "state", "round", "accuracy", "alone", "weight λ", "prior"} == heads


def test_network_shows_long_waits_only():
    assert "west has waited for east for 12 minutes" in text_of(rendered(node())["network"])
    assert "south says that it has waited for east" in text_of(rendered(node())["network"]).lower()
    assert "waited for" not in rendered(sixty())["network"]  # 3 seconds, as in every round


def test_network_draws_as_connected_only_what_the_node_sees():
    made = rendered(node())["network"]
    assert "5 sites, 3 connections. Open at this site: 1 of 2." in made
    assert "not seen from here" in made  # east and south, of which only they know
    over = replace(node(), edges=tuple(replace(edge, connected=None) for edge in node().edges))
    assert "Open at this site" not in rendered(over)["network"]
    for view in (simulation(), replace(over, state="finished")):  # here it says who talks to whom, or has
        assert "not seen from here" not in rendered(view)["network"]


def test_refusals_of_the_log_have_a_place_of_their_own():
    refused = (Line("2030-03-17T17:34:42Z", "warning", f"refused: address {HOSTILE}, reason no handshake"),)
    made = rendered(replace(node(), refusals=(), votes=(), refused=refused))["refusals"]
    assert f"refused: address {HOSTILE}" in text_of(made)
    assert HOSTILE not in made
    assert not rendered(replace(node(), refusals=(), votes=()))["refusals"]


def test_captions_say_what_bands_are_and_there_is_no_word_on_bands_where_there_are_none():
    assert "bands span them" in rendered(simulation())["pictures"]
    assert "means over 3 replicas" in rendered(simulation())["pictures"]
    assert "bands" not in rendered(replace(simulation(), replicas=1))["pictures"]
    assert "bands" not in rendered(node())["pictures"]


def test_sweep_shows_its_variants():
    curves = Curves((0, 10), Curve((0.5, 0.6)), Curve((0.6, 0.7)))
    variants = (
        Variant("step_size = 0.1", curves, Estimate(0.6), shown=True, replicas=2),
        Variant("step_size = 1", curves, None, diverged=2, replicas=2),
    )
    made = rendered(replace(simulation(), kind="sweep", variants=variants))
    assert "2 of 2" in made["variants"]
    assert "step_size = 0.1" in made["pictures"]


def test_answers_name_the_site_that_holds_a_node_up_and_since_when():
    assert answer(node(), "Is it running").startswith("Yes, but it does not go on")
    assert answer(node(), "Who holds it up").startswith("east. west has waited for east for 12 minutes")
    assert answer(node(), "What should I do").startswith("Act now")


def test_answers_name_the_sites_that_are_missing_outside_the_rounds():
    sites = tuple(replace(site, state="unreachable" if site.name == "east" else "at work") for site in node().sites)
    at_the_end = replace(node(), sites=sites, chain=(), waits=(), urgency="look", missing=Missing((2,), 840.0))
    assert answer(at_the_end, "Who holds it up") == "east. west has waited for 14 minutes; not heard of: east"
    before = replace(at_the_end, round=0, missing=Missing((2, 3), 9.0))
    assert answer(before, "Is it running").startswith("Yes, but it waits. for east, south; round 0 of 4,000")
    assert answer(before, "Who holds it up").startswith("east, south.")
    short = replace(at_the_end, missing=Missing((3,), 4.0))
    assert answer(short, "Is it running").startswith("Yes: training")


def test_answers_name_all_sites_that_cannot_be_reached_when_one_of_them_holds_a_node_up():
    away = {"east": "unreachable", "south": "silent"}
    sites = tuple(replace(site, state=away.get(site.name, "waits")) for site in node().sites)
    assert answer(replace(node(), sites=sites), "Who holds it up").startswith("east, south. west has waited for east")
    there = tuple(replace(site, state="at work" if site.name == "east" else site.state) for site in sites)
    assert answer(replace(node(), sites=there), "Who holds it up").startswith("east. ")


@pytest.mark.parametrize("state", ["died", "stopped", "diverged"])
@pytest.mark.quick_cases("all")
def test_answers_of_a_node_that_has_ended_early_say_that_the_others_wait_for_it(state):
    sites = tuple(replace(site, state=state if site.own else "unknown") for site in node().sites)
    ended = replace(node(), sites=sites, live=False, chain=(), waits=())
    assert answer(ended, "Who holds it up") == "This site. The others wait for it."
    voted_out = replace(ended, sites=tuple(replace(site, own=False) for site in sites))
    assert answer(voted_out, "Who holds it up") == "Nobody. Nothing runs."


def test_answer_on_what_to_keep_an_eye_on_is_the_sentence():
    view = replace(node(), urgency="look", says=("something else",))
    assert answer(view, "What should I do") == f"Keep an eye on it. {view.sentence}"


def test_answers_of_a_run_that_cannot_be_seen_are_not_known():
    view = replace(simulation(), state=UNSEEN, live=False, urgency="look")
    assert answer(view, "Is it running").startswith("Not known")
    assert answer(view, "Who holds it up").startswith("Not known")


def test_answers_do_not_say_that_nothing_is_measured_where_nothing_says_what_was_measured():
    view = replace(EMPTY, state=UNSEEN, urgency="look")
    assert "No site has measured" not in answer(view, "Is it worth it")


def test_answers_of_a_run_without_news_do_not_say_that_it_goes_on():
    view = replace(simulation(), news_at=NOW - 720, quiet=True)
    assert answer(view, "Is it running") == "Perhaps: no news for 12 minutes. round 1,840 of 4,000"


def test_speed_and_time_left_are_in_plain_numbers():
    fast = replace(simulation(), rounds_per_s=1040.0, seconds_left=0.0)
    assert "1,040 rounds per second, a few seconds left" in answer(fast, "Is it running")
    assert "18 rounds per hour" in answer(replace(simulation(), rounds_per_s=0.005), "Is it running")


def test_answer_of_a_node_without_a_clear_difference_says_it_once():
    run, unclear = private(), Verdict("alone", "unclear", "no clear difference from alone (−4 to +2 points)")
    view = replace(run, kind="node", sites=(replace(run.sites[0], own=True, verdicts=(unclear,)),))
    assert answer(view, "Is it worth it").startswith("No clear difference from alone (−4 to +2 points). ")


def test_advice_of_a_finished_run_is_what_to_do_now():
    view = replace(private(), advice="Every site should use the common model.")
    assert answer(view, "What should I do").startswith("Every site should use the common model.")


def test_answers_of_a_run_that_goes_on():
    view = simulation()
    assert "1,840 of 4,000" in answer(view, "Is it running")
    assert "about 25 minutes left" in answer(view, "Is it running")
    assert answer(view, "Who holds it up").startswith("Nobody")
    assert answer(view, "Is it worth it").startswith("Not known yet")
    assert answer(view, "What should I do").startswith("Nothing")


def test_answers_of_a_finished_run_say_whether_it_was_worth_it_and_what_it_cost():
    view = private()
    assert answer(view, "Is it running").startswith("No: finished")
    assert answer(view, "Is it worth it").startswith("Better than alone at 3 of 4 sites. Worse at north")
    assert "epsilon 7.4 of 8" in answer(view, "How much")


def test_answer_of_a_run_without_a_clear_difference_at_any_site_says_that():
    run, unclear = private(), Verdict("alone", "unclear", "no clear difference from alone")
    view = replace(run, sites=tuple(replace(site, verdicts=(unclear,)) for site in run.sites))
    assert answer(view, "Is it worth it") == "No clear difference from alone. At none of 4 sites."


def test_answer_on_what_has_left_a_site_is_all_that_went_over_the_wire():
    assert answer(node(), "How much has left") == "19 MB. of it 18.2 MB model messages; no rows"
    assert answer(simulation(), "How much leaves").startswith("48.2 MB. model messages by the busiest site; no rows")


def test_answers_of_a_node_are_about_its_own_site():
    run = private()
    view = replace(run, kind="node", sites=(replace(run.sites[0], own=True, uses="its own model"), *run.sites[1:]))
    told = answer(view, "Is it worth it for us")
    assert told.startswith("No: worse than alone")
    assert "model to use: its own model" in told


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1e3, "1 kB"), (18.2e6, "18.2 MB"), (2.5e14, "250 TB")],
)
@pytest.mark.quick_cases("all")
def test_in_bytes(count, words):
    assert in_bytes(count) == words


def test_in_bytes_of_the_largest_numbers_is_readable():
    assert in_bytes(5e16) == "50,000 TB"
