"""Signed bodies of every kind of announcement, as no honest site makes them: they are refused, and then nothing is
written, or they are read by everything that reads announcements without an error."""

import json
import math
import random
import time
from pathlib import Path
from typing import Any

import pytest

import fairmesh as fm
from fairmesh.cli.node import _refusal_rows, _site_rows
from fairmesh.mesh.announcements import CELLS, KINDS
from fairmesh.mesh.enrol import certificates
from fairmesh.mesh.node import claims, data_agreement, divergence, ledger, versus_local
from fairmesh.mesh.node.ledger import Ledger
from fairmesh.mesh.node.measurements import Measurements, Schedule, columns_of
from fairmesh.mesh.node.membership import Membership, common_problem, facts, misfit, own_data, too_heavy
from fairmesh.mesh.node.node import Node
from fairmesh.mesh.node.result import results_apart
from fairmesh.mesh.node.store import TABLE
from fairmesh.mesh.node.table_agreement import TableAgreement
from fairmesh.mesh.node.watching import Aside
from fairmesh.mesh.wire.bulletin import Announcement, Bulletin
from fairmesh.mesh.wire.frames import Refused
from fairmesh.storage.strict_json import as_json
from tests.data.test_preprocessing import write
from tests.examples import THOROUGH
from tests.mesh import fuzz
from tests.mesh.experiments import experiment
from tests.mesh.scenarios import Run
from tests.refusals import missing_from

NAMES = ["a", "b", "c"]
EXPERIMENT = experiment(30, algorithm={"name": "ad-gda", "consensus_step": 0.5}, options={"measure_every": 10})
SCHEDULE = Schedule(rounds=30, every=10, best_by="worst", seed=0)
COUNT = 150 if THOROUGH else 5  # changed bodies of each kind


class Reader:
    """The node of site b, without threads, and everything in it that reads what a says."""

    def __init__(self, folder: Path):
        self.folder, self.log = folder / "b" / "state", []
        self.folder.mkdir()
        membership = Membership.read(folder / "b" / "site.toml")
        ledger.wish(self.folder, membership.mesh, "b", ["c"])
        log: Any = self.said
        self.node = node = Node(membership, own_data(membership), log, math.inf, None, lambda point, step: None)
        node.ledger.begin(0)
        node.ledger.vote()
        node.oversight.prior = dict.fromkeys(NAMES, 1 / 3)
        data_agreement.announce(node)
        self.facts = facts(node.own)
        self.problem = common_problem(membership, node.own, dict.fromkeys(NAMES, self.facts), node.outputs_for({}))
        table = write(folder / "t.csv", {"age": range(40, 100), "ward": ["north", "south"] * 30, "ill": [0, 1] * 30})
        (site,) = fm.data.Table(table, "ill", partition=fm.data.Even(1)).sites()
        self.tables = TableAgreement("b", site, node.bulletin, folder)
        self.tables.announce(True)
        self.columns, self.measured = columns_of(self.problem), None
        self.given = {"facts": {one: self.facts[one] for one in ("inputs", "targets")}}
        self.given["table"] = {"sums": site.table.sums().to_table()}
        self.of_table = {
            "samples": len(site.table.rows["train"]),
            "reserved": 0,
            "test": 12,
            "validation": 0,
            "outputs": 1,
        }
        self.given["versus_local"] = {"cells": dict(zip(CELLS, (60, 10, 5, "<5"))), "verdict": "", "why_not": ""}
        self.enter(node.measurements)
        self.keys = {name: (folder / name / f"{name}.key").read_bytes() for name in NAMES}
        self.certificates = {name: (folder / name / f"{name}.pem").read_text() for name in NAMES}
        self.number = 1 << 50
        for name in "ac":
            self.hear(name, "certificate", {"pem": self.certificates[name]})
        node.bulletin.announce("statistics", self.sound("b", "statistics"))
        for kind in KINDS.keys() - {"certificate", "diverged", "vote", "commit", "follow"}:
            self.hear("c", kind, self.sound("c", kind))

    def said(self, level: str, what: str, **fields) -> None:
        self.log.append(json.loads(as_json({"what": what, **fields})))

    def sound(self, site: str, kind: str) -> dict:
        body = fuzz.sound(kind, self.node.membership.terms.by(site), random.Random(0))
        return body | self.given.get(kind, {})

    def enter(self, measurements: Measurements) -> None:
        measurements.enter(1, 0, SCHEDULE, self.problem, NAMES)

    def hear(self, site: str, kind: str, body: dict) -> bool:
        """Hears a signed announcement; returns whether it was taken over."""
        self.number += 1
        one = Announcement(site, kind, self.number, body, b"")
        one = one._replace(signature=certificates.signature(self.keys[site], one.text()))
        self.node.bulletin.heard(json.dumps([one.table()]).encode(), f"neighbour {self.number}")
        return self.node.bulletin.of(site, kind) == body

    def files(self) -> dict:
        return {path: path.stat().st_mtime_ns for path in self.folder.rglob("*") if path.is_file()}

    def read(self) -> None:
        """Reads all announcements, as a node does before the first round, in each second, and at the end."""
        node, bulletin = self.node, self.node.bulletin
        known = bulletin.of_all("facts")
        if not misfit(known, node.membership.experiment).sites:
            too_heavy(node.membership, known)
            every = dict.fromkeys(NAMES, self.facts) | known
            common_problem(node.membership, node.own, every, node.outputs_for(every))
        data_agreement._unusual(node, dict.fromkeys(NAMES, self.facts) | known)
        for said in (known, dict.fromkeys(NAMES, self.of_table)):
            if not self.tables.misfit(NAMES, said).sites:
                self.tables.agreed(NAMES)
                self.tables.alone(NAMES)
        oversight = node.oversight
        self.measure()
        for part in (oversight._count_votes, oversight._notice_weights, oversight._notice_divergence):
            part()
        oversight._notice_claims()
        oversight._answer_refusals()
        oversight._notice_contradictions()
        seen = json.loads(as_json(oversight.status()))
        _site_rows(seen, "accuracy"), _refusal_rows(seen, time.time()), claims.sentences(seen)
        list(map(claims.diverged, seen["diverged"]))
        [claims.contradicted(claim, seen["site"]) for claim in seen["contradicted"]]
        node.ledger.removed_by(), node.ledger.without_vote(), node.ledger.impossible(), node.ledger.has_forgotten()
        for one in divergence.told(bulletin, node.membership).values():
            divergence.in_words(one, [one], "", [])
        metrics = {"accuracy": 0.7, "loss": None}
        body = {"generation": 1, "digest": "0" * 64, "metrics": metrics, "measured": {"a": "12ab"}}
        results_apart(dict.fromkeys(NAMES, body), bulletin)
        self.compare(bulletin.of_all("versus_local") | {"b": self.sound("b", "versus_local")})

    def measure(self) -> None:
        """Takes over the rows of a, with those of b and c already there, chooses the best round, and reads all rows
        again from disk."""
        body, measurements = self.node.bulletin.of("a", "measured"), self.node.measurements
        if body is self.measured:
            return
        self.measured = body
        (self.folder / TABLE).unlink(missing_ok=True)
        self.enter(measurements)
        for done in SCHEDULE.due:
            measurements.add(done, [0.5] * (len(self.columns) - 4), 0.3, (8.0 * done, done))
        measurements.exchange()
        measurements.open_questions()
        measurements.best()
        self.enter(measurements)

    def compare(self, told: dict) -> None:
        for accuracy in (0.7, None):
            if not versus_local.contradiction(told["a"]["cells"], accuracy, 100) if "a" in told else False:
                found = versus_local.evidence_of(told, NAMES, [accuracy, 0.7, 0.7], "accuracy")
                versus_local.sentences({"evidence": json.loads(as_json(found))})


@pytest.fixture
def reader(tmp_path, monkeypatch):
    monkeypatch.setattr(Aside, "tried", lambda self, what, part, otherwise: part())  # nothing is contained
    return Reader(Run(tmp_path, NAMES, EXPERIMENT).folder)


def test_signed_bodies_of_every_kind_are_refused_or_read_without_an_error(reader):
    taken, refused = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    for kind, body in fuzz.bodies(reader.node.membership.terms.by("a"), COUNT, given=reader.given):
        before = reader.files(), reader.node.bulletin.of("a", kind)
        try:
            heard = reader.hear("a", kind, body)
        except Refused as error:
            unnamed = missing_from(error, kind, "a") and missing_from(error, "cannot be read")
            if unnamed or (reader.files(), reader.node.bulletin.of("a", kind)) != before:
                raise AssertionError(f"{kind} {str(body)[:2000]}") from error
            refused[kind] += 1
            continue
        taken[kind] += heard
        try:
            reader.read()
        except Exception as error:
            raise AssertionError(f"{kind} {str(body)[:2000]}") from error
    assert all(refused.values()), refused
    assert all(taken[kind] for kind in KINDS.keys() - {"certificate"}), taken  # that is known from the beginning
    node = reader.node
    (reader.folder / "bulletin.json").write_bytes(node.bulletin.saved())
    again = Bulletin("b", node.membership.credentials, node.membership.terms)
    assert again.restored(reader.folder / "bulletin.json") == []  # what was taken over is so after a restart
    Ledger(reader.folder, node.membership.mesh, "b", again).votes()
    measurements = Measurements(reader.folder, "b", again, Aside(reader.said))
    reader.enter(measurements)
    measurements.exchange()
