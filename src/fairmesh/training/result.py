"""The result of a run: its records, its models, and a summary."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fairmesh.algorithms.fitting import trains_alone
from fairmesh.comparisons.handed_out import HandedOut
from fairmesh.comparisons.weights import WeightsVerdict, verdict_of, without_comparison
from fairmesh.config.overrides import flat_table
from fairmesh.config.tables import to_table
from fairmesh.errors import BadInput, counted, nearest
from fairmesh.evidence.answering import judged, judged_by_outputs
from fairmesh.evidence.outcomes import Outcomes
from fairmesh.evidence.verdicts import evidence_table
from fairmesh.metrics.over_sites import LEVEL as SITES_IN_TAIL
from fairmesh.metrics.over_sites import WORST_NEEDS_ROWS
from fairmesh.networks.roles import StateView
from fairmesh.personalization.candidates import LOCAL
from fairmesh.personalization.outcome import Personalized
from fairmesh.personalization.personalize import PERSONAL
from fairmesh.problems.prepared import Prepared, with_splits
from fairmesh.regularizers.simplex import normalized
from fairmesh.storage.run_folder import Record
from fairmesh.topology.graphs import Topology
from fairmesh.training.best_round import RoundScores, by_round
from fairmesh.training.loop import TrainingState
from fairmesh.training.meter import with_own_parts
from fairmesh.training.replicas import Replica
from fairmesh.training.subgroups import SubgroupOutcome, outcomes

_SITES_SHOWN = 10


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as text: columns of equal width, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


class Averages(NamedTuple):
    """Averages over all nodes, in the last round."""

    model: Tensor  # (replicas, dim)
    dual: Tensor | None  # (replicas, n)
    own: Tensor | None = None  # the sites' own parts (replicas, n, own_dim), by site
    nodes: Tensor | None = None  # the models of all nodes (replicas, n, dim), if every node trains alone


@dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The outcome of a run: its measurements and its models. `print(result)` shows the sites and their intervals.

    A record is a dictionary with the round, replica and seed, and, for every metric, its "sites", "groups", "worst",
    "mean", "best" and "gap"; further "lambda", the weights of the sites, "consensus_models", the nodes' mean squared
    distance to their average, and the bytes sent. Models are those of the network's average, as rows (replicas, dim).

    Args:
        problem: The problem that was trained.
        replicas: The seed, placement and algorithm of each replica.
        rounds: Rounds that were trained.
        records: Every measurement, one record per measured round and replica.
        state: The state after the last round. Of `fixed` it holds the models and the weights; other tensors are None.
        diverged: Replicas that diverged, with `on_divergence = "mark"`. Default: [].
        judged_on: What was measured on: "test", or "train" if there are no test samples. Default: "test".
        averages: The averages over all nodes, if this process hosts only some of them. Default: None.
        stop_reason: Why an observer ended the run early. Default: None.
        seconds: How long the run took. Default: 0.0.
        fixed: The same run with fixed weights, with `compare_weights = True`. Default: None.
        personal: The sites' own models, one entry per replica that did not diverge, if the run has a personalization.
            Default: [].
        chosen: The replica whose models `model.safetensors`, `model-best.safetensors`, ... are: the first one, or, of a
            sweep, the first of the algorithm that is best on validation data. None if a sweep has no validation data,
            or is private. Default: 0.
        support: How many samples judge each site, and of which classes, as {"n": 40, "classes": [30, 10]}; None for a
            site that is not measured. Default: [].
        notes: What a reader of the numbers must know, such as where a metric is not defined. Default: [].
        answered: What the models answered on the test rows, if several processes trained and gathered it. Default: {}.
        topology: Who talked to whom; None if it is not known. Default: None.
        cvar_level: The share of the sites that "cvar" and "worst_share" are means over. Default: 0.2.
        worst_needs_rows: How many test rows, or units, a site needs to be the worst one. Default: 5.
        above_constant: Replicas whose models are finite, but end far above a constant answer: they have diverged, too.
            Default: [].
        measured: Numbers of the algorithm that the run measured before round 0, by name. Default: {}.
        handed_out: Which weights the model has, and why, if the run named no algorithm. Default: None.
        privacy: What a private run has spent at most at any site, "epsilon", at which "delta", per which "unit", by
            which "accountant", and more. Default: {}.

    Example:
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20, seeds=(0, 1))
        >>> result = fm.run(experiment)
        >>> len(result.values("worst")), len(result.final[0]["accuracy"]["sites"])
        (2, 4)
        >>> list(result.state_dict(replica=1))
        ['1.weight', '1.bias']
    """

    problem: Prepared
    replicas: list[Replica]
    rounds: int
    records: list[Record]
    state: TrainingState = field(repr=False)
    diverged: list[int] = field(default_factory=list)
    judged_on: str = "test"
    averages: Averages | None = None
    stop_reason: str | None = None
    seconds: float = 0.0
    fixed: "Result | None" = field(default=None, repr=False)
    personal: list[Personalized] = field(default_factory=list, repr=False)
    chosen: int | None = 0
    support: list[dict[str, Any] | None] = field(default_factory=list, repr=False)
    notes: list[str] = field(default_factory=list, repr=False)
    answered: dict[str, Outcomes] = field(default_factory=dict, repr=False)
    topology: Topology | None = field(default=None, repr=False)
    cvar_level: float = SITES_IN_TAIL
    worst_needs_rows: int = WORST_NEEDS_ROWS
    above_constant: list[int] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict, repr=False)
    handed_out: HandedOut | None = field(default=None, repr=False)
    privacy: dict[str, Any] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        name, replicas = type(self.replicas[0].algorithm).__name__, len(self.replicas)
        lost = f", diverged={self.diverged}" if self.diverged else ""
        lost += f", above_constant={self.above_constant}" if self.above_constant else ""
        return f"Result({name}, rounds={self.rounds}, replicas={replicas}, sites={self.problem.n}{lost})"

    def __str__(self) -> str:
        if len(self.diverged) == len(self.replicas):
            return f"{self!r}: all replicas diverged; use smaller steps"
        found = self.evidence()
        unit, higher = self.problem.unit(found["metric"]), self.problem.higher_is_better(found["metric"])

        def row(name: str, one: Mapping[str, Any]) -> list[str]:
            numbers = (f"{100 * x:.1f}" if unit.share else f"{x:.4g}" for x in (one["value"], *one["interval"]))
            value, low, high = ("not defined" if "nan" in x else x for x in numbers)
            count = f"{one.get('n', '')}" + (f" of {counted(one['units'], 'unit')}" if "units" in one else "")
            return [name, value, "" if "not defined" in (low, high) else f"{low} to {high}", count]

        def sort_key(one: Mapping[str, Any]) -> float:
            return math.inf if not math.isfinite(one["value"]) else one["value"] if higher else -one["value"]

        columns = [unit.label, "", f"{100 * found['level']:.0f} % interval"]
        rows = [
            [*columns, f"{self.judged_on} samples"],
            row("worst site", found["worst"]),
            row("mean over sites", found["mean"]),
        ]
        sites = [one for one in found["sites"] if not one["few_rows"]]
        apart = [one for one in found["sites"] if one["few_rows"]]
        few = "units" if any("units" in one for one in found["sites"]) else "rows"
        for title, kind in (("", sites), (f"fewer than {self.worst_needs_rows} {few}:", apart)):
            shown = kind if len(kind) <= _SITES_SHOWN + 2 else sorted(kind, key=sort_key)[:_SITES_SHOWN]
            rows += [[title, "", "", ""]] if title and kind else []
            rows += [row(one["name"], one) for one in shown]
            rows += [[f"and {len(kind) - len(shown)} more", "", "", ""]] if len(kind) > len(shown) else []
        return "\n".join([aligned(rows), *found["notes"]])

    @cached_property
    def _outcomes(self) -> dict[str, Outcomes]:
        return dict(self.answered)

    def outcomes(
        self, variant: int | None = None, which: Literal["last", "best"] = "last", own_models: bool | None = None
    ) -> Outcomes:
        """Returns what the models answered on every site's test rows: right or wrong, and the loss, row by row.

        Args:
            variant: Which algorithm of a sweep, from 0; None for the chosen one. Default: None.
            which: The model of the "last" round, or of the "best" one that `keep_best` found. Default: "last".
            own_models: Whether every site is judged by its node's own model; None to do so if every node trains alone,
                as in `Local`. Default: None.

        Raises:
            BadInput: All replicas diverged, or the run did not keep this model.
        """
        variants = variants_of(self.replicas)
        variant = self.chosen_variant if variant is None else variant
        replicas = variants[variant]["replicas"]
        alone = self.judged_alone if own_models is None else own_models
        name = outcomes_name(variant, which, alone)
        if name not in self._outcomes:
            if self.answered:
                raise BadInput(f"the processes of this run have not gathered {name!r}; they have {list(self.answered)}")
            sound = [r for r in replicas if r not in self.diverged]
            self._outcomes[name] = self.judged(sound, which, self._last.nodes if alone else None)
        return self._outcomes[name]

    @property
    def chosen_variant(self) -> int:
        """The number of the algorithm, of a sweep, that the chosen replica has."""
        found = variants_of(self.replicas)
        return next((k for k, one in enumerate(found) if (self.chosen or 0) in one["replicas"]), 0)

    @property
    def judged_alone(self) -> bool:
        """Whether every site is judged by its node's own model, since every node trains alone."""
        return trains_alone(self.replicas[0].algorithm)

    def judged(self, replicas: Sequence[int], which: Literal["last", "best"], models: Tensor | None) -> Outcomes:
        """Returns what replicas answered, at the sites whose data is here.

        Args:
            replicas: The numbers of the replicas.
            which: The model of the "last" round, or of the "best" one.
            models: The model of every node (replicas, n, dim), to judge each site by its own; None for the average.
        """
        if not replicas:
            raise BadInput("all replicas diverged, so there is nothing to judge; use smaller steps")
        chosen = list(replicas)
        splits = [self.replicas[r].split for r in chosen]
        own = self.own_parts(which)
        if models is not None:
            rows = self._by_site(models)[chosen]
            rows = rows if own is None else torch.cat([rows, own[chosen].to(rows)], dim=-1)
        elif own is not None:
            rows = with_own_parts(self.problem, self.row(which)[chosen], own[chosen], splits)
        else:
            rows = self.row(which)[chosen]
        by_split = {k: rows[[one == k for one in splits]] for k in sorted(set(splits))}
        alone = models is not None and self.judged_alone
        found = judged(self.problem, by_split, on=self.judged_on, own_models=rows.ndim == 3, trained_alone=alone)
        return replace(found, worst_needs_rows=self.worst_needs_rows)

    def with_data_of(self, problem: Prepared) -> "Result":
        """Returns the same result with the data of all sites, of which a process of several has some.

        Args:
            problem: The problem before processes divided it among them.
        """
        splits = zip(self.problem.every_split, problem.every_split)
        whole = with_splits([here.changed(sites=every.sites) for here, every in splits])
        return replace(self, problem=whole, fixed=self.fixed and self.fixed.with_data_of(problem))

    def every_outcome(self) -> dict[str, Outcomes]:
        """Returns all that a run keeps of what its models answered: of the last and the best round, of every algorithm
        of a sweep that has a replica that did not diverge."""
        found = {}
        for variant, one in enumerate(variants_of(self.replicas)):
            if set(one["replicas"]) <= set(self.diverged):
                continue
            for which in ("last", *(["best"] if self.state.best and not self.judged_alone else [])):
                found[outcomes_name(variant, which, self.judged_alone)] = self.outcomes(variant, which)  # type: ignore[arg-type]
        for model in (PERSONAL, LOCAL) if self.personal and self.judged_on == "test" else ():
            found[f"{self.chosen_variant} {model}"] = self.site_outcomes(model)
        return found

    def site_outcomes(self, model: Literal["personal", "local"] = "personal") -> Outcomes:
        """Returns what the sites' own models answered on their test rows, each on its own.

        Args:
            model: "personal" for what each site is given; "local" for what it trains alone. Default: "personal".

        Raises:
            BadInput: The run has no personalization, or no test rows.
        """
        name = f"{self.chosen_variant} {model}"
        if name not in self._outcomes:
            if not self.personal or self.judged_on != "test" or self.answered:
                raise BadInput("sites have no models of their own that were measured on test rows in this run")
            replicas = variants_of(self.replicas)[self.chosen_variant]["replicas"]
            by_split: dict[int, dict[int, list[Tensor]]] = {}
            for of_replica in self.personal:
                if of_replica.replica in replicas:
                    of_split = by_split.setdefault(self.replicas[of_replica.replica].split, {})
                    for site in of_replica.sites:
                        if model in site.outputs:
                            of_split.setdefault(site.number, []).append(site.outputs[model])
            stacked = {k: {i: torch.stack(made) for i, made in sites.items()} for k, sites in by_split.items()}
            found = judged_by_outputs(self.problem, stacked, trained_alone=model == LOCAL)
            self._outcomes[name] = replace(found, worst_needs_rows=self.worst_needs_rows)
        return self._outcomes[name]

    def model_for(self, site: str, replica: int | None = None) -> nn.Module:
        """Returns the model that a site should use: its own choice if the run has a personalization, the common model
        with the site's own parts if it has such, else the common model.

        Args:
            site: The name of the site.
            replica: The number of the replica; None for the chosen one. Default: None.

        Raises:
            BadInput: There is no such site, or its model is at another process.
        """
        replica = (self.chosen or 0) if replica is None else replica
        problem = self.problem.of_split(self.replicas[replica].split)
        names = [str(one.name) for one in problem.sites]
        if site not in names:
            raise BadInput(f"there is no site {site!r}{nearest(str(site), names)}; sites go by their names")
        if problem.flat_model.own_dim:
            return problem.flat_model.module(self.whole_row(replica, site=site))
        module = problem.flat_model.module(self.whole_row(replica))
        found = [own for of in self.personal if of.replica == replica for own in of.sites if own.name == site]
        if found and not found[0].state_dicts:
            raise BadInput(f"the model of {site!r} is at the process that has its data")
        return found[0].module(module) if found else module

    def evidence(
        self,
        metric: str | None = None,
        against: "Mapping[str, Result | Outcomes] | None" = None,
        variant: int | None = None,
    ) -> dict[str, Any]:
        """Returns the intervals of every site, of the worst site and of the mean, as summary.json has them.

        Args:
            metric: The metric; None for the primary one. Default: None.
            against: Other runs by name, such as {"local": ...}; every site is compared with each. Default: None.
            variant: Which algorithm of a sweep, from 0; None for the chosen one. Default: None.
        """
        others = {name: one.outcomes() if isinstance(one, Result) else one for name, one in (against or {}).items()}
        return evidence_table(self.outcomes(variant), metric, others)

    def weights_verdict(self) -> WeightsVerdict:
        """Returns whether the weights helped, site by site. A run that names no algorithm and hands out fixed weights,
        or weights that stay near the prior, has trained no other model on all rows: it says why, and nothing of sites.

        Raises:
            BadInput: The run names an algorithm, and was not compared with fixed weights.
        """
        if not self.fixed and self.handed_out:
            return without_comparison(self.problem.primary, self.handed_out)
        if not self.fixed:
            raise BadInput("the run was not compared with fixed weights; train with compare_weights = True")
        return verdict_of(self, self.fixed)

    @property
    def final(self) -> list[Record]:
        """Returns the last record of each replica."""
        last = max(record["round"] for record in self.records)
        return [record for record in self.records if record["round"] == last]

    def values(self, what: str = "worst", metric: str | None = None) -> list[float]:
        """Returns one number per replica, from the last measurement.

        Args:
            what: "worst", "mean" or "best" over the sites, "gap" between best and worst, or "worst_group".
            metric: The metric, such as "loss"; None for the primary one.
        """
        return [record[metric or self.problem.primary][what] for record in self.final]

    @property
    def worst(self) -> float:
        """Returns the primary metric at the worst site in the last measurement, averaged over replicas."""
        values = self.values("worst")
        return sum(values) / len(values)

    def row(self, which: Literal["final", "last", "time-average", "best"] = "final") -> Tensor:
        """Returns models averaged over the network, as rows (replicas, dim). They hold the shared parameters.

        Args:
            which: "final", of the last round ("last" means the same); "time-average" over all rounds, the paper's
                theta_o; or the "best" round that `keep_best` found.

        Raises:
            BadInput: The run did not keep it.
        """
        rows = {
            "final": self._last.model,
            "last": self._last.model,
            "time-average": self.state.average_model,
            "best": self.state.best and self.state.best.model,
        }
        if which not in rows:
            raise BadInput(f"there is no model {which!r}{nearest(which, rows)}")
        found = rows[which]
        if found is None:
            raise BadInput("the run did not keep the best round; train with keep_best = True")
        return found

    def own_parts(self, which: str = "final") -> Tensor | None:
        """Returns what stays at the sites, local parameters and BatchNorm statistics, as rows (replicas, sites,
        own_dim); None if the model has no such parts.

        Args:
            which: As in `row`. Own parts are kept for the "best" round; of other models they are those of the last.
        """
        best = self.state.best if which == "best" else None
        return best.own if best else self._last.own

    def whole_row(self, replica: int = 0, which: str = "final", site: str | None = None) -> Tensor:
        """Returns a model as one row, with what stays at the sites.

        Args:
            replica: The number of the replica, from 0.
            which: As in `row`.
            site: The site whose own part it has; None for the average over the sites. Default: None.

        Raises:
            BadInput: There is no such site, or sites have no own parts.
        """
        row, own = self.row(which)[replica], self.own_parts(which)  # type: ignore[arg-type]
        names = [str(one.name) for one in self.problem.sites]
        if site is not None and own is None:
            raise BadInput(
                f"site {site!r} has no model of its own: all parts of the model are shared; see parts and batch_norm "
                "of fm.Problem, or personalization"
            )
        if site is not None and site not in names:
            raise BadInput(f"there is no site {site!r}{nearest(site, names)}")
        if own is None:
            return row
        problem = self.problem.of_split(self.replicas[replica].split)
        if site is None:
            part = problem.flat_model.common_own(own[replica], problem.shares_of_samples)
        else:
            judging = problem.flat_model.own_for_judging(own[replica], problem.shares_of_samples)
            part = judging[names.index(site)]
        return torch.cat([row, part.to(row)])

    def weights(self, which: Literal["last", "time-average"] = "last") -> Tensor | None:
        """Returns the weights lambda (replicas, n) by node, or None if the algorithm has none.

        Args:
            which: "last" round, or "time-average" over all rounds, the paper's lambda_o.
        """
        if which == "time-average":
            return self.state.average_dual
        return self._last.dual

    @cached_property
    def _last(self) -> Averages:
        if self.averages:
            return self.averages
        state, view = self.state.algorithm, StateView(self.state.algorithm)
        models, duals, own = view.models(state), view.duals(state), view.own_weights(state)
        weights = None if own is None else normalized(own.squeeze(-1))
        parts = None if self.state.own is None else self._by_site(self.state.own.rows)
        return Averages(models.mean(dim=-2), weights if duals is None else duals.mean(dim=-2), parts, models)

    def _by_site(self, rows: Tensor) -> Tensor:
        """Returns the rows of all nodes (replicas, n, dim) in the order of the sites."""
        nodes = torch.tensor([replica.placement for replica in self.replicas]).argsort(dim=-1).to(rows.device)
        return rows.gather(1, nodes.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))

    def subgroups(self, replica: int = 0) -> list[SubgroupOutcome]:
        """Returns the metrics and weights of every subgroup of every site, for the common model of the last round.

        Args:
            replica: The number of the replica, from 0.

        Raises:
            BadInput: No site has subgroups.
        """
        return outcomes(self, replica)

    def state_dict(
        self,
        replica: int = 0,
        which: Literal["final", "last", "time-average", "best"] = "final",
        site: str | None = None,
    ) -> dict[str, Tensor]:
        """Returns a model averaged over the network, as a state_dict of the user's module.

        Args:
            replica: The number of the replica, from 0.
            which: As in `row`.
            site: The site whose local parts it has; None for the common model, in which local parameters are the mean
                over the sites, and BatchNorm statistics those of all sites' data. Default: None.

        Raises:
            BadInput: There is no such site, or all parts of the model are shared.
        """
        return self.problem.flat_model.state_dict(self.whole_row(replica, which, site))


def outcomes_name(variant: int, which: str, own_models: bool) -> str:
    """Returns the name of outcomes in their file: that of the algorithm of a sweep, and of the model."""
    return f"{variant} {'own' if own_models else which}"


def variants_of(replicas: Sequence[Replica]) -> list[dict[str, Any]]:
    """Returns the distinct algorithms among the replicas: their differences by dotted name, and their replicas."""
    known = {id(replica.algorithm): replica.algorithm for replica in replicas}  # splits and seeds share theirs
    if len(known) == 1:
        return [{"changes": {}, "replicas": list(range(len(replicas)))}]
    by_id = {key: flat_table(to_table(algorithm)) for key, algorithm in known.items()}
    tables = [by_id[id(replica.algorithm)] for replica in replicas]
    varying = [key for key in tables[0] if any(table.get(key) != tables[0][key] for table in tables)]
    variants: dict[str, dict[str, Any]] = {}
    for r, table in enumerate(tables):
        changes = {key: table.get(key) for key in varying}
        variants.setdefault(repr(changes), {"changes": changes, "replicas": []})["replicas"].append(r)
    return list(variants.values())


def chosen_replica(result: Result, best_by: str) -> int | None:
    """Returns the replica whose models a run gives to its user, as `Result.chosen` says. The algorithms of a sweep are
    compared by the mean over their replicas of the scores that also choose the best round."""
    variants = variants_of(result.replicas)
    if len(variants) == 1:
        return 0
    if result.problem.privacy is not None:  # metrics have no noise, so that a choice by them would tell of rows
        return None
    if result.state.best:
        scores = result.state.best.score
    elif "validation" in result.records[0]:
        rule = RoundScores(result.problem, "worst" if best_by == "last" else best_by, result.cvar_level)
        scores = torch.full((len(result.replicas),), -torch.inf, dtype=torch.float64)
        for records in by_round(result.records):
            scores = rule.add_records(records)
    else:
        return None
    scores = scores.cpu().clone()
    scores[result.diverged] = -torch.inf
    means = [float(scores[variant["replicas"]].mean()) for variant in variants]
    best = max(range(len(means)), key=means.__getitem__)
    return variants[best]["replicas"][0] if means[best] > -math.inf else None
