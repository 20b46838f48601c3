"""A star in which only the centre listens: the others dial, and a line that is cut for a while costs only time."""

import pytest

from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run
from tests.mesh.wires import HOLE, PASS, RESET, Wires

NAMES = ["a", "b", "c"]  # a is the centre
EXPERIMENT = experiment(300, topology="star")
FLEET = {"names": NAMES, "experiment": EXPERIMENT, "listening": ["a"]}


@pytest.mark.slow
def test_leaf_of_a_star_whose_line_is_cut_dials_again_and_all_end_with_the_model_of_an_uncut_run(tmp_path):
    with Run(tmp_path / "calm", **FLEET) as calm:
        assert calm.mesh.edges == (("b", "a"), ("c", "a"))  # who dials whom
        calm.start(*NAMES)
        undisturbed = calm.end(*NAMES)
    with Run(tmp_path / "cut", **FLEET) as run:
        wires = Wires(tmp_path / "cut", run.mesh, delay_s=0.01)
        wires.start()
        try:
            run.start(*NAMES)
            for mode, after in ((RESET, 50), (HOLE, 100)):
                run.until(lambda after=after: run.round("a") > after)
                wires.set(mode, lambda edge: edge == ("b", "a"))
                run.until(lambda: not run.status("a")["edges"]["b"]["connected"])
                assert run.status("a")["edges"]["c"]["connected"]
                wires.set(PASS, lambda edge: True)
            assert run.end(*NAMES) == undisturbed
        finally:
            wires.end()
