"""`make chaos`: six peers over loopback, disturbed in every way a deployment is. Each run must end, bit for bit, where
the one that was left alone ended."""

import argparse
import errno
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.mesh import outages
from tests.mesh.experiments import AD_GDA, experiment
from tests.mesh.fleet import provisioned
from tests.mesh.lives import Lives, Point, fresh
from tests.mesh.wires import HOLE, PASS, RESET, Wires

HOSPITALS = Path(__file__).parents[2] / "examples" / "hospitals.py"
NAMES = ["north", "east", "south", "west", "hill", "lake"]
EDGES = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 0], [0, 3]]
POINTS = (
    "computed", "logged", "sent", "received", "noted", "settled", "ack sent", "ack received", "before checkpoint",
    "after checkpoint", "segment begun", "after rotation",
)  # fmt: skip
_FAR = 240.0  # seconds after which a run hangs

Facts = dict[str, Any]


class Chaos:
    """One mesh, run again and again under disturbances drawn from a seed."""

    def __init__(self, folder: Path, rounds: int, seed: int):
        self.rounds, self._seed, self._folder = rounds, seed, folder
        self.every = max(5, rounds // 20)
        (folder / "hospitals.py").write_bytes(HOSPITALS.read_bytes())
        text = experiment(
            rounds,
            algorithm=AD_GDA | {"primal_step": 1.0, "dual_step": 0.1, "consensus_step": 0.3},
            topology={"name": "edges", "edges": EDGES},
            data={"name": "import", "path": "hospitals.py:sites", "arguments": {"count": 6}},
            model={"name": "import", "path": "hospitals.py:RiskModel"},
            seeds=[3],
            sampling={"batch": 25},
            options={"dtype": "float32", "measure_every": 50, "checkpoint_every": self.every},
        )
        (folder / "experiment.toml").write_text(text)
        self.mesh = provisioned(folder / "provisioned", folder / "experiment.toml", NAMES)
        self._undisturbed: dict[str, bytes] | None = None
        self.runs: list[Facts] = []

    def run(self, what: str, disturb: Callable[[Lives, random.Random], Facts], **lives: Any) -> None:
        """A run under one disturbance; the first run is the one that the others are compared with."""
        number = len(self.runs)
        folder = fresh(self._folder / "provisioned", self._folder / f"run-{number}")
        nodes, began = Lives(folder, NAMES, **lives), time.monotonic()
        try:
            facts = disturb(nodes, random.Random(f"{self._seed} {what}"))
            nodes.finish(_FAR)
            results = nodes.results()
        finally:
            nodes.end()
        if self._undisturbed is None:
            self._undisturbed = results
        unlike = [file for file, content in results.items() if content != self._undisturbed[file]]
        seconds = [one.seconds for one in nodes.recoveries]
        self.runs.append(
            {"what": what, "identical": not unlike, "seconds": round(time.monotonic() - began, 1)}
            | facts
            | ({"kills": len(nodes.kills)} if nodes.kills else {})
            | ({"recovery_s": seconds} if seconds else {})
        )
        print(json.dumps(self.runs[-1]), flush=True)
        if unlike:
            raise RuntimeError(f"{what}: {', '.join(unlike)} differ from the undisturbed run's; see {folder}")
        shutil.rmtree(folder)

    def run_all(self, only: str, points: dict[str, list[Point]]) -> None:
        disturbances: dict[str, Callable[[Lives, random.Random], Facts]] = {
            "kill -9 at random moments": self.killed_at_random(20),
            "kill -9 at injected points": self.killed_at_points,
            "newest checkpoint cut short": self.checkpoint_cut_short,
            "links between two halves cut": self.cut({RESET: 4.0, HOLE: 6.0}),
            "kill -9 of all, twice": self.all_stopped,
            "asked to stop": self.asked_to_stop,
            "power cut": self.power_cut,
            "disk full": self.disk_full,
        }
        for what, disturb in disturbances.items():
            if only in what:
                self.run(what, disturb, points=points if disturb == self.killed_at_points else None)

    def at(self, share: float) -> int:
        """The step at this share of the rounds."""
        return int(share * self.rounds)

    # The disturbances

    def left_alone(self, nodes: Lives, draw: random.Random) -> Facts:
        """Also measures what the state takes on disk: it must not grow."""
        nodes.start_all()
        nodes.finish(_FAR)
        sizes = nodes.sizes("north")
        early, late = max(sizes[3:8]), max(sizes[-5:])  # the first few checkpoints are kept together
        if len(sizes) < 15 or late > 1.1 * early:
            raise RuntimeError(f"the state of a node grows: bytes after each checkpoint {sizes}")
        return {"disk_bytes_early": early, "disk_bytes_late": late}

    def killed_at_random(self, count: int) -> Callable[[Lives, random.Random], Facts]:
        def disturb(nodes: Lives, draw: random.Random) -> Facts:
            nodes.start_all()
            for name in draw.sample(NAMES, 2):  # before they have met
                nodes.wait(_after(draw.uniform(0, 0.8)), _FAR)
                nodes.kill(name)
            for step in sorted(draw.randrange(2, self.at(0.97)) for _ in range(count - 2)):
                name = draw.choice(NAMES)
                nodes.wait(lambda name=name, step=step: nodes.step(name) >= step, _FAR)
                nodes.wait(_after(draw.uniform(0, 0.03)), _FAR)
                nodes.kill(name, draw.choice((0.0, 0.0, draw.uniform(0, 1.5))))
            return {}

        return disturb

    def points(self, names: tuple[str, ...], draw: random.Random, at_the_end: int) -> dict[str, list[Point]]:
        """Each point once, dealt out to the nodes in the order of the steps; and some while sums are made."""
        dealt: dict[str, list[Point]] = {name: [] for name in NAMES}
        hands = draw.sample(NAMES, len(NAMES))
        for k, name in enumerate(names):
            step = self.at(0.1 + 0.8 * (k + draw.random()) / len(names))
            dealt[hands[k % len(hands)]].append(Point(name, step))
        ends = [("noted", 2), ("result written", 0), ("logged", 1), ("sent", 2)]
        for hand, (name, after) in zip(hands, ends[:at_the_end]):
            dealt[hand].append(Point(name, self.rounds + after))
        return dealt

    def killed_at_points(self, nodes: Lives, draw: random.Random) -> Facts:
        nodes.start_all()
        nodes.finish(_FAR)
        return self._points_reached(nodes)

    def _points_reached(self, nodes: Lives) -> Facts:
        return {"points": [[point, site, step] for site, point, step in nodes.reached]}

    def cut(self, kinds: dict[int, float]) -> Callable[[Lives, random.Random], Facts]:
        """All links between two halves, for so many seconds, by each kind of cut."""

        def disturb(nodes: Lives, draw: random.Random) -> Facts:
            wires = Wires(nodes.folder, self.mesh)
            wires.start()
            half = set(NAMES[:3])
            told: Facts = {}
            try:
                nodes.start_all()
                for k, (kind, seconds) in enumerate(kinds.items()):
                    nodes.wait(lambda k=k: nodes.step("north") > self.at(0.3 * (k + 1)), _FAR)
                    edges = wires.set(kind, lambda edge: (edge[0] in half) != (edge[1] in half))
                    nodes.wait(_after(1.0), _FAR)
                    before = nodes.step("north")
                    nodes.wait(_after(seconds - 1.0), _FAR)
                    if nodes.step("north") > before + len(NAMES):
                        raise RuntimeError(f"rounds go on over {edges}, which are cut")
                    wires.set(PASS, lambda edge: True)
                    healed = time.monotonic()
                    nodes.wait(lambda before=before: nodes.step("north") > before + len(NAMES), _FAR)
                    name = {RESET: "reset", HOLE: "black hole"}[kind]
                    told[name] = {"cut_s": seconds, "on_again_s": round(time.monotonic() - healed, 2)}
                nodes.finish(_FAR)
            finally:
                wires.end()
            return {"cut": told}

        return disturb

    def all_stopped(self, nodes: Lives, draw: random.Random) -> Facts:
        """All at once, and once more while they are coming back."""
        nodes.start_all()
        for moment in (lambda: nodes.step("north") > self.at(0.4), _after(draw.uniform(0.3, 0.9))):
            nodes.wait(moment, _FAR)
            for name in NAMES:
                nodes.kill(name)
            nodes.wait(_after(0.0), _FAR)
        return {}

    def asked_to_stop(self, nodes: Lives, draw: random.Random) -> Facts:
        """SIGTERM, in the midst of the rounds."""
        nodes.start_all()
        name = draw.choice(NAMES)
        nodes.awaited.add(name)
        nodes.wait(lambda: nodes.step(name) > self.at(0.5), _FAR)
        nodes.ask_to_stop(name)
        began = time.monotonic()
        nodes.wait(lambda: name in nodes.exits, 20)
        seconds = time.monotonic() - began
        said = [line["reason"] for line in nodes.log_of(name) if line["what"] == "stopped"]
        if nodes.exits[name] == 0 or not said or "round" not in said[-1]:
            raise RuntimeError(f"asked to stop, {name} ended with code {nodes.exits[name]} and said {said}")
        nodes.start_again(name)
        return {"said": said[-1], "stopped_after_s": round(seconds, 2)}

    def checkpoint_cut_short(self, nodes: Lives, draw: random.Random) -> Facts:
        """The newest one, by hand, while the node is down."""
        nodes.start_all()
        name, cut = draw.choice(NAMES), []

        def damage(who: str) -> None:
            if who == name and not cut:
                path = nodes.newest_checkpoint(who)
                os.truncate(path, path.stat().st_size // 2)
                cut.append(path.name)

        nodes.wait(lambda: nodes.step(name) > self.at(0.5), _FAR)
        nodes.while_down = damage
        nodes.kill(name)
        nodes.finish(_FAR)
        said = [line for line in nodes.log_of(name) if "damaged" in line["what"]]
        if not cut or [line["file"] for line in said] != cut:
            raise RuntimeError(f"{name} did not say that {cut} is damaged")
        return {"said": f"{said[0]['what']}: {said[0]['file']}"}

    def a_little_of_it(self, nodes: Lives, draw: random.Random) -> Facts:
        """For a quick test: two kills while the nodes meet, two points, and a checkpoint cut short, in one run."""
        self.killed_at_random(2)(nodes, draw)
        told = self.checkpoint_cut_short(nodes, draw)
        return told | self._points_reached(nodes)

    def power_cut(self, nodes: Lives, draw: random.Random) -> Facts:
        """kill -9 of three nodes, after which only those bytes of their journals are left that were made durable."""
        nodes.before_start = lambda name: outages.note_what_is_durable(nodes.folder / f"{name}.durable")
        lost: list[int] = []
        nodes.while_down = lambda name: lost.append(outages.keep_what_is_durable(nodes.folder / f"{name}.durable"))
        nodes.start_all()
        for k in range(3):
            nodes.wait(lambda k=k: nodes.step("north") > self.at(0.2 + 0.25 * k) + 13, _FAR)
            for name in draw.sample(NAMES, 3):
                nodes.kill(name)
        nodes.finish(_FAR)
        return {"journal_bytes_lost": lost}

    def disk_full(self, nodes: Lives, draw: random.Random) -> Facts:
        name = draw.choice(NAMES)
        nodes.awaited.add(name)
        kind = outages.start_on_a_small_disk(nodes, name, self.at(0.5))
        nodes.start_all()
        nodes.wait(lambda: name in nodes.exits, _FAR)
        said = outages.last_words(nodes, name)
        if nodes.exits[name] == 0 or os.strerror(errno.ENOSPC) not in said:
            raise RuntimeError(f"with a full disk {name} ended with code {nodes.exits[name]} and said {said!r}")
        stopped = nodes.step(name)
        nodes.start_again(name)
        return {"disk": kind, "said": said.replace(f"{nodes.folder}/", ""), "stopped_in_step": stopped}


def _after(seconds: float) -> Callable[[], bool]:
    began: list[float] = []

    def passed() -> bool:
        began.append(time.monotonic()) if not began else None
        return time.monotonic() - began[0] >= seconds

    return passed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--short", action="store_true", help="a few kills, two points, a damaged checkpoint")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", default="", help="runs whose name contains this, and the undisturbed one")
    options.add_argument("--write", type=Path, help="a file for the figures")
    given = options.parse_args()
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    chaos = Chaos(folder, 80 if given.short else 300, given.seed)
    draw = random.Random(f"{given.seed} points")
    chaos.run("left alone", chaos.left_alone)
    if given.short:
        chaos.run("a little of it", chaos.a_little_of_it, points=chaos.points(("sent", "segment begun"), draw, 1))
    else:
        chaos.run_all(given.only, chaos.points(POINTS, draw, 4))
    recoveries = [seconds for run in chaos.runs for seconds in run.get("recovery_s", ())]
    told = {
        "nodes": len(NAMES),
        "rounds": chaos.rounds,
        "checkpoint_every": chaos.every,
        "seed": given.seed,
        "seconds": round(time.monotonic() - began, 1),
        "recoveries": len(recoveries),
        "recovery_median_s": round(statistics.median(recoveries), 2) if recoveries else None,
        "recovery_longest_s": max(recoveries, default=None),
        "runs": chaos.runs,
    }
    print(json.dumps({key: value for key, value in told.items() if key != "runs"}))
    if given.write:
        given.write.write_text(json.dumps(told, indent=1) + "\n")
    shutil.rmtree(folder)
    if recoveries and statistics.median(recoveries) > 5:
        sys.exit(f"half of the recoveries take longer than 5 s: {recoveries}")


if __name__ == "__main__":
    main()
