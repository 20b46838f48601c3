"""The outcome of a run as one table: summary.json."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fairmesh.comparisons.held_out_evidence import held_out_evidence
from fairmesh.config.registry import registered_name
from fairmesh.evidence.verdicts import evidence_table
from fairmesh.metrics.over_sites import over_sites
from fairmesh.problems import notes
from fairmesh.problems.evaluator import measured_names
from fairmesh.problems.prepared import Prepared
from fairmesh.storage.run_folder import Record
from fairmesh.training.model_files import about_model, model_facts, model_files, site_files
from fairmesh.training.result import Result, variants_of
from fairmesh.training.subgroups import has_subgroups


def summary_of(result: Result) -> dict[str, Any]:
    """Returns the outcome of a run as one table.

    Its numbers are means over all replicas; `variants` has those of each algorithm of a sweep. Entries that a run does
    not have are left out."""
    if result not in _summaries:
        _summaries[result] = {name: entry for name, entry in _entries(result).items() if name not in _OPTIONAL or entry}
    return dict(_summaries[result])


_summaries: WeakKeyDictionary[Result, dict[str, Any]] = WeakKeyDictionary()  # evidence takes long to compute
_OPTIONAL = ("judged_by", "weights", "subgroups", "stopped_early", "best_round", "site_models", "support", "personal")
_OPTIONAL += ("above_constant", "measured", "penalties", "handed_out", "site_models_evidence", "privacy")


def _entries(result: Result) -> dict[str, Any]:
    """Returns all entries, with empty values for those that the run does not have."""
    problem, primary, best = result.problem, result.problem.primary, result.state.best
    alone = result.judged_alone and "own_models" in result.final[0]
    final = [by_own_models(record) if alone else record for record in result.final]
    variants = variants_of(result.replicas)
    evidence = [_evidence_of(result, k, variant["replicas"]) for k, variant in enumerate(variants)]
    penalties = [split.objective.penalties or {} for split in problem.every_split]
    return {
        "algorithm": registered_name(result.replicas[0].algorithm),
        "metric": primary,
        "higher_is_better": problem.higher_is_better(primary),
        "judged_on": result.judged_on,
        "judged_by": "own models" if alone else "",
        **_numbers(final, primary),
        "rounds": result.rounds,
        "replicas": len(result.replicas),
        "variants": [
            variant | _numbers(records, primary) | {"metrics": metric_tables(result, records)} | evidence[k]
            for k, variant in enumerate(variants)
            for records in [[final[r] for r in variant["replicas"]]]
        ],
        **evidence[result.chosen_variant],
        "penalties": penalties if any(any(of_split.values()) for of_split in penalties) else [],
        "diverged": result.diverged,
        "above_constant": result.above_constant,
        "measured": result.measured,
        "handed_out": result.handed_out and result.handed_out.as_json(),
        "weights": result.fixed and result.weights_verdict().as_json(),
        "subgroups": [vars(outcome) for outcome in result.subgroups()] if has_subgroups(result) else [],
        "stopped_early": result.stop_reason,
        "privacy": result.privacy,
        "nodes": problem.n,
        "parameters": problem.flat_model.dim,
        **_parts_of(problem),
        **{name: max(record[name] for record in final) for name in _TRAFFIC},
        "seconds": round(result.seconds, 3),
        "best_round": best and best.round.tolist(),
        "chosen": result.chosen,
        "model": model_facts(problem),
        "models": _listed_models(result, variants),
        "site_models": [file._asdict() for file in site_files(result)],
        "sites": [site.name for site in problem.sites],
        "groups": [site.group for site in problem.sites],
        "prior": problem.prior_of_sites.tolist(),
        "support": result.support,
        "metrics": metric_tables(result, final),
        "cvar_level": result.cvar_level,
        "notes": result.notes,
        "final": final,
        "personal": [personalized.table() for personalized in result.personal],
        "site_models_evidence": _site_evidence(result),
    }


_TRAFFIC = ("nominal_bits_busiest", "bytes_busiest_node", "bytes_total")


def by_own_models(record: Record) -> Record:
    """Returns a record with the metrics of each node's own model, if it has them, in place of the average's."""
    return record | record.get("own_models", {})


def metric_tables(result: Result, records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Returns, for each metric, its direction, whether it is a share, its unit if it has one, and what its values say
    about all sites, as the mean over some records. Of sites without a value it is the largest number."""
    found, problem = {}, result.problem
    for name in measured_names(problem):
        higher = problem.higher_is_better(name)
        tables = [over_sites(record[name]["sites"], higher, result.cvar_level) for record in records]
        numbers = {key: sum(table[key] for table in tables) / len(tables) for key in tables[0]}
        counts = {"defined": min(t["defined"] for t in tables), "undefined": max(t["undefined"] for t in tables)}
        unit = problem.unit(name)
        shown = {"share": unit.share} | ({"unit": unit.unit} if unit.unit else {})
        found[name] = {"higher_is_better": higher} | shown | numbers | counts
    return found


def _evidence_of(result: Result, variant: int, replicas: Sequence[int]) -> dict[str, Any]:
    """Returns the evidence of one algorithm of a sweep, for its table. There is none if all its replicas diverged, or
    if rows of some sites are elsewhere and what was answered there is not known here, as between organisations."""
    elsewhere = any(not site.train.here for split in result.problem.every_split for site in split.sites)
    if set(replicas) <= set(result.diverged) or (elsewhere and not result.answered):
        return {}
    fixed = {"fixed weights": result.fixed} if result.fixed else {}
    return {"evidence": result.evidence(against=fixed, variant=variant)}


def _site_evidence(result: Result) -> dict[str, Any]:
    """Returns the evidence of the sites' own models, next to the common model and training alone: on test rows, or on
    held-out rows if there are none."""
    if not result.personal or result.chosen is None:
        return {}
    if result.judged_on != "test":
        of_variant = variants_of(result.replicas)[result.chosen_variant]["replicas"]
        return held_out_evidence([one.table() for one in result.personal if one.replica in of_variant])
    own, alone = result.site_outcomes("personal"), result.site_outcomes("local")
    return evidence_table(own, against={"common": result.outcomes(), "local": alone}) | {"judged_on": "test"}


def _numbers(records: Sequence[Record], metric: str) -> dict[str, float]:
    """Returns the mean over replicas of each number, and its standard deviation."""
    numbers = {}
    for name in ("worst", "mean", "best", "gap", "worst_group"):
        values = torch.tensor([record[metric][name] for record in records], dtype=torch.float64)
        numbers[name] = float(values.mean())
        numbers[f"{name}_std"] = float(values.std(correction=1)) if len(values) > 1 else 0.0
    return numbers


def _listed_models(result: Result, variants: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns one entry per model file: what it is, and of which replica, seed and algorithm."""
    of_replica = {r: variant["changes"] for variant in variants for r in variant["replicas"]}
    entries = []
    for file in model_files(result):
        replica = result.replicas[file.replica]
        entry = {"file": f"{file.name}.safetensors", **about_model(result, file.replica, file.which)}
        del entry["architecture"]
        entry |= {"seed": replica.seed} | ({"split": replica.split} if result.problem.splits else {})
        entries.append(entry | ({"variant": of_replica[file.replica]} if len(variants) > 1 else {}))
    return entries


def _parts_of(problem: Prepared) -> dict[str, Any]:
    """Returns how many parameters stay at their site, and what BatchNorm layers do."""
    note = notes.on_parts(problem)
    return {"local_parameters": problem.flat_model.local_dim, "parts": note} if note else {}
