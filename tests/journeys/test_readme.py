"""The README from top to bottom: all that it shows runs in its order, with no extra that it has not named so far."""

import re
import subprocess

import pytest

from tests.docs.pages import ROOT
from tests.journeys.walk import steps, walking

PAGE = "README.md"
SHORT = "--set rounds=2 --set splits=1 --set options.measure_every=1"


def test_readme_python_is_at_most_fifteen_lines():
    (block,) = [step for step in steps(PAGE) if step.kind == "python"]
    assert len([line for line in block.text.splitlines() if line.strip()]) <= 15


def test_readme_runs_in_its_order_with_the_extras_that_it_has_named_so_far(tmp_path):
    """In a short form: runs have few rounds, and what `make demo` would install and `launch` train is only begun."""
    with walking(tmp_path / "clone") as walk:
        walk.bring("examples")
        for step in steps(PAGE):
            command = re.sub(r"\s+#.*", "", step.text)
            if command == "make demo":
                walk.install("plot")  # by the Makefile
                walk.write(".venv/bin/activate", "")
            elif command.startswith("fairmesh launch "):
                walk.run(f"timeout 2 {command}", code=124)  # what is refused ends before
            elif command.startswith(("fairmesh run ", "fairmesh advise ")):
                walk.run(f"{command} {SHORT}", place=step.place)
            else:
                walk.do(step._replace(text=step.text.replace("rounds=300", "rounds=4")))
        assert (walk.folder / "curves.png").exists()
        assert (walk.folder / "runs" / "small-sites" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_readme_runs_on_a_fresh_machine(tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    with walking(clone, fresh=True) as walk:
        printed = {step.text.split("  ")[0]: walk.do(step, timeout=1500) for step in steps(PAGE)}
    (references,) = [text for command, text in printed.items() if "--with-references" in command]
    better, worse = re.search(r"better than alone at (\d+) of 10 sites, worse at (\w+)", references).groups()
    assert int(better) == 6, "all small sites gain, says the page"
    assert worse == "none", "no site is worse off, says the page"
    assert (clone / "fairmesh-demo" / "report.html").exists()
    assert (clone / "runs" / "launched" / "summary.json").exists()
