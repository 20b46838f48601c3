"""The end of a run: its result, what its models answered, the sites' own models, and the files in its folder."""

import hashlib
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fairmesh.algorithms.companions import outliving
from fairmesh.algorithms.fitting import trains_alone
from fairmesh.comparisons.constants import FarAbove, far_above_constant, worse_than_constant
from fairmesh.config.tables import to_table
from fairmesh.evidence.outcome_files import joined, packed, unpacked
from fairmesh.evidence.outcomes import Outcomes
from fairmesh.networks.process_group import ProcessGroup
from fairmesh.networks.roles import StateView
from fairmesh.personalization.outcome import Personalized, PersonalSite
from fairmesh.personalization.personalize import personalized
from fairmesh.personalization.pooled_prior import Wrong, nothing_wrong
from fairmesh.storage.run_folder import RunFolder
from fairmesh.storage.state_tree import flatten_state, unflatten_state
from fairmesh.training.agreement import on_disagreement
from fairmesh.training.execution import Execution
from fairmesh.training.loop import TrainingState, what_to_lower
from fairmesh.training.measured_steps import measured_table
from fairmesh.training.model_files import about_model, model_files, site_files
from fairmesh.training.provenance import provenance_of
from fairmesh.training.result import Averages, Result, chosen_replica, variants_of
from fairmesh.training.summary import by_own_models, summary_of

if TYPE_CHECKING:
    from fairmesh.training.selection import Selection


def finish(run: Execution, fixed: Result | None = None, selection: "Selection | None" = None) -> Result:
    """Returns the result of a run that has done its rounds, next to the same run with fixed weights if there is one,
    and writes it into its folder."""
    result = replace(_result(run), fixed=fixed, handed_out=selection and selection.handed_out)
    personal = _personalized(run, result, selection and selection.models)
    result = replace(result, personal=personal)  # before what all models answer, those of sites too
    result = replace(result, seconds=run.seconds, answered=_gathered_answers(run.process_group, result))
    far = _far_above_constant(run, result)
    result = replace(result, above_constant=far.replicas, notes=_notes(run, result, far))
    if run.around.folder:
        provenance = provenance_of(run.plan.problem, run.process_group)
        with run.process_group.fail_together():
            write_outcome(run.around.folder, result, provenance)
    return result


def _result(run: Execution) -> Result:
    """Returns the result, with the averages over the nodes of all processes."""
    training, state, meter, averages = run.training, run.observed.state, run.meter, None
    models, network = training.view.models(state.algorithm), training.network
    if run.process_group.world_size > 1:
        of_nodes = network.gather(models) if trains_alone(training.algorithm) else None
        averages = Averages(meter.mean(models), meter.weights(state.algorithm), meter.own_of_sites(state.own), of_nodes)
        if not training.algorithm.needs_server:
            dual = state.average_dual
            state = state._replace(
                average_model=network.mean_of_processes(state.average_model),
                average_dual=None if dual is None else network.mean_of_processes(dual),
            )
    result = Result(
        training.problem,
        training.replicas,
        run.observed.round,
        run.observed.records,
        state,
        run.observed.diverged,
        meter.judged_on,
        averages,
        run.observed.stop_reason,
        support=meter.support(),
        topology=run.plan.topology,
        cvar_level=training.options.cvar_level,
        worst_needs_rows=training.options.worst_needs_rows,
        measured=measured_table(run.plan) if run.plan.measured else {},
        privacy=_privacy(run),
    )
    return replace(result, chosen=chosen_replica(result, training.options.best_by))


def _privacy(run: Execution) -> dict[str, Any]:
    """Returns what a private run has spent, one model and all together."""
    private, splits = run.plan.private, [replica.split for replica in run.plan.replicas]
    return private.table(run.observed.round, splits) if private else {}


def _personalized(run: Execution, result: Result, without_folds: Tensor | None = None) -> list[Personalized]:
    """Returns the sites' own models, if the run has a personalization. Each process finds those of its own sites; all
    processes know all numbers. Models without folds of the rows judge, unless a site has reserved rows."""
    training, method, process_group = run.training, run.plan.personalization, run.process_group
    if not method:
        return []
    if run.around.announce:
        run.around.announce(f"choosing a model for each of {run.plan.problem.n} sites")
    rows, phases, of_replicas = result.row(), run.around.phases(), []
    digest = hashlib.sha256(rows.cpu().contiguous().numpy().tobytes()).hexdigest()
    identity = {"method": to_table(method), "models": digest, "problem": training.problem.digest()}

    def carried_out(name: str, *work: Any) -> Any:
        what = f"choosing a model for each site{of_several}"
        return phases.carried_out(what, f"personal-{process_group.rank}-{name}", identity, *work)

    reserved = any(site.reserved is not None for site in training.problem.sites)
    apart = None if reserved else without_folds
    of_several = ""

    def sums(total: Tensor, wrong: Wrong = nothing_wrong, /) -> Tensor:
        return process_group.all_reduce(total)  # of one owner's processes, which need no check

    placed = {"device": training.device, "dtype": training.dtype, "trace": training.options.trace == "auto"}
    forms_sums = process_group.world_size > 1 and method.sums > 0  # then processes talk to each other in between
    with nullcontext() if forms_sums else process_group.fail_together():
        for r, replica in enumerate(training.replicas):
            if r not in result.diverged:
                of_several = f", replica {r + 1} of {len(training.replicas)}" if len(training.replicas) > 1 else ""
                settings = {"seed": replica.seed, "replica": r, "carrier": carried_out, **placed}
                finite = apart is not None and bool(apart[r].isfinite().all())
                settings |= {"sums": sums, "without_folds": apart[r] if apart is not None and finite else None}
                problem = training.problem.of_split(replica.split)
                of_replicas.append(personalized(problem, rows[r], method, **settings))
    phases.forget(f"personal-{process_group.rank}-*")
    if process_group.world_size == 1:
        return of_replicas
    every = process_group.all_gather_json([models.table() for models in of_replicas])
    for k, models in enumerate(of_replicas):
        sites = {site.number: site for site in models.sites}
        for tables in every:
            for table in tables[k]["sites"]:
                numbers = {name: value for name, value in table.items() if name not in ("uses", "shares")}
                sites.setdefault(table["number"], PersonalSite(state_dicts={}, **numbers))
        of_replicas[k] = replace(models, sites=[sites[i] for i in sorted(sites)])
    return of_replicas


def _gathered_answers(process_group: ProcessGroup, result: Result) -> dict[str, Outcomes]:
    """Returns what the models answered on the test rows of all sites; {} if this process has all sites itself, and so
    needs nobody's answers."""
    if process_group.world_size == 1:
        return {}
    with process_group.fail_together():
        here = result.every_outcome()
    every = [unpacked(content) for content in process_group.all_gather(packed(here))]
    return {
        name: replace(joined([outcomes[name] for outcomes in every]), functions=here[name].functions) for name in here
    }


def _far_above_constant(run: Execution, result: Result) -> FarAbove:
    """Returns which replicas end far above a constant answer. The loss of one that was trained too little is large from
    the start, and has not risen."""
    if run.plan.private:  # the constant answers would be found by training rows
        return FarAbove([], 0.0)
    risen = []
    for r, replica in enumerate(result.replicas):
        records = [record for record in result.records if record["replica"] == r]
        *earlier, last = [by_own_models(record) if result.judged_alone else record for record in records]
        if r not in result.diverged and any(last["loss"]["mean"] > record["loss"]["mean"] for record in earlier):
            risen.append((last, replica.split))
    if not risen:
        return FarAbove([], 0.0)
    return far_above_constant(risen, run.plan.problem, result.judged_on, run.process_group)


def _notes(run: Execution, result: Result, far: FarAbove) -> list[str]:
    """Returns what a reader of the numbers must know, including whether the models do worse than a constant answer."""
    chosen = variants_of(result.replicas)[result.chosen_variant]["replicas"]
    if far.replicas:
        algorithm = result.replicas[far.replicas[0]].algorithm
        run.meter.note(far.in_words(len(result.replicas), what_to_lower(algorithm, run.plan.problem.flat_model.dim)))
    diverged = set(chosen) <= {*result.diverged, *far.replicas}
    if run.plan.problem.task == "numbers" and not diverged and not run.plan.private:
        worse = worse_than_constant(result.outcomes(), run.plan.problem, run.process_group, bool(result.personal))
        if worse:
            run.meter.note(worse)
    apart = on_disagreement(result, run.plan.cycle)
    if apart:
        run.meter.note(apart, warn=False)
    return list(run.meter.notes)


def on_host(result: Result) -> Result:
    """Returns a result that waits in main memory while another run trains: with its models and weights, without what
    only further rounds would need."""
    slim = only_models(result.state)
    on_host = unflatten_state(slim, {name: tensor.cpu() for name, tensor in flatten_state(slim).items()})
    return replace(result, state=on_host)


def only_models(state: TrainingState) -> TrainingState:
    """Returns a state with its models and weights, without what only further rounds would need."""
    return state._replace(
        algorithm=StateView(state.algorithm).only_shown(state.algorithm), companions=outliving(state.companions)
    )


def write_outcome(folder: RunFolder, result: Result, provenance: dict[str, Any]) -> None:
    """Writes the models and the summary of a finished run."""
    folder.write_preprocessing([split.preprocessing for split in result.problem.every_split])
    for file in [*model_files(result), *site_files(result)]:
        about = about_model(result, file.replica, file.which) | ({"site": file.site} if file.site else {})
        state_dict = result.state_dict(file.replica, file.which, file.site)  # type: ignore[arg-type]
        folder.write_model(file.name, state_dict, about)
    for personal in result.personal:
        suffix = f"-{personal.replica}" if personal.replica else ""
        for site in personal.sites:
            if site.state_dicts:  # else another process has the site's data
                about = about_model(result, personal.replica, "personal") | {"site": site.name}
                folder.write_model(f"personal-{site.number}{suffix}", site.tensors(), about, from_all=True)
    folder.write_outcomes(packed(result.every_outcome()))
    folder.write_summary(summary_of(result) | {"provenance": provenance})
