"""The sentence on what to know of a run and what to do now."""

import pytest

from fairmesh.metrics.units import Unit
from fairmesh.storage.run_status import DIVERGED, FAILED, STOPPED
from fairmesh.watch.now import Worst, left_s, now, rate_now
from fairmesh.watch.view import Estimate
from tests.refusals import missing_from
from tests.watch.folders import status

NOW = 1_900_000_000.0
WORST = Worst("north", Estimate(0.71, (0.64, 0.77)), Unit("accuracy", share=True))
MINUTES = 12 * 60.0
ALONE = {"name": "training each site alone", "done": 618, "of": 2000}


def run(alive: bool | None = True, age: float = 1.0, **changes) -> dict:
    return status(alive=alive, time=NOW - age, **({"round": 1840, "rounds": 4000, "rounds_per_s": 1.44} | changes))


@pytest.mark.parametrize(
    ("run", "urgency", "words"),
    [
        (run(), "fine", ["round 1,840 of 4,000", "about 25 minutes left", "worst site north, 71.0 % (64.0 to 77.0)"]),
        (run(rounds_per_s=None), "fine", ["round 1,840 of 4,000; worst"]),
        (run(round=3999), "fine", ["a few seconds left"]),
        (run(age=MINUTES), "look", ["no news for 12 minutes", "hangs"]),
        (run(age=MINUTES, rounds_per_s=0.01), "fine", ["days left"]),
        (run(round=0, phase={"name": "finding reference losses", "done": 30, "of": 400}), "fine", ["30 of 400 steps"]),
        (
            run(round=0, phase={"name": "preparing", "done": 0, "of": 0}),
            "fine",
            ["preparing; then the 4,000 rounds begin"],
        ),
        (run(round=4000, phase={"name": "summing up", "done": 0, "of": 0}), "fine", ["all rounds are done"]),
        (run(age=20, rounds_per_s=495.0), "fine", ["round 1,840 of 4,000; no news for 20 seconds; worst"]),
        (run(alive=False, state=STOPPED, round=4000, phase=ALONE), "act", ["after all rounds", "alone", "--resume"]),
        (run(alive=False, age=MINUTES), "act", ["has died in round 1,840 of 4,000, 12 minutes ago", "--resume"]),
        (run(alive=None, age=MINUTES), "look", ["on another machine", "no news for 12 minutes"]),
        (run(alive=False, state=STOPPED, reason="Ctrl-C"), "act", ["was stopped in round 1,840", "--resume"]),
        (run(alive=False, state=DIVERGED, reason="lower step_size"), "act", ["lower step_size"]),
        (run(alive=False, state=FAILED, reason="OSError: no space"), "act", ["OSError: no space", "--resume"]),
        (run(alive=False, state="from tomorrow"), "look", ["another version"]),
        (run(age=-1e9), "fine", ["about 25 minutes left"]),  # a clock that was set back
    ],
)
@pytest.mark.quick_cases("all")
def test_sentence_says_how_a_run_is_and_what_to_do(run, urgency, words):
    said = now(run, NOW, worst=WORST, saved=True)
    assert missing_from(said.sentence, *words) == []
    assert said.urgency == urgency
    assert "--resume" not in now(run, NOW).sentence  # without a checkpoint


def test_time_left_counts_down_and_is_not_known_without_a_rate_or_outside_the_rounds():
    assert left_s(run(age=0), NOW) == pytest.approx(1500)
    assert left_s(run(age=50), NOW) == pytest.approx(1450)
    assert left_s(run(age=100), NOW) is None  # it hangs, perhaps
    assert left_s(run(age=50, round=3999), NOW) == 0.0
    assert left_s(run(age=20, rounds_per_s=495.0), NOW) is None  # which would be ten thousand rounds
    assert rate_now(run(age=20, rounds_per_s=495.0), NOW) is None
    assert rate_now(run(age=5, rounds_per_s=495.0), NOW) == 495.0
    assert left_s(run(age=-1e9), NOW) == pytest.approx(1500)
    phase = {"name": "preparing", "done": 0, "of": 0}
    for other in (run(rounds_per_s=None), run(phase=phase), run(alive=False), run(alive=None)):
        assert left_s(other, NOW) is None
