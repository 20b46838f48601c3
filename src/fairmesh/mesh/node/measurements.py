"""The metrics of all sites during a run, and each site's models of its best rounds.

Every `measure_every` rounds a site measures its own model on its own held-out data. It announces these rows, signed, to
all sites. An announcement replaces the one before it, so it repeats every row that some site has not acknowledged yet;
a site acknowledges rows when they are on its disk. So no row is lost, whoever was down meanwhile.

Rows belong to a generation of the mesh. When the sites go back to a round, rows of later rounds are dropped. When a
site has left, its rows are dropped too, so that a curve is over the same sites from its first round to its last. A
site that was restored has lost its rows, so all sites drop those from before.

The best round follows from the rows by the experiment's rule, `best_by`. A node keeps its own model of the best round
so far, of the rounds that not all sites have measured yet, and of the best round before every checkpoint to which the
sites can go back. At the end each site announces of which rounds it has its model. The best of those that all have is
chosen; it is the same at every site, because all choose from the same signed rows.
"""

import hashlib
import json
import math
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairmesh.errors import CheckpointError
from fairmesh.mesh.announcements import FURTHER, wrong_row
from fairmesh.mesh.fields import EPSILON, VALIDATION
from fairmesh.mesh.node.claims import CONTRADICTIONS, PUT_BACK
from fairmesh.mesh.node.store import BEST, PROGRESS, TABLE
from fairmesh.mesh.node.watching import Aside
from fairmesh.mesh.wire.bulletin import Announcement, Bulletin
from fairmesh.mesh.wire.frames import read_json
from fairmesh.mesh.wire.journal import storing
from fairmesh.metrics.over_sites import LEVEL
from fairmesh.problems.evaluator import measured_names
from fairmesh.problems.prepared import Prepared
from fairmesh.regularizers.simplex import normalized
from fairmesh.storage.checkpoint import read_stored, write_stored
from fairmesh.storage.files import write_atomically
from fairmesh.storage.run_folder import METRICS, Record
from fairmesh.storage.strict_json import as_json
from fairmesh.training.best_round import RoundScores, replaces
from fairmesh.training.meter import traffic, with_spread

_LARGEST_SHARE = 1e3  # of lambda, by sites' estimates of it
_ROWS_AT_MOST = 24_000  # bytes of the rows in one announcement
_KIND = "measured"  # of announcement
_SOURCES = 4  # announcements of a site that are kept, in case it contradicts one of them
_PENDING_AT_LEAST, _PENDING_BYTES = 16, 1 << 28  # models that are kept of rounds that some site has not measured
_WITHOUT_AT_MOST = 20_000  # measurements of all sites for which it is quick to leave out each site once

Row = list[Any]  # a round, then the numbers of one site after it, and the running hash of its messages; None: not known


class Contradiction(NamedTuple):
    """What a site has signed of its messages, and something else that it has sent or signed."""

    since: int  # the last measured round after which both agreed
    round: int  # the first one after which they do not
    signed: str  # the running hash that it has signed
    other: str  # that of the messages that came from it, or
    both: bool  # a second one that it has signed


class Schedule(NamedTuple):
    """What is measured when, and by which rule a round is the best. The same at every site."""

    rounds: int
    every: int
    best_by: str
    seed: int
    level: float = LEVEL  # of CVaR, for `best_by`
    since: int = 0  # the first round that may be measured; rows before it are lost

    @property
    def due(self) -> list[int]:
        """Returns the measured rounds."""
        return [*(one for one in range(0, self.rounds, self.every) if one >= self.since), self.rounds]


class Measurements:
    """The rows of all sites as one node knows them, and the node's own models.

    Args:
        state: The node's state folder.
        own: The name of this site.
        bulletin: Carries the announcements.
        aside: Takes what cannot be used, and logs it.
    """

    def __init__(self, state: Path, own: str, bulletin: Bulletin, aside: Aside):
        self._state, self._own, self._bulletin, self._aside = state, own, bulletin, aside
        self._lock = threading.RLock()
        self._problem: Any = None  # of the present sites, once a generation is entered
        self._rows: dict[str, dict[int, Row]] = {}
        self._models: dict[int, Tensor] = {}  # of measured rounds, not on disk yet
        self._model_bytes = 1
        self._received: dict[int, dict[str, str]] = {}  # the running hashes of what came, by measured round and site
        self.contradicted: dict[str, Contradiction] = {}  # by site, in this generation
        self._sources: dict[str, deque[Announcement]] = {}  # the last ones with new rows, by site
        self._final: list[int] | None = None  # of which rounds this node has its model, once that is settled
        self._kept: dict[str, list[int]] = {}  # and of which other sites have theirs: what each has said first
        self.records: list[Record] = []  # of the rounds that all sites have measured
        self.after_record: Callable[[Sequence[Record]], None] = lambda records: None  # with all records so far

    # A generation

    def enter(
        self,
        generation: int,
        start: int,
        schedule: Schedule,
        problem: Prepared,
        names: Sequence[str],
        landmarks: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """Begins or continues a generation of the mesh.

        Args:
            generation: Its number.
            start: The round from which it began.
            schedule: What is measured when.
            problem: The problem of the present sites.
            names: The present sites.
            landmarks: Returns the rounds to which the sites can go back. Default: none.
        """
        with self._lock, storing(self._state):
            self._generation, self._schedule, self._problem, self._names = generation, schedule, problem, list(names)
            self._others = [site for site in names if site != self._own]
            self._due, self._told, self._models, self._start = schedule.due, None, {}, start
            self._columns, self._landmarks = columns_of(problem), landmarks
            before = self._read_table()
            if before < generation:
                self._drop_after(start, before)
            self._on_disk = self._intact_models()
            self.records = []
            self._scores: list[Tensor] = []  # how good each of them is by the rule
            self._rule = None if schedule.best_by == "last" else RoundScores(problem, schedule.best_by, schedule.level)
            self._refresh(all_again=True)

    def _read_table(self) -> int:
        """Reads the table. Returns its generation, 0 if there is none. Passes over and names what this node would not
        have written, since the disk has damaged it."""
        path, generation = self._state / TABLE, 0
        self._rows, self._final = {name: {} for name in self._names}, None
        self._received, self.contradicted, self._kept = {}, {}, {}
        content = path.read_bytes() if path.exists() else b""
        whole, _, cut = content.rpartition(b"\n")
        for line in whole.splitlines():
            try:
                entry = _intact(read_json(line))
                generation = int(entry.get("generation", generation))
                final, site = entry.get("final", self._final), entry.get("site")
                self._final = None if final is None else [int(one) for one in final]
                self._note(entry)
                wrong = wrong_row(self._columns, entry["row"], self._bulletin.terms) if site in self._rows else ""
            except (ValueError, TypeError, KeyError, AttributeError):
                entry, site, wrong = {}, "", "another form"
            if wrong:
                whose = site if site in self._rows else self._own
                self._aside.ignore(whose, f"metrics in {TABLE}", f"a line has {wrong}")
            elif site in self._rows:
                self._rows[site][entry["row"][0]] = entry["row"]
        for site, done in [(site, done) for site in self._names for done in sorted(self._received)]:
            self._judge(site, done)
        if cut:  # by a crash
            os.truncate(path, len(content) - len(cut))
        return generation

    def lost(self, done: int) -> list[int]:
        """Returns the rounds before one that this site must have measured, and whose rows are not in the table. That
        one itself is measured when the node starts."""
        with self._lock:
            return [due for due in self._due if due < done and due not in self._rows[self._own]]

    def _drop_after(self, start: int, before: int) -> None:
        """Drops what the sites went back from, the rows of sites that have left, and those that a restored site has
        lost. What was shown of them is put aside."""
        self._final, self._received, self.contradicted, self._kept = None, {}, {}, {}
        stay = range(self._schedule.since, start + 1)
        self._rows = {
            site: {done: row for done, row in rows.items() if done in stay} for site, rows in self._rows.items()
        }
        for path in (self._state / BEST).glob("round-*.safetensors"):
            if int(path.stem.removeprefix("round-")) not in stay:
                path.unlink()
        shown = self._state / PROGRESS / METRICS
        if before and shown.exists():
            os.replace(shown, self._state / f"metrics-generation-{before}.jsonl")
        head = [{"generation": self._generation, "start": start}]
        kept = [{"site": site, "row": row} for site, rows in self._rows.items() for row in rows.values()]
        write_atomically(self._state / TABLE, _lines(head + kept))

    # Rows

    def add(
        self,
        done: int,
        metrics: Sequence[float],
        weight: float | None,
        sent: Sequence[float],
        sent_hash: str | None = None,
        received: Mapping[str, str] | None = None,
    ) -> None:
        """Adds what this site has measured after a round. A round that was measured before a restart stays as it was.
        One that is not due is left out: a generation that restores a site may begin after a round that is otherwise
        measured.

        Args:
            done: The round.
            metrics: The metrics, in the order of the columns.
            weight: This site's weight, if it has one.
            sent: Its traffic in bits and bytes.
            sent_hash: The running hash of what it has sent. Default: None, it is not known.
            received: The running hashes of what came from neighbours, by name. Default: none.
        """
        numbers = (*metrics, weight, *sent)
        row = [done, *(number if number is not None and math.isfinite(number) else None for number in numbers)]
        with self._lock:
            if done in self._due and done not in self._rows[self._own]:
                self._put([(self._own, [*row, sent_hash])], received=[done, dict(received or {})])

    def _put(self, found: Sequence[tuple[str, Row]], **more: Any) -> None:
        """Adds rows to the table, and syncs it. Only then may they be announced or acknowledged."""
        entries = [{"site": site, "row": row} for site, row in found] + ([more] if more else [])
        with storing(self._state), open(self._state / TABLE, "ab") as file:
            file.write(_lines(entries))
            file.flush()
            os.fsync(file.fileno())
        self._note(more)
        for site, row in found:
            self._rows[site][row[0]] = row
            for sender in self._names if site == self._own else [site]:
                self._judge(sender, row[0])

    # Running hashes

    def _note(self, entry: Mapping[str, Any]) -> None:
        """Takes up what a line of the table says about messages, if it does."""
        if "received" in entry:
            done, hashes = entry["received"]
            self._received[int(done)] = dict(hashes)
        if "contradicted" in entry:
            site, *contradiction = entry["contradicted"]
            self.contradicted[site] = Contradiction(*contradiction)
        if "kept" in entry:
            site, kept = entry["kept"]
            self._kept[site] = [int(done) for done in kept]

    def _judge(self, site: str, done: int) -> None:
        """Compares the running hash that a site has signed with that of what came from it. Only rounds of this
        generation are compared, since every generation has running hashes of its own."""
        signed, came = self._signed(site, done), self._received.get(done, {}).get(site)
        known = self.contradicted.get(site)
        if done > self._start and signed and came and signed != came and (known is None or done < known.round):
            self.contradicted[site] = Contradiction(self._agreed_before(site, done), done, signed, came, False)

    def _signed(self, site: str, done: int) -> str | None:
        return self._rows.get(site, {}).get(done, [None])[-1]

    def _agreed_before(self, site: str, done: int) -> int:
        """Returns the last measured round before this one after which messages were those that a site has signed."""
        agreed = (one for one, hashes in self._received.items() if hashes.get(site) == self._signed(site, one))
        return max((one for one in agreed if self._start < one < done), default=self._start)

    def unsigned(self) -> list[str]:
        """Returns the sites that have announced metrics of this generation without a hash of their messages."""
        with self._lock:
            rows = {site: dict(of_site) for site, of_site in self._rows.items()} if self._problem is not None else {}
        return [
            site for site in rows if any(done > self._start and row[-1] is None for done, row in rows[site].items())
        ]

    def signed_by(self, site: str, done: int) -> str | None:
        """Returns the running hash of its messages that a site has signed after a round, if this node knows it."""
        with self._lock:
            return self._signed(site, done) if self._problem is not None else None

    def agrees_with(self, site: str, done: int) -> bool:
        """Returns whether what came here from a site up to a round is what it has signed."""
        with self._lock:
            signed = self.signed_by(site, done)
            return bool(signed) and self._received.get(done, {}).get(site) == signed

    def exchange(self) -> None:
        """Takes over the rows that others have announced, and announces this site's, as far as there is news."""
        with self._lock:
            if self._problem is None:
                return
            newest = (self._bulletin.entry(site, _KIND) for site in self._others)
            found = [(entry.site, row) for entry in self._of_generation(newest) for row in self._new_rows(entry)]
            if found:
                self._put(found)
            for entry in self._of_generation(self._bulletin.superseded()):
                self._new_rows(entry)  # which are not taken over, but may contradict those that are known
            self._refresh()
            rows = self._to_tell()
            news = (self._generation, rows[-1][0] if rows else -1, len(self.records), self._final)
            if news == self._told:
                return
            self._told, body = news, {"generation": self._generation, "columns": self._columns, "rows": rows}
            self._bulletin.announce(_KIND, body | {"complete": len(self.records), "kept": self._final})

    def _of_generation(self, entries: Iterable[Announcement | None]) -> list[Announcement]:
        """Returns those announcements that are of other present sites, and of this generation."""
        known = (entry for entry in entries if entry is not None and entry.site in self._others)
        return [entry for entry in known if entry.body["generation"] == self._generation]

    def _announced(self) -> dict[str, dict[str, Any]]:
        """Returns the newest announcements of other present sites in this generation."""
        bodies = {site: self._bulletin.of(site, _KIND) for site in self._others}
        return {s: b for s, b in bodies.items() if b.get("generation") == self._generation}

    def _new_rows(self, entry: Announcement) -> list[Row]:
        """Returns the rows that this node does not have yet. The first row of a site for a round counts."""
        site, body = entry.site, entry.body
        if body["columns"] != self._columns:
            columns = ", ".join(body["columns"])
            self._aside.ignore(site, "metrics", f"it measures something else than this site: {columns}")
            return []
        self._note_kept(entry)
        known, due, found = self._rows[site], set(self._due), []
        for row in body["rows"]:
            metrics = f"metrics after round {row[0]}"
            if row[0] not in due:
                self._aside.ignore(site, metrics, f"round {row[0]} is not to be measured")
            elif row[0] not in known:
                found.append(row)
            elif known[row[0]] != row:
                self._aside.ignore(site, metrics, f"it has announced others of round {row[0]} before")
                self._compare_signed(known[row[0]], row, entry)
        if found:
            self._sources.setdefault(site, deque(maxlen=_SOURCES)).append(entry)
        return found

    def _note_kept(self, entry: Announcement) -> None:
        """Keeps on disk of which rounds a site says first that it has its model. The best round depends on it, and so
        do the sums at the end, which a restart must not change. A site that says something else to others sets these
        against each other in the sums, so it is named to all."""
        site, kept = entry.site, entry.body["kept"]
        if kept is not None and site not in self._kept:
            self._sources.setdefault(site, deque(maxlen=_SOURCES)).append(entry)
            self._put([], kept=[site, kept])
        elif kept is not None and kept != (first := self._kept[site]):
            self._aside.ignore(site, "kept models", "it has announced others before: it tells sites different things")
            one, other = (hashlib.sha256(json.dumps(rounds).encode()).hexdigest() for rounds in (first, kept))
            self._note_signed_twice(self._schedule.rounds, one, other, entry, lambda body: body["kept"] == first)

    def _compare_signed(self, first: Row, second: Row, entry: Announcement) -> None:
        """Notes that a site has signed two hashes of its messages up to one round. No honest site does."""
        if None not in (first[-1], second[-1]) and first[-1] != second[-1]:
            self._note_signed_twice(first[0], first[-1], second[-1], entry, lambda body: first in body["rows"])

    def _note_signed_twice(
        self, done: int, first: str, second: str, entry: Announcement, said_first: Callable[[Mapping[str, Any]], bool]
    ) -> None:
        """Notes that a site has signed two different things about the rounds up to one. Writes both announcements to a
        file: their signatures prove it to everybody."""
        site = entry.site
        before = self.contradicted.get(site)
        if done > self._start and (before is None or not before.both):
            contradiction = Contradiction(self._agreed_before(site, done), done, first, second, True)
            self._put([], contradicted=[site, *contradiction])
            sources = [one for one in self._sources.get(site, ()) if said_first(one.body)]
            proof = as_json({"round": done, "announcements": [one.table() for one in (*sources[:1], entry)]})
            with storing(self._state), open(self._state / CONTRADICTIONS, "a", encoding="utf-8") as file:
                file.write(proof + "\n")

    def _to_tell(self) -> list[Row]:
        """Returns the oldest of this site's rows that not every site has acknowledged, as many as fit."""
        announced = self._announced()
        had = min((announced[site]["complete"] if site in announced else 0 for site in self._others), default=0)
        mine, told, size = self._rows[self._own], list[Row](), 0
        for due in self._due[min(had, len(self.records)) :]:
            row = mine.get(due)
            size += 0 if row is None else len(json.dumps(row)) + 2
            if row is None or size > _ROWS_AT_MOST:
                break
            told.append(row)
        return told

    # Records

    def _refresh(self, all_again: bool = False) -> None:
        """Makes the records of the rounds that all sites have measured by now, and shows them."""
        due, known = self._due, len(self.records)
        while known < len(due) and all(due[known] in rows for rows in self._rows.values()):
            known += 1
        new = self._made(due[len(self.records) : known])
        self.records += new
        if self._rule is not None:
            metric = self._rule.metric
            sites = [record.get("validation", record)[metric]["sites"] for record in new]
            self._scores += [self._rule.add(torch.tensor([one])).squeeze(0) for one in sites]
        if not new and not all_again:
            return
        folder = self._state / PROGRESS
        folder.mkdir(exist_ok=True)
        text = "".join(as_json(record) + "\n" for record in new)
        if all_again:
            write_atomically(folder / METRICS, text.encode(), durable=False)
        else:
            with open(folder / METRICS, "a", encoding="utf-8") as file:
                file.write(text)
        if self.records:
            self._aside.tried("the view of the run in progress", lambda: self.after_record(self.records), None)

    def _made(self, due: Sequence[int]) -> list[Record]:
        """Returns the records of some rounds, in the form of a simulation's. Their metrics are those of each site's own
        model."""
        if not due:
            return []
        rows = np.array([[self._rows[name][done][1:-1] for name in self._names] for done in due], dtype=float)
        numbers = torch.from_numpy(rows)  # (rounds, sites, columns); NaN where a row has None
        by_name = dict(zip(self._columns, numbers.unbind(-1)))
        weights, bits, sent = (by_name.pop(name) for name in FURTHER[:-1])
        spent = by_name.pop(EPSILON, None)
        made: list[Record] = [{"round": one, "replica": 0, "seed": self._schedule.seed, "models": "own"} for one in due]
        add_metrics(made, by_name, self._problem, VALIDATION, "validation")
        for k, record in enumerate(made):
            record |= traffic(bits[k], sent[k]) | ({} if spent is None else {EPSILON: float(spent[k].max())})
            shares = normalized(weights[k])
            if bool((shares.abs() <= _LARGEST_SHARE).all()):  # estimates may be negative, and then cancel
                record["lambda"] = shares.tolist()
        return made

    def weights(self) -> dict[str, Any] | None:
        """Returns each site's share of the weights in the last round that all have measured, and that round. None if
        there is none. The sites' newest weights are of different rounds, so they do not belong together."""
        with self._lock:
            newest = next((one for one in reversed(self.records) if "lambda" in one), None)
            if newest is None:
                return None
            return {"round": newest["round"], "sites": dict(zip(self._names, newest["lambda"]))}

    def epsilons(self) -> dict[str, float | None]:
        """Returns what each site said that it has spent of its privacy, in the last round that all have measured."""
        with self._lock:
            if not self.records:
                return {}
            last, place = self.records[-1]["round"], 1 + self._columns.index(EPSILON)
            return {name: self._rows[name][last][place] for name in self._names}

    def digests(self) -> dict[str, str]:
        """Returns a digest of each site's rows and of which rounds it keeps its model, by which sites find out who has
        told them different things."""
        with self._lock:
            kept = self._kept | {self._own: self._final}
            every = {
                site: [[rows[due] for due in self._due if due in rows], kept.get(site)]
                for site, rows in self._rows.items()
            }
        return {site: hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16] for site, told in every.items()}

    # The best round

    @property
    def chosen_on(self) -> str:
        """Returns the split on which the best round is chosen: validation if there is one."""
        validated = self._columns[-len(FURTHER) - 1].startswith(VALIDATION)
        return "validation" if validated else judged_on(self._problem)

    def _best(self, among: Callable[[int], bool]) -> int | None:
        """Returns the best of the rounds that all have measured, the last one of equal ones. None if there is none."""
        scored = [(r["round"], score) for r, score in zip(self.records, self._scores) if among(r["round"])]
        return _best_of(scored)

    def offer(self, done: int, model: Tensor) -> None:
        """Takes this node's model after a measured round. Keeps a copy if that round can be the best."""
        with self._lock:
            self._model_bytes = max(1, model.nbytes)
            if self._final is None and done in self._needed() and done not in self._on_disk:
                self._models[done] = model.detach().cpu().clone()

    def _needed(self) -> set[int]:
        """Returns the rounds whose models may be asked for: the best so far, those that not all have measured yet, and
        the best before each checkpoint to go back to. The state has the model of the last round. A site that withholds
        its rows must not fill the disks of all others, so only the newest of many are kept."""
        if self._schedule.best_by == "last":
            return set()
        best = [self._best(lambda one, to=to: one < to) for to in self._landmarks()]
        known = {one for one in (*best, self._best(lambda one: True)) if one is not None}
        pending = self._due[len(self.records) :]
        here = [one for one in pending if one in self._rows[self._own]]
        too_many = here[: -max(_PENDING_AT_LEAST, _PENDING_BYTES // self._model_bytes)]
        if too_many:
            what = "metrics of a site are missing; only the newest models are kept until it tells them"
            for site in self._others:
                if pending[0] not in self._rows[site]:
                    self._aside.once((what, site, self._generation), "warning", what, site=site, round=pending[0])
        return known.union(pending).difference(too_many) - {self._schedule.rounds}

    def store_models(self) -> None:
        """Writes the models that are needed. Is called before a checkpoint: later rounds are repeated after a crash."""
        with self._lock, storing(self._state):
            needed = self._needed()
            self._models = {one: model for one, model in self._models.items() if one in needed}
            for done, model in self._models.items():
                (self._state / BEST).mkdir(exist_ok=True)
                write_stored(self._model_path(done), {"model": model}, done, {})
                self._on_disk.add(done)
            self._models = {}

    def drop_models(self) -> None:
        """Removes the models that are no longer needed. Is called after a checkpoint, when better ones are on disk."""
        with self._lock:
            for done in self._on_disk - self._needed() if self._final is None else ():
                self._model_path(done).unlink(missing_ok=True)
                self._on_disk.remove(done)

    def _model_path(self, done: int) -> Path:
        return self._state / BEST / f"round-{done:012d}.safetensors"

    def _intact_models(self) -> set[int]:
        found = set()
        for path in (self._state / BEST).glob("round-*.safetensors"):
            try:
                found.add(read_stored(path, {}).round)
            except CheckpointError as error:
                what = "a kept model is damaged; another round is chosen"
                self._aside.once((what, error.what), "warning", what, reason=error.what)
                path.unlink()
        return found

    def open_questions(self) -> list[str]:
        """Is called after the last round, again and again. Returns the sites whose rows or kept models are not known
        yet; when there is none, `best` can be asked for."""
        with self._lock:
            self.exchange()
            if len(self.records) == len(self._due) and self._final is None:
                self.store_models()
                kept = sorted(self._on_disk & self._needed())
                self._put([], final=kept)  # a restart must not change what is announced now
                self._final = kept
                self.exchange()
            announced, done = self._announced(), len(self.records)
            if done < len(self._due):  # then those whose rows are missing, or for whom the others repeat old rows
                behind = [site for site, body in announced.items() if body["complete"] < done]
                return [site for site in self._names if self._due[done] not in self._rows[site] or site in behind]
            return [site for site in self._others if site not in self._kept]

    def best(self) -> int | None:
        """Returns the best round of those whose models all sites have, the last one included; None if the experiment
        asks for the last only."""
        with self._lock:
            if self._schedule.best_by == "last":
                return None
            kept = set(self._final or ()).intersection(*self._kept.values())
            return self._best(lambda one: one in kept or one == self._schedule.rounds)

    def decided(self, best: int) -> dict[str, Any]:
        """Returns whose numbers have decided that a round is the best: the worst site there with its number; if another
        is best by the numbers, that one, and the sites that say that they have no model of it; and which round it would
        be without the numbers of each single site, where that is another one. Of long runs with many sites, the last is
        left out."""
        with self._lock:
            rule = RoundScores(self._problem, self._schedule.best_by, self._schedule.level)
            metric, higher = rule.metric, self._problem.higher_is_better(rule.metric)
            values = [record.get("validation", record)[metric]["sites"] for record in self.records]
            numbers = torch.tensor(values, dtype=torch.float64)  # (rounds, sites)
            rounds, n = [record["round"] for record in self.records], len(self._names)
            by_numbers = self._best(lambda one: True)
            kept = self._kept | {self._own: self._final or []}
            without_it = [site for site in self._names if by_numbers not in kept.get(site, ())]
        there = numbers[rounds.index(best)].nan_to_num(nan=-math.inf if not higher else math.inf)
        worst = int(there.argmin() if higher else there.argmax())
        decided = {"round": best, "metric": metric, "worst": self._names[worst], "value": float(there[worst])}
        if by_numbers != best:
            decided |= {"by_numbers": by_numbers, "not_kept_by": without_it}
        if n < 3 or n * len(rounds) > _WITHOUT_AT_MOST:
            return decided
        each_left_out = torch.eye(n, dtype=torch.bool)
        scores = torch.stack([rule.add(row.expand(n, n).masked_fill(each_left_out, math.nan)) for row in numbers])
        chosen = {name: _best_of(zip(rounds, of_site)) for name, of_site in zip(self._names, scores.unbind(-1))}
        return decided | {"without": {name: done for name, done in chosen.items() if done != best}}

    def model(self, done: int) -> Tensor:
        """Returns this node's own model after a round whose model it keeps."""
        try:
            return read_stored(self._model_path(done), {}).tensors["model"]
        except CheckpointError as error:
            raise CheckpointError(error.what, PUT_BACK) from error


def _best_of(scored: Iterable[tuple[int, Tensor]]) -> int | None:
    """Returns the round with the best score, the last one of equal ones. None if there is none."""
    found, best = None, torch.tensor(-math.inf, dtype=torch.float64)
    for done, score in scored:
        if found is None or bool(replaces(score, best)):
            found, best = done, torch.maximum(score, best)
    return found


def columns_of(problem: Prepared) -> list[str]:
    """Returns the names of what a row has after its round."""
    names = measured_names(problem)
    if problem.privacy is not None:
        return [*names, EPSILON, *FURTHER]
    validated = [VALIDATION + name for name in names] if problem.held_out("validation")[1] else []
    return [*names, *validated, *FURTHER]


def judged_on(problem: Prepared) -> Literal["test", "train"]:
    """Returns the split on which sites measure: test data, or training data if there is none."""
    return "test" if problem.held_out("test")[1] else "train"


def add_metrics(made: list[Record], by_name: Mapping[str, Tensor], problem: Prepared, prefix: str, under: str) -> None:
    """Adds the metrics of all sites to records. Those whose names begin with `prefix` are in a table of their own,
    `under` the names without it."""
    for place in (None, under):
        metrics = {n.removeprefix(prefix): v for n, v in by_name.items() if n.startswith(prefix) == (place is not None)}
        with_spread(made, metrics, problem, place)


def _lines(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Returns lines of the table. Each has a checksum, since a hash that the disk has changed would blame a site."""
    return "".join(json.dumps({**entry, "sum": _sum(entry)}) + "\n" for entry in entries).encode()


def _intact(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns what was written as a line of the table. Raises ValueError if the disk has changed it."""
    if entry.pop("sum", None) != _sum(entry):
        raise ValueError("its checksum differs")
    return entry


def _sum(entry: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(entry).encode())
