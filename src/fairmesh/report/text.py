"""What `fairmesh run` prints of a finished run: tables and lines, in their order."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fairmesh.comparisons.reference_models import ReferenceComparison, constant_sentence
from fairmesh.report.contents import card
from fairmesh.report.first_sentences import headline_of
from fairmesh.report.runs import (
    Run,
    best_few,
    caption_of,
    choices_in_words,
    few_rows,
    few_sentences,
    few_sites,
    mean_of,
    models_in_words,
    personal_caption,
    personal_table,
    rows_of,
    subgroup_table,
    with_count,
    worst_in_words,
)
from fairmesh.report.sentences import privacy_sentences
from fairmesh.report.tables import of_metrics
from fairmesh.training.result import Result


class Table(NamedTuple):
    """A table with its header, and its title on a terminal; without a title, one that may be turned to fit."""

    rows: list[list[str]]
    title: str | None = None


def run_in_words(
    run: Run,
    result: Result,
    folder: Path,
    references: ReferenceComparison | None = None,
    left_out: dict[str, Any] | None = None,
    data_is_here: bool = True,
) -> Iterator[Table | str]:
    """Yields what a run brought its sites, each part a table or a line.

    Args:
        run: The run, which may be a sweep.
        result: Its result.
        folder: Where it was written.
        references: The run next to its reference models. Default: None.
        left_out: How models do at sites that they were not trained on, as `LeftOut.as_json` returns it. Default: None.
        data_is_here: Whether this process has the data of all sites. Default: True.
    """
    shown, others = best_few(run)
    yield from headline_of(run.summary)
    yield from privacy_sentences(run.summary.get("privacy") or {})
    if reason := run.summary.get("stopped_early"):
        yield f"ended after round {result.rounds}: {reason}"
    yield Table(rows_of(shown))
    yield from (caption_of(shown), *choices_in_words([run]), others, *map(worst_in_words, shown))
    for variant in shown:
        of_variant = "" if variant is run else f": {variant.label}"
        if set(variant.metrics) - {"loss", "accuracy", variant.metric}:
            rows = of_metrics(card(variant), few_sites(variant))
            yield Table(with_count(rows, variant), f"All metrics{of_variant}")
        yield Table(few_rows(personal_table(variant), variant), f"A model for each site{of_variant}")
        yield personal_caption(variant)
    yield Table(few_rows(subgroup_table(run), shown[0]), "Subgroups inside the sites")
    yield from (note for note in run.notes() if note not in result.notes)  # those were said when they were found
    if references:
        yield Table(few_rows(references.table(), run), "Next to references")
        if compared := references.versus_alone():
            verdicts = [difference.verdict for difference in compared.at_sites]
            yield from (*few_sentences(compared.sentences("alone"), verdicts), compared.sentence("alone"))
        yield references.constant_sentence()
        yield from (f"the reference {name} failed: {reason}" for name, reason in references.failed.items())
    elif data_is_here:
        yield constant_sentence(result)
    if left_out:
        means = map(mean_of, zip(*left_out["values"][run.metric]))
        rows = [[str(site), run.unit().shown(mean)] for site, mean in zip(left_out["sites"], means)]
        table = [["site", f"{run.metric}, {left_out['judged_on']} data"], *rows]
        yield Table(few_rows(table, run), "Each site by a model that was trained without it")
    if result.diverged:
        yield f"diverged replicas: {result.diverged}"
    if result.fixed is not None:
        weighed = result.weights_verdict()
        in_all, *of_sites = weighed.sentences()
        outcomes = [site.outcome for site in weighed.sites if site.outcome != "no difference"]
        yield from (in_all, *few_sentences(of_sites[: len(outcomes)], outcomes), weighed.warning or "")
    yield models_in_words(run.summary)
    yield f"written to {folder}; for a page with plots: fairmesh report {folder}"
