"""What a page in a browser costs a run of 200 sites that has news every 100 ms and 100,000 recorded rounds.

The run is a stand-in: it does the work of a round of fixed size, and writes status.json and metrics.jsonl as a run of
200 sites does, whose files it copies. Everything else is real: the command, its server, and Chromium. The page is open
and closed in turn, and a round's time is compared within each pair of turns, since other programs slow both."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fairmesh.errors import BadInput
from fairmesh.storage.occupied import METRICS, STATUS
from fairmesh.storage.run_status import RUNNING, locked

RESULTS = Path(__file__).parent / "results" / "watch-cpu.json"
SITES, RECORDS, NEWS_S = 200, 100_000, 0.1
_TURN_S, _SAMPLE_S = 15.0, 5.0


@dataclass
class Cost:
    """What was measured.

    Args:
        seconds: How long the page was watched in all.
        turns: Pairs of turns, without and with the page.
        rounds_per_s: Rounds per second without the page, the median.
        lost: The share of rounds per second that the page costs, the median of the pairs; below 0 if it is noise.
        lost_of_processor: The same of rounds per second of the run's own processor time, in which other programs and
            the number of cores do not count.
        command_share: The part of one processor that the command takes while a page is open.
        first_page_s: From the start of the command to the first page.
        behind_s: By how much the page was behind the run at the end.
        command_mb: Memory of the command, at each sample.
        page_mb: Memory of the process that shows the page.
        browser_mb: Memory of all processes of the browser. Pages of memory that several share are divided among them.
        empty_browser_mb: The same of a browser with an empty page.
        load: The load of the machine meanwhile, and its cores: what else it had to do.
    """

    seconds: float
    turns: int = 0
    rounds_per_s: float = 0.0
    lost: float = 0.0
    lost_of_processor: float = 0.0
    command_share: float = 0.0
    first_page_s: float = 0.0
    behind_s: float = 0.0
    command_mb: list[float] = field(default_factory=list)
    page_mb: list[float] = field(default_factory=list)
    browser_mb: list[float] = field(default_factory=list)
    empty_browser_mb: float = 0.0
    load: str = ""


def cost(seconds: float = 600.0, records: int = RECORDS) -> Cost:
    """Returns what a page costs that is watched for so long, turns without it left out."""
    from tests.watch.browser import CHROMIUM, launched

    if CHROMIUM is None:
        raise BadInput("there is no Chromium; `make browser` installs it where apt-get is")
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place) / "run"
        template = _template(folder)
        _fill(folder, template, records)
        stand_in = stack.enter_context(_stand_in(folder))
        began = time.monotonic()
        command, address = stack.enter_context(_command(folder))
        browser = stack.enter_context(launched())
        page = browser.new_page()
        page.goto("about:blank")
        main = _children(os.getpid(), "chrom")[0]
        found = Cost(seconds, empty_browser_mb=_total_mb(main))
        page.goto(address, timeout=120_000)
        page.wait_for_selector("#now", timeout=600_000)  # the page of a server that still reads loads itself again
        found.first_page_s = time.monotonic() - began
        _take_turns(found, stand_in, command, page, address)
        _hold(found, command, main, seconds - found.turns * _TURN_S)
        shown = page.inner_text("#now").replace(",", "")
        found.behind_s = (_state(folder)["round"] - int(re.findall(r"ound (\d+)", shown)[0])) / found.rounds_per_s
    found.load = f"{os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"
    return found


def _take_turns(found: Cost, stand_in: Path, command: int, page: Any, address: str) -> None:
    """Opens and closes the page in turn."""
    pairs = []
    for _ in range(max(3, int(found.seconds / 6 / _TURN_S))):
        turns = []
        for target in ("about:blank", address):
            page.goto(target, timeout=120_000)
            page.wait_for_timeout(2000)  # until a page is shown
            before, used, then = _done(stand_in), _processor_s(command), time.monotonic()
            page.wait_for_timeout(1000 * _TURN_S)
            after, took = _done(stand_in), time.monotonic() - then
            rounds = after["round"] - before["round"]
            share = (_processor_s(command) - used) / took
            turns.append((rounds / (after["time"] - before["time"]), rounds / (after["cpu"] - before["cpu"]), share))
        pairs.append(turns)
    without, open_ = zip(*pairs)
    found.turns = len(pairs)
    found.rounds_per_s = statistics.median(turn[0] for turn in without)
    found.lost, found.lost_of_processor = (
        statistics.median(1 - b[k] / a[k] for a, b in zip(without, open_)) for k in (0, 1)
    )
    found.command_share = statistics.median(turn[2] for turn in open_)


def _hold(found: Cost, command: int, main: int, seconds: float) -> None:
    """Leaves the page open and samples the memory."""
    until = time.monotonic() + seconds
    while True:
        found.command_mb.append(_mb(command))
        found.page_mb.append(max(_mb(child) for child in _children(main, "", "--type=renderer")))
        found.browser_mb.append(_total_mb(main))
        if time.monotonic() >= until:
            return
        time.sleep(_SAMPLE_S)


# The run


def _template(folder: Path) -> dict[str, Any]:
    """Runs 200 sites for a few rounds and stops. Returns the last record that the run has written."""
    file = folder.with_suffix(".toml")
    file.write_text(
        f'rounds = 100000000\n[data]\nname = "digits"\nnodes = {SITES}\n[topology]\nname = "circulant"\n'
        'offsets = [1, 7]\n[algorithm]\nname = "ad-gda"\n[options]\nmeasure_every = 1\n'
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "fairmesh", "run", str(file), "--out", str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while not (_state(folder).get("round") or 0) > 5:
            if run.poll() is not None or time.monotonic() > until:
                raise BadInput("the run of 200 sites did not begin")
            time.sleep(0.1)
    finally:
        run.kill()
        run.wait()
    lines = (folder / METRICS).read_text().splitlines()
    return json.loads(lines[-2])  # the last one may be cut


def _state(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / STATUS).read_bytes())
    except (OSError, ValueError):
        return {}


def _fill(folder: Path, template: dict[str, Any], records: int) -> None:
    """Writes so many records as if the run had done as many rounds."""
    some = [_record(template, k).partition(",")[2] for k in range(100)]
    with open(folder / METRICS, "w") as file:
        for k in range(records):
            file.write(f'{{"round": {k},{some[k % len(some)]}')


def _record(template: dict[str, Any], round: int) -> str:
    wave = 0.05 * ((round * 7919) % 100) / 100
    metric = template["accuracy"] | {"sites": [value * (0.9 + wave) for value in template["accuracy"]["sites"]]}
    return json.dumps({"round": round} | template | {"round": round, "accuracy": metric}) + "\n"


@contextmanager
def _stand_in(folder: Path) -> Iterator[Path]:
    """Starts the stand-in. Yields the file in which it counts its rounds."""
    counts = folder.with_suffix(".count")
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.watch", str(folder), str(counts)], env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        while not counts.exists():
            if process.poll() is not None:
                raise BadInput("the stand-in for a run has ended")
            time.sleep(0.05)
        yield counts
    finally:
        process.kill()
        process.wait()


def _run_stand_in(folder: Path, counts: Path) -> None:
    """Does rounds and writes news every 100 ms, until it is killed."""
    import numpy as np

    with open(folder / METRICS, "rb") as file:
        file.seek(-20_000, os.SEEK_END)
        template = json.loads(file.read().splitlines()[-1])
    status, matrix = _state(folder) | {"state": RUNNING, "locked": True}, np.random.default_rng(0).random((160, 160))
    round, due = template["round"], time.monotonic()
    with locked(folder), open(folder / METRICS, "a") as records:
        while True:
            for _ in range(10):  # a millisecond or so
                matrix = np.tanh(matrix @ matrix.T / 160)
            round += 1
            if time.monotonic() >= due:
                due = time.monotonic() + NEWS_S
                records.write(_record(template, round))
                records.flush()
                _replace(folder / STATUS, status | {"round": round, "rounds": 10 * round, "time": time.time()})
                _replace(counts, {"round": round, "time": time.monotonic(), "cpu": time.process_time()})


def _replace(path: Path, table: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(table))
    os.replace(partial, path)


def _done(counts: Path) -> dict[str, float]:
    return json.loads(counts.read_text())


# The command and the browser


@contextmanager
def _command(folder: Path) -> Iterator[tuple[int, str]]:
    out = folder.with_suffix(".address")
    with open(out, "w") as file:
        words = [sys.executable, "-u", "-m", "fairmesh", "watch", str(folder), "--no-browser"]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while not (found := re.findall(r"http://\S+", out.read_text())):
            if process.poll() is not None or time.monotonic() > until:
                raise BadInput("fairmesh watch has not begun")
            time.sleep(0.05)
        yield process.pid, found[0]
    finally:
        process.kill()
        process.wait()


def _children(process: int, *holds: str) -> list[int]:
    """Returns the processes below one whose command lines hold all of some words, parents first."""
    below, found = {process}, []
    for number in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            parent = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
            line = Path(f"/proc/{number}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if parent in below:
            below.add(number)
            if all(word in line for word in holds):
                found.append(number)
    return found


def _mb(process: int) -> float:
    """Returns the memory of a process, its part of what it shares with others included."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0.0
    return int(re.findall(r"^Pss: +(\d+)", text, re.M)[0]) / 1000


def _total_mb(main: int) -> float:
    return _mb(main) + sum(map(_mb, _children(main)))


def _processor_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def as_table(found: Cost) -> dict[str, Any]:
    """Returns a cost for the recorded file, with numbers of three digits."""
    rounded = {name: float(f"{v:.3g}") if isinstance(v, float) else v for name, v in asdict(found).items()}
    rounded |= {name: [round(v, 1) for v in getattr(found, name)] for name in ("command_mb", "page_mb", "browser_mb")}
    return {"sites": SITES, "records": RECORDS, "news_every_s": NEWS_S} | rounded


if __name__ == "__main__":
    _run_stand_in(*map(Path, sys.argv[1:]))
