"""Charts as SVG text: what is in them, and what they make of numbers and names that are no good."""

import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from fairmesh.report import charts
from fairmesh.report.charts import Dots, Line, Node, Wait
from fairmesh.report.html import STYLE
from fairmesh.report.style import COLOURS, MARKERS

HOSTILE = "<img src=x onerror=alert(1)>\"'&\ud800\u202e\x00"
BAD = (math.nan, math.inf, -math.inf, None, 1e308, -1e308, "1", True)
ROUNDS = range(0, 100, 10)


def parsed(text: str) -> ElementTree.Element:
    """Returns a chart as a tree; an error if it is no XML, which is stricter than HTML."""
    return ElementTree.fromstring(f"<figure>{text}</figure>")


def numbers(text: str) -> list[float]:
    """Returns all numbers that place or shape something."""
    places = re.findall(r'(?:d|x|y|transform|viewBox)="([^"]*)"', text)
    return [float(number) for place in places for number in re.findall(r"-?\d*\.?\d+(?:e[+-]?\d+)?", place)]


def of_class(text: str, name: str) -> list[ElementTree.Element]:
    return [element for element in parsed(text).iter() if name in element.get("class", "").split()]


def texts(text: str) -> list[str]:
    return [element.text or "" for element in parsed(text).iter("text")]


def legend(text: str) -> list[str]:
    return ["".join(element.itertext()) for element in parsed(text).iter("li")]


def drawn(text: str) -> ElementTree.Element:
    [svg] = [element for element in parsed(text).iter("svg") if element.get("class") == "chart"]
    return svg


def all_charts(names, values, label="loss"):
    """Yields each kind of chart of these names and values."""
    count = len(names)
    pairs = [(value, value) for value in values]
    yield charts.curves([Line(name, ROUNDS, values, style=k) for k, name in enumerate(names)], label, label, label)
    yield charts.curves([Line(label, values, values, values, values, step=True)], label, label, label)
    yield charts.curves([Line(name, ROUNDS, values, faint=True) for name in names], label, label, label, label)
    yield charts.dots(names, [Dots(label, values, pairs, values[::-1], style=k) for k in range(3)], label, label)
    yield charts.weights(names, values, values[::-1], label)
    nodes = [Node(name, name, k == 0, k == 1, k == 2, value) for k, (name, value) in enumerate(zip(names, values))]
    waits = [Wait(k, (k + 1) % count, label) for k in range(count)]
    edges = [(k, (k + 3) % count) for k in range(count)]
    yield charts.network(nodes, edges, label, waits, edges[:2], label)


@pytest.mark.parametrize("count", [0, 1, 2, 24, 60, 200])
@pytest.mark.quick_cases("all")
def test_charts_are_drawn_inside_their_frame_for_any_number_of_sites(count):
    names = [f"site-{k}" for k in range(count)]
    for text in all_charts(names, [0.5 + 0.01 * k for k in range(count)]):
        _, _, width, height = map(float, drawn(text).get("viewBox").split())
        for element in drawn(text).iter("path"):
            points = re.findall(r"(-?[\d.]+) (-?[\d.]+)", "" if element.get("transform") else element.get("d"))
            for x, y in points:
                assert -1 <= float(x) <= width + 1, element.attrib
                assert -1 <= float(y) <= height + 1, element.attrib


@pytest.mark.parametrize("value", [*BAD, 0.0, -0.0, 5e-324, 1e-9, 1e15, 9e99, -9e99], ids=repr)
@pytest.mark.quick_cases("all")
def test_charts_draw_only_numbers(value):
    for values in ([value], [value] * 3, [0.5, value, 0.7], [value, 0.5, -value if type(value) is float else value]):
        for text in all_charts([f"site-{k}" for k in range(len(values))], values):
            assert all(abs(number) < 1000 for number in numbers(text))
            assert "nan" not in text
            assert "inf" not in text.replace("infinite", "")


def test_charts_of_nothing_say_so():
    for text in (*all_charts([], []), *all_charts(["one"], [math.nan])):
        if not of_class(text, "site"):
            assert "nothing to show yet" in "".join(texts(text)) or of_class(text, "away")


def test_charts_escape_every_word_and_need_nothing_of_a_page_but_its_colours():
    for text in all_charts([HOSTILE] * 3, [0.1, 0.2, 0.3], HOSTILE):
        tree = parsed(text)
        assert {element.tag for element in tree.iter()} <= {"figure", "svg", "title", "g", "path", "text", "ul", "li"}
        attributes = {name for element in tree.iter() for name in element.attrib}
        assert not attributes & {"id", "style", "href", "onerror", "onload"}
        text.encode()  # no half of a pair
        assert not {"\u202e", "\x00"} & set(text)


def test_charts_are_images_with_a_title():
    for text in all_charts(["one", "two"], [0.1, 0.2], "what it shows"):
        svg = drawn(text)
        assert svg.get("role") == "img"
        assert svg[0].tag == "title"
        assert svg[0].text == "what it shows"


def test_curves_differ_by_colour_marker_and_dashes_and_the_legend_is_outside_with_one_entry_each():
    lines = [Line("worst", ROUNDS, ROUNDS), Line("mean", ROUNDS, ROUNDS, style=1, dashed=True)]
    text = charts.curves([*lines, lines[0]], "rounds", "accuracy, %", "curves")
    assert legend(text) == ["worst", "mean"]
    assert not [element for element in drawn(text).iter() if element.tag == "li"]
    looks = {element.get("class") for element in drawn(text).iter("path") if "line" in element.get("class").split()}
    assert looks == {"line c0", "line c1 dashed"}
    assert {"rounds", "accuracy, %"} <= set(texts(text))


def test_last_label_of_an_axis_is_inside_the_frame():
    long = charts.curves([Line("a", (0, 1_000_000), (0.1, 0.2), style=0)], "rounds", "accuracy", "t")
    labels = re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="middle">([\d,]+)<', long)
    assert labels[-1][1] == "1,000,000"
    assert float(labels[-1][0]) + charts._width(labels[-1][1]) / 2 <= charts._WIDTH


def test_names_are_cut_by_the_size_in_which_they_are_written():
    name = "Mercy Hospital"
    assert charts._short(name, 80, 9.0) == name
    assert charts._short(name, 80).endswith("…")
    assert charts._width("WWWW") > 2 * charts._width("iiii")


def test_curves_have_gaps_where_a_number_is_missing():
    text = charts.curves([Line("worst", [0, 1, 2, 3, 4], [1, 2, math.nan, 3, 4])], "rounds", "loss", "curves")
    assert len(of_class(text, "line")) == 2


def test_curves_place_points_by_their_numbers():
    text = charts.curves([Line("worst", [0, 10, 20], [1.0, 3.0, 2.0])], "rounds", "loss", "curves")
    [line] = of_class(text, "line")
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, place.split())) for place in line.get("d")[1:].split("L")]
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.3)  # downwards, as pictures count


def test_a_curve_of_many_points_is_thinned_but_keeps_its_extremes():
    values = [0.5] * 100_000
    values[54_321], values[-1] = 0.9, 0.1
    text = charts.curves([Line("worst", range(100_000), values)], "rounds", "loss", "curves")
    assert len(text) < 10_000
    [line] = of_class(text, "line")
    heights = [float(place.split()[1]) for place in line.get("d")[1:].split("L")]
    assert heights[-1] == max(heights)
    assert heights.count(min(heights)) == 1


def test_bands_are_drawn_where_both_ends_are_known():
    band = Line("worst", [0, 1, 2, 3], [1, 2, 3, 4], [0, 1, None, 3], [2, 3, 4, 5])
    assert len(of_class(charts.curves([band], "rounds", "loss", "curves"), "band")) == 2


def test_dots_have_an_interval_only_where_both_ends_are_known():
    series = [Dots("this run", [1, 2, 3], [(0, 2), None, (math.nan, 4)]), Dots("alone", [2, 3, None], style=1)]
    text = charts.dots(["a", "b", "c"], series, "loss", "dots")
    assert len(of_class(text, "span")) == 1
    assert len([mark for mark in drawn(text).iter("path") if "mark" in mark.get("class").split()]) == 5
    assert legend(text) == ["this run", "alone"]


def test_one_of_many_faint_lines_has_no_band():
    line = Line("north", [0, 1], [0.5, 0.6], [0.4, 0.5], [0.6, 0.7])
    assert 'class="band' in charts.curves([line], "rounds", "accuracy", "sites")
    assert 'class="band' not in charts.curves([replace(line, faint=True)], "rounds", "accuracy", "sites")


def test_weights_have_a_bar_each_and_the_numbers_in_words():
    text = charts.weights(["north", "east"], [0.4, 0.6], [0.1, 0.9], "weights")
    bars = {
        kind: [bar for bar in drawn(text).iter("path") if bar.get("class") == kind] for kind in ("bar c0", "bar prior")
    }
    lengths = {
        kind: [float(bar.get("d").split("L")[1].split()[0]) - float(bar.get("d")[1:].split()[0]) for bar in found]
        for kind, found in bars.items()
    }
    assert lengths["bar c0"][1] / lengths["bar c0"][0] == pytest.approx(1.5, abs=0.02)
    assert lengths["bar prior"][1] / lengths["bar prior"][0] == pytest.approx(9, abs=0.3)
    assert {"10 % → 40 %", "90 % → 60 %"} <= set(texts(text))


def test_network_shows_who_waits_for_whom_and_since_when():
    nodes = [Node("west", own=True), Node("north", worst=True), Node("east", away=True)]
    text = charts.network(nodes, [(0, 1), (1, 2), (0, 2)], "network", [Wait(0, 2, "12 min")], [(2, 0)])
    assert len(of_class(text, "edge")) - 1 == 3  # one is in the legend
    assert [element.text for element in of_class(text, "since")] == ["12 min"]
    titles = [element.text for element in drawn(text).iter("title")]
    assert "west has waited for east for 12 min" in titles
    assert legend(text) == ["this site", "worst site", "cannot be reached", "waits for", "not connected"]


def test_network_tells_edges_that_nobody_sees_from_those_that_are_open_or_not():
    text = charts.network([Node(name) for name in "abc"], [(0, 1), (1, 2), (0, 2)], "", (), [(0, 2)], unseen=[(2, 1)])
    assert len(of_class(text, "edge")) - 2 == 3  # two are in the legend
    assert [len(of_class(text, look)) for look in ("broken", "unseen")] == [2, 2]
    assert legend(text) == ["not connected", "not seen from here"]
    assert all(f".{look}{{stroke-dasharray" in STYLE for look in ("broken", "unseen"))


def test_network_ignores_numbers_of_no_site():
    text = charts.network([Node("a"), Node("b")], [(0, 1), (0, 7), (-1, 0), (1, 1), (0,)], "network", [Wait(0, 9)])
    assert len(of_class(text, "edge")) == 1
    assert not of_class(text, "wait")


def test_network_of_many_sites_names_those_that_matter():
    nodes = [Node(f"site-{k}", own=k == 7) for k in range(200)]
    named = texts(charts.network(nodes, [], "network", [Wait(20, 30, "3 min")]))
    assert sorted(named) == ["site-20", "site-30", "site-7"]


def test_charts_and_pictures_have_the_same_colours_and_as_many_shapes():
    for k, colour in enumerate(COLOURS):
        assert f"--c{k}:{colour}" in STYLE
        assert f".c{k}{{--c:var(--c{k})}}" in STYLE
    assert len(charts._SHAPES) == len(MARKERS)
