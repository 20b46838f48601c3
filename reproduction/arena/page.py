"""Writes reproduction/arena.md from the recorded rows of the arena."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fairmesh.storage.files import write_atomically
from reproduction.arena import goals, table
from reproduction.arena.methods import ALONE, CANDIDATES, DEFAULT, FIXED, METHODS, MIXTURE, RIVALS, SITES_MODEL
from reproduction.arena.natural import FEWEST, SETS, TEST_SHARE
from reproduction.arena.packages import FOLDER, INSTALL
from reproduction.arena.problems import FULL, PROBLEMS
from reproduction.lines import Line
from reproduction.sites.running import HELD_OUT
from reproduction.wording import markdown

_INTRODUCTION = f"""\
# The arena

Which method gives the sites the best models, on made-up and on natural sites? The problems are those of the
[bench of site problems](sites.md), its twins with numbers to predict, and {len(SETS)} natural sets, whose sites are
hospitals, schools, communes or persons.
"""

_COMMANDS = f"""\
## Commands

    {INSTALL}
    python -m reproduction arena --show [--json]                     # the recorded tables
    python -m reproduction arena --jobs 16 --out runs/arena          # run everything again; resumes where it stopped
    python -m reproduction arena --half development --untuned        # the natural sets of one half, without tuning
    python -m reproduction arena --only azpro --methods Fixed --methods Default
    python -m reproduction arena --quick                             # in miniature, to see that it works
    python -m reproduction page                                      # write this page
    python -m reproduction.arena.natural                             # sizes of the natural sets; trains nothing

Natural sets are read from the files of the packages, which need not be importable, so `--no-deps` is enough. Where
nothing can be installed, unpack the packages into a folder and name it with `--packages` or `${FOLDER}`. A problem
whose data is missing is left out, and the command says why.

## What is compared

- **Constant**: the most frequent class, or the mean, of each site. **Local**: every site alone, with a penalty that it
  validates on its own rows, as `fm.compare_with_references` trains it. **Pooled**: all rows in one place.
- **FedAvg**, **q-FFL**, **TERM**: with a server; five local steps per round and a fifth of the rounds. **CHOCO-SGD**,
  **AD-GDA**, **Tracked AD-GDA**: without a server, as named algorithms.
- **{"**, **".join(RIVALS)}**: published rivals, written as `examples/research/`.
- **Fixed**: Tracked AD-GDA with fixed weights, the sites' shares of all training rows. **Mixture**: each site mixes
  Fixed, a fine-tuned and its own model.
- **Default**: the common model that `fm.train(problem)` hands out. **Site's model**: what the same run gives each site.
  There is one training for both.
- **tuned**: the best of {CANDIDATES} candidates on {100 * HELD_OUT:.0f} % of each site's training units, then trained
  on all. The worst site decides that has {FULL.worst_needs_rows} or more of these rows, or the mean if none has. Every
  split is tuned by itself. Constant, Local, Mixture, Default and Site's model have nothing to tune.

Every run has at most {FULL.rounds} rounds, and {FULL.seeds} seed per split.

## What the columns mean

Numbers are means over {FULL.splits} splits, in percent: accuracy, or, for numbers, RMSE in units of the spread of the
targets over all training rows (lower is better). ± is half of a 95 % interval over the splits. The splits of a natural
set divide the same rows, so its intervals are wider, by the correction of Nadeau and Bengio (2003).

- **worst site**: among sites with {table.ENOUGH} or more test rows; "-" if there is none. **worst fifth**: the mean of
  the worst fifth of all sites. **mean**: over sites, not over rows. **kB sent**: by the busiest node in the run.
- **wins : losses** against Local, Fixed and Mixture count problems whose interval of the difference excludes 0 after
  the adjustment of Benjamini and Hochberg over the problems. A run that diverged has lost.
- **regret**: the site's model against each site's better of common model and own one, Local. Other rows decide which
  of them is better: on the same test rows, the better of two equal models would look better than either. These are the
  test rows of the other splits. Splits of a natural set share rows, so there one half of a site's units decides, in all
  splits, and the other half counts; the own model is that of the same run. Negative is worse, in points of accuracy or
  in percent of the RMSE.
- **sites worse**: sites whose difference is significantly negative after the same adjustment over the sites.
- **worst fifth** of the goals: that of the sites' models against the best of Default, Local and Mixture.
- **small sites**: those of {goals.SMALL[0]} to {goals.SMALL[1]} training rows, against the common model.
- **gain kept**: at sites that contradict the others (concept shift), the share of the gain of their own model over the
  common one that the site's model keeps.
- **default**: Default minus Fixed, in points of accuracy or in hundredths of the spread. "lost" is adjusted, too.

## How to add a row

- **A method**: a `Method` in `reproduction/arena/methods.py` with {CANDIDATES} candidates that differ only in numbers;
  or an example in `examples/research/` with a frozen dataclass and `CANDIDATES`, and its file in `RIVALS`. Then
  `python -m reproduction arena --methods NAME` runs what is missing; `python -m reproduction page` writes this page.
- **A natural set**: a `Natural` in `reproduction/arena/natural.py`: package, file, the column of the site, the target,
  the columns of the inputs, and the column of the unit if units have several rows. Nothing is copied into the
  repository. A set that is added is one for development, unless it is put into `HELD_BACK` before anything is trained.
"""

_SETS = f"""\
## Natural sets

Sites with fewer than {FEWEST} units (or rows) are left out. A split draws {100 * TEST_SHARE:.0f} % of each site's units
for testing. Inputs and numeric targets are standardised by the training rows of all sites. The sets alternate between
the halves in the order of their names, a rule that was fixed before anything was trained. Those that are *held back*
were run after the constants of the choice were fixed. They were run again after each of two mends: `sleepstudy`, a set
for development, showed that gossip of models with two parameters was unstable; and a review with data of its own found
that one site with large numbers, or a model that was stopped at a bad point, misled the choice. No constant changed.
"""


def _sets(found: dict[str, Sequence[Line]]) -> str:
    rows = []
    for natural in SETS:
        recorded = found.get(natural.name)
        counts = recorded[0]["rows"] if recorded else []
        size = f"{min(counts)} to {max(counts)}" if counts else "-"
        kind = "label" if natural.labels else "number"
        where = f"{natural.package}: {natural.file}"
        sites = str(len(counts)) if counts else "-"
        rows.append([natural.name, natural.half, kind, sites, size, where, natural.about])
    return markdown(["set", "half", "target", "sites", "training rows", "table", "what it is"], rows)


def _found_in_words(found: Mapping[str, Sequence[Line]], reached: Mapping[str, Sequence[int]]) -> str:
    """Returns what the arena shows, with the recorded numbers."""
    lines = {line["method"]: line for line in table.comparisons(found, "untuned")}
    tuned = {line["method"]: line for line in table.comparisons(found, "tuned")}

    def counts(line: Line, reference: str, measure: str) -> str:
        of = line[f"{reference}: {measure}"]
        return f"{of['wins']} : {of['losses']}"

    if not {SITES_MODEL, DEFAULT} <= lines.keys() or "Tracked AD-GDA" not in tuned:
        return ""  # not everything is recorded
    site, default, robust = lines[SITES_MODEL], lines[DEFAULT], tuned["Tracked AD-GDA"]
    rivals = [tuned[name] for name in (*RIVALS, "q-FFL", "TERM", "AD-GDA") if name in tuned]
    best = max(line[f"{FIXED}: fifth"]["wins"] for line in rivals)
    lost = sorted(line[f"{FIXED}: mean"]["losses"] for line in rivals)
    head = ["", "than training alone", "than one common model with fixed weights", "than the mixture"]
    natural = {name: rows for name, rows in found.items() if PROBLEMS[name].kind == "natural"}
    of_natural = {line["method"]: line for line in table.comparisons(natural, "untuned")}
    rows = [
        [f"{measured}, {which}", *(counts(line, reference, measure) for reference in (ALONE, FIXED, MIXTURE))]
        for which, line in (("all", site), (f"the {len(natural)} natural sets", of_natural.get(SITES_MODEL)))
        for measure, measured in (("mean", "mean over sites"), ("fifth", "worst fifth of the sites"))
        if line
    ]
    seeking = [line for name, line in of_natural.items() if name in METHODS and METHODS[name].robust]
    on_natural = max((line[f"{FIXED}: fifth"]["wins"] for line in seeking), default=0)
    return f"""\
## What was found

**A model for each site is what pays.** On how many of {len(found)} problems the model that `fm.train(problem)` gives
each site is clearly better : worse

{markdown(head, rows)}

**Robust weights help on some problems and hurt on others.** Tuned Tracked AD-GDA against tuned fixed weights:
{counts(robust, FIXED, "fifth")} in the worst fifth, {counts(robust, FIXED, "mean")} on the mean.
{len(rivals)} rivals that seek the worst site, tuned, are better than fixed weights on at most {best} in the worst
fifth, and worse on {lost[0]} to {lost[-1]} on the mean. Of the natural sets, no method that seeks
the worst site is, untuned, better than fixed weights in the worst fifth on more than {on_natural} of {len(natural)}.

**The default takes robust weights only where held-out rows support them.** Against fixed weights:
{counts(default, FIXED, "fifth")} in the worst fifth, {counts(default, FIXED, "mean")} on the mean.

**What was asked for.** The worst fifth of the sites' models should be at least that of the best of common model, own
model and mixture, minus half a point or 1 % of RMSE, on four of five problems: it is on {reached["fifth"][0]} of
{reached["fifth"][1]}. Which of the three is best is known only afterwards. The mean regret should be within these
bounds on every problem: it is on {reached["regret"][0]} of {reached["regret"][1]}; the table below has the others with
their intervals.
"""


def page(results: Path) -> str:
    """Returns the page for the problems that are recorded."""
    found = table.recorded(results)
    described = [_COMMANDS, _SETS, _sets(found) + "\n"]
    if not found:
        return "\n".join([_INTRODUCTION, *described, "## Results\n\nNothing is recorded yet.\n"])
    reached = goals.goals(found)
    (head, *rows), (heads, *lines) = goals.goals_in_words(reached)
    parts = [*filter(None, (_INTRODUCTION, _found_in_words(found, reached["reached"]))), *described]
    parts.append(f"## Goals\n\n{markdown(head, rows)}\n\n{markdown(heads, lines)}\n")
    parts.append("## Wins and losses\n")
    for tuning in ("untuned", "tuned"):
        if any(row["tuning"] == tuning for rows in found.values() for row in rows):
            head, *rows = table.comparisons_in_words(table.comparisons(found, tuning))
            parts.append(f"### {tuning.capitalize()}\n\n{markdown(head, rows)}\n")
    titles = {
        "development": "Natural sets, development",
        "held-back": "Natural sets, held back",
        "bench": "Bench",
        "twins": "Twins, with numbers to predict",
    }
    for half, title in titles.items():
        chosen = [PROBLEMS[name] for name in found if PROBLEMS[name].half == half]
        parts += [f"## {title}\n"] if chosen else []
        for problem in chosen:
            head, *rows = table.table_in_words(table.table(found[problem.name]))
            measure = "RMSE, lower is better" if problem.lower_is_better else "accuracy"
            parts.append(f"### {problem.name}: {measure}\n\n{problem.difference}\n\n{markdown(head, rows)}\n")
    return "\n".join(parts)


def write(results: Path, path: Path) -> None:
    """Writes the page."""
    write_atomically(path, page(results).encode())
