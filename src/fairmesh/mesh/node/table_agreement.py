"""How sites with tables agree on one preprocessing before the first round: from sums that each of them announces.

All compute it from the same sums in exact arithmetic, so that it is the same to the last bit, and as in a simulation,
except that a category counts only if two sites have it: a simulation has no member that could invent some. It is frozen
with the run. A site that is restored later computes it again from the same sums.
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairmesh.data.contract import Contract
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.data.site import Site
from fairmesh.data.site_tables import is_fitted, refitted
from fairmesh.data.sums import (
    COLUMNS_AT_MOST,
    LABELS_AT_MOST,
    Misfit,
    Sums,
    TableSums,
    columns_of_two_sites,
    fitted,
    of_two_sites,
)
from fairmesh.errors import BadInput, listed
from fairmesh.experiment import Experiment
from fairmesh.mesh.announcements import TABLE_AT_MOST
from fairmesh.mesh.enrol.agreement import own_problem
from fairmesh.mesh.fields import shortened
from fairmesh.mesh.node.claims import PUT_BACK
from fairmesh.mesh.node.membership import Objection
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.storage.files import read_record, write_record
from fairmesh.storage.run_folder import PREPROCESSING

_KIND = "table"
# A site that makes the spread of a column this many times larger makes it constant for the others in float32.
_TIMES = 1e6


class TableAgreement:
    """What a node says and hears about the tables of the sites. Nothing, if this site's inputs do not depend on others'
    rows."""

    def __init__(self, name: str, own: Site, bulletin: Bulletin, folder: Path, contract: Contract | None = None):
        self._name, self._own, self._bulletin, self._path = name, own, bulletin, folder / PREPROCESSING
        self._ranges = {} if contract is None else _ranges(contract)
        self._sound: dict[str, TableSums] | None = None  # those that were compared last, and fit together
        self.needed = is_fitted(own)
        if self.needed and not own.table.rows:
            raise BadInput(
                "the data of this site is a table inside other data, such as held-out, whose columns would have to be "
                "scaled by the rows of all sites; between organisations name the table itself"
            )

    def announce(self, tells: bool) -> None:
        """Announces this site's sums; without numbers if it tells nothing about its values."""
        if not self.needed:
            return
        sums = self._own.table.sums()
        sums = sums if tells else sums.withheld()
        body = {"sums": sums.to_table(), "fitted_by": []}
        if sums.too_many or len(json.dumps(body)) > TABLE_AT_MOST - 4096:
            raise BadInput(
                f"the table has {len(sums.columns):,} columns and {len(sums.target.names):,} labels; other sites take "
                f"{COLUMNS_AT_MOST:,} columns, {LABELS_AT_MOST:,} labels, and {TABLE_AT_MOST >> 10} KiB of their names "
                "and categories. Leave columns out with exclude or inputs, or name labels and categories at all sites: "
                "in a contract, or with classes and categories in [data]"
            )
        before = self._bulletin.of(self._name, _KIND)
        if before.get("sums") != body["sums"]:
            self._bulletin.announce(_KIND, body)

    def silent(self, present: Sequence[str]) -> list[str]:
        """Returns the sites whose sums are not known yet."""
        return [name for name in self._sites(present) if name not in self._bulletin.of_all(_KIND)]

    def misfit(self, present: Sequence[str], facts: Mapping[str, Mapping[str, Any]]) -> Objection:
        """Returns the sites whose tables do not fit those of most, or whose sums cannot be true, and what is
        wrong. `facts` has what sites declare about their data."""
        told, self._sound = self._told(self._sites(present)), None
        for name, sums in told.items():
            reason = self._contradiction(sums, facts[name]) if name in facts else ""
            if reason:
                return Objection([name], f"{name} has announced sums of its table that cannot be true; {reason}")
        try:
            if told:
                fitted(told)
        except Misfit as error:
            return Objection(error.sites, error.reason)
        if len(told) < len(self._sites(present)):  # another site may have the same labels
            return Objection()
        self._sound = told  # what sites announce from now on is compared first
        return _label_of_one(told) or _outweighing(told)

    def _contradiction(self, sums: TableSums, declared: Mapping[str, Any]) -> str:
        """Returns why sums cannot be those of the data that a site declares, "" if they can."""
        target = sums.plan.target
        outputs = len(target.classes or sums.target.names) if target.has_classes else 1
        if declared["outputs"] > max(outputs, 1):
            return f"it declares {declared['outputs']} outputs, but its table needs {outputs}"
        fitting = declared["samples"] + declared["reserved"]  # what a model of the site's own is chosen by was read too
        rows = fitting + declared["test"] + declared["validation"]
        if len(sums.target.names) > rows:
            return f"it tells {len(sums.target.names)} labels of {rows} rows"
        return sums.contradiction(fitting, self._ranges)

    def agreed(self, present: Sequence[str]) -> Preprocessing | None:
        """Returns the frozen preprocessing, or the one that follows from all sums. None if none is needed."""
        frozen = read_record(self._path, PUT_BACK) if self.needed else {}
        if frozen:
            return Preprocessing.from_json(json.dumps(frozen))
        told = self._fitting(present)
        return fitted(of_two_sites(columns_of_two_sites(told)[0])[0]) if told else None

    def alone(self, present: Sequence[str]) -> str:
        """Returns the categories that do not count, since one site alone has them, with that site; "" if none."""
        _, alone = of_two_sites(columns_of_two_sites(self._fitting(present))[0])
        shown = (f"{column} = {name} ({site})" for column, sites in alone.items() for name, site in sites.items())
        return shortened(", ".join(shown), 1000)

    def lacking(self, present: Sequence[str]) -> dict[str, str]:
        """Returns what becomes of columns that some sites lack, in words: those that one site alone has are left out,
        others count as missing where they lack. Nothing if all have the same."""
        told = self._fitting(present)
        left, alone = columns_of_two_sites(told)
        names = dict.fromkeys(name for sums in left.values() for name in sums.columns)
        where = {name: [site for site, sums in left.items() if name not in sums.columns] for name in names}
        said = {
            "columns that one site alone has are left out; to use them, name them in a contract with a fill": (
                f"{name} ({site})" for name, site in alone.items()
            ),
            "columns that a site does not have count as missing there": (
                f"{name} ({listed(sites)})" for name, sites in where.items() if sites
            ),
        }
        return {words: shown for words, some in said.items() if (shown := shortened(", ".join(some), 1000))}

    def number_names(self, present: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Returns the names of the columns with numbers that a site's statistics are about, by site."""
        told = self._fitting(present)
        return {
            site: tuple(sorted(c.name for c in sums.plan.columns if c.kind != "category"))
            for site, sums in told.items()
        }

    def freeze(self, present: Sequence[str]) -> None:
        """Records the preprocessing, as the run begins with it, and announces whose sums it was fitted by."""
        made, sites = self.agreed(present), list(self._sites(present))
        if made is None:
            return
        write_record(self._path, json.loads(made.to_json()))
        self._bulletin.announce(_KIND, self._bulletin.of(self._name, _KIND) | {"fitted_by": sites})

    def prepared(self, present: Sequence[str], experiment: Experiment) -> Site:
        """Returns this site with its samples made by the preprocessing of all sites."""
        made = self.agreed(present)
        if made is None:
            return self._own
        made = made.reading(self._own.table.plan.markers)  # for predictions at this site
        (site,) = own_problem(refitted([self._own], made)[0], experiment).sites
        return site

    def _sites(self, present: Sequence[str]) -> Sequence[str]:
        """Returns the sites by whose sums the preprocessing is fitted, if one is needed: all that are present when the
        run begins."""
        if not self.needed:
            return ()
        said = Counter(tuple(body["fitted_by"]) for body in self._bulletin.of_all(_KIND).values() if body["fitted_by"])
        sites, votes = said.most_common(1)[0] if said else ((), 0)
        return sites if 2 * votes >= len(present) and self._name in sites else present

    def _fitting(self, present: Sequence[str]) -> dict[str, TableSums]:
        return self._told(self._sites(present)) if self._sound is None else self._sound

    def _told(self, sites: Sequence[str]) -> dict[str, TableSums]:
        bodies: dict[str, Any] = {name: self._bulletin.of(name, _KIND) for name in sites}
        return {name: TableSums.from_table(body["sums"]) for name, body in bodies.items() if body}


def _ranges(contract: Contract) -> dict[str, tuple[float, float]]:
    """Returns the smallest and the largest value that a contract allows, by column."""
    columns = [column for column in (*contract.columns, contract.target) if column is not None]
    return {column.name: column.limits for column in columns if column.type not in ("yes-no", "date")}


def _label_of_one(told: Mapping[str, TableSums]) -> Objection | None:
    """Returns a site that has a label which no other has, and what to do; or None. Unlike a category, a row with an
    unknown label cannot be used."""
    target = next(iter(told.values())).plan.target.name if told else ""
    for label, site in of_two_sites(told)[1].get(target, {}).items():
        return Objection(
            [site],
            f"{site} alone has the label {label!r} in column {target!r}. A label counts if two sites have it, or if it "
            "is named at all sites: check its spelling; if it is right, list the labels in a contract, or with classes "
            "in [data]",
        )
    return None


def _outweighing(told: Mapping[str, TableSums]) -> Objection:
    """Returns a site whose values alone make the spread of a column so large that the rows of all others look equal in
    it, and what to do; or None."""
    by_site = {site: {**one.columns, one.plan.target.name: one.target} for site, one in told.items()}
    for name in dict.fromkeys(name for of_site in by_site.values() for name in of_site):
        sums = {site: of_site[name] for site, of_site in by_site.items() if name in of_site and of_site[name].known}
        if len(sums) < 2:
            continue
        middle = statistics.median(one.mean for one in sums.values())
        farthest = max(sums, key=lambda site: sums[site].squares + sums[site].known * (sums[site].mean - middle) ** 2)
        spread, others = _spread(sums.values()), _spread(one for site, one in sums.items() if site != farthest)
        if spread > _TIMES * others > 0:
            asked = [farthest] if len(sums) > 2 else list(sums)  # of two, either may have told wrong sums
            return Objection(
                asked,
                f"column {name!r} of {farthest} makes the spread over all sites {spread / others:.2g} times that of "
                f"the others, whose rows would look equal in it; ask {' and '.join(asked)} for the unit and for "
                "outliers, or give the column center and scale in a contract",
            )
    return Objection()


def _spread(sums: Iterable[Sums]) -> float:
    """Returns the standard deviation of the values behind some sums."""
    every = list(sums)
    count = sum(one.known for one in every)
    mean = math.fsum(one.known / count * one.mean for one in every)
    return math.sqrt(math.fsum(one.squares / count + one.known / count * (one.mean - mean) ** 2 for one in every))
