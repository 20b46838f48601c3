"""Colours and markers of pictures, measured: on white and dark paper, in grey, and as colour-blind people see them."""

import itertools
import re

import numpy as np
import pytest

import fairmesh as fm
from fairmesh.report import html, plots
from fairmesh.report.style import COLOURS, MARKERS

TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
SEEN = {  # linear RGB as people see it who lack a kind of cones (Machado, Oliveira and Fernandes, 2009)
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
    "all cones": np.eye(3),
}
LEAST = {"deuteranopia": 15, "protanopia": 15, "tritanopia": 15, "all cones": 28}  # 2 is just noticeable
PAPER = re.findall(r"--paper:(#\w+)", html.STYLE)


def linear(colour):
    digits = colour.removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(2 * one for one in digits)
    value = np.array([int(digits[i : i + 2], 16) for i in (0, 2, 4)]) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE L*a*b*, in which equal distances look about equally large."""
    x = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.95047, 1, 1.08883])
    f = np.where(x > 0.008856, np.cbrt(x), 7.787 * x + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one, other):
    """The ratio of WCAG 2: 3 for what must be seen in a picture."""
    light = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


def test_colours_can_be_seen_on_every_paper_of_the_report():
    assert {"#fff", "#161718"} <= set(PAPER)
    for colour, paper in itertools.product(COLOURS, set(PAPER)):
        assert contrast(colour, paper) >= 3, (colour, paper)


@pytest.mark.parametrize("eyes", SEEN)
def test_colours_stay_apart_for_colour_blind_people(eyes):
    seen = [lab(np.array(SEEN[eyes]) @ linear(colour)) for colour in COLOURS]
    for (i, one), (j, other) in itertools.combinations(enumerate(seen), 2):
        assert np.linalg.norm(one - other) >= LEAST[eyes], (COLOURS[i], COLOURS[j])


def test_first_four_colours_stay_apart_in_grey():
    lightness = [lab(linear(colour))[0] for colour in COLOURS[:4]]
    assert min(abs(one - other) for one, other in itertools.combinations(lightness, 2)) >= 6
    assert abs(lightness[0] - lightness[1]) >= 15  # most pictures have two


def test_every_colour_has_a_marker_of_its_own():
    assert len(set(MARKERS)) == len(MARKERS) == len(set(COLOURS)) == len(COLOURS)


def test_curves_differ_by_marker_and_dashes_too_and_axes_have_units():
    experiment = fm.Experiment(fm.data.Digits(nodes=4), algorithm=fm.algorithms.DSGD(), rounds=4)
    result = fm.run(experiment)
    figure = plots.plot({"one": result, "other": result})
    lines = figure.axes[0].lines
    worst = [line for line in lines if line.get_linestyle() == "-"]
    mean = [line for line in lines if line.get_linestyle() == "--"]
    assert len({line.get_marker() for line in worst}) == len(worst) == 2
    assert [line.get_marker() for line in mean] == [line.get_marker() for line in worst]
    assert {line.get_markerfacecolor() for line in mean} == {"white"}
    assert {axis.get_ylabel() for axis in figure.axes} == {"accuracy, %", ""}, "panels share their axis"
    assert [axis.get_xlabel().split(", ")[-1].split()[0] for axis in figure.axes] == ["rounds", "MB", "MB"]
