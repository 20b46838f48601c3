"""The codec's results, recorded in benchmarks/results with `python -m benchmarks codec --json`."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
RECORDED = json.loads((RESULTS / "codec-cpu.json").read_text())
CASES = {case["case"]: case for case in RECORDED["cases"] if case["dim"] < 1_000_000}


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case["entropy_coded"] and case["dim"] >= 10_000])
def test_recorded_message_is_within_five_percent_of_its_entropy_and_not_above_bit_packing(name):
    case = CASES[name]
    assert case["bytes"] <= 1.05 * case["entropy_bytes"]
    assert case["bytes"] <= case["packed_bytes"]


@pytest.mark.parametrize("moment", ["early", "middle", "late"])
def test_recorded_message_of_four_bits_with_one_norm_takes_at_most_a_tenth_of_a_byte_per_coordinate(moment):
    case = CASES[f"Fashion-MNIST, FC-25, 4 bit, one norm, {moment}"]
    assert case["dim"] == 19_885
    assert case["bytes"] <= 0.8 * case["dim"] / 8


def test_recorded_codec_keeps_to_its_time_limits():
    for case in RECORDED["cases"]:
        both = case["encode_ms"] + case["decode_ms"]
        if case["case"].startswith("Gaussian, 4 bit"):
            assert both <= (1.0 if case["dim"] == 20_000 else 4 * case["dim"] / 100e6 * 1e3), case


def test_recorded_counting_costs_at_most_a_fifth_on_a_cpu_and_a_tenth_on_a_gpu():
    assert RECORDED["counting"]["slowdown"] <= 0.2
    on_gpu = json.loads((RESULTS / "counting-h200.json").read_text())["counting"]
    assert max(run["slowdown"] for run in on_gpu) <= 0.1


@pytest.mark.parametrize("page", ["docs/results/performance.md", "README.md"])
def test_pages_show_the_recorded_messages(page):
    """docs/results/performance.md shows every row; the front page may show some."""
    lines = (ROOT / page).read_text().splitlines()
    for shown, name in {
        "4 bit, one norm": "4 bit, one norm",
        "4 bit, a norm for every 512": "4 bit, blocks of 512",
        "8 bit, one norm": "8 bit, one norm",
        "top 10 %": "top 10 %",
    }.items():
        case = CASES[f"Fashion-MNIST, FC-25, {name}, middle"]
        rows = [line for line in lines if line.startswith(f"| {shown} |")]
        assert rows or page == "README.md"
        for row in rows:
            assert f"| {8 * case['bytes'] / case['dim']:.2f} |" in row
            assert f"| {100 * (case['bytes'] / case['entropy_bytes'] - 1):.1f} % |" in row.replace("−", "-")
