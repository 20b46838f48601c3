"""Writes reproduction/sites.md from the recorded rows of the bench."""

from pathlib import Path

from fairmesh.storage.files import write_atomically
from reproduction.sites import table
from reproduction.sites.problems import PROBLEMS
from reproduction.sites.running import HELD_OUT, rows_of
from reproduction.wording import markdown

_INTRODUCTION = f"""\
# A bench of site problems

What do robust weights gain at the worst site, and when can they gain nothing? Each problem has 6 to 12 sites of 30 to
3,000 training rows that differ in one documented way. Half of the problems were for development.

The other half was held back. Splits 0 to 4 of it were used to judge an earlier default. The present one was made on the
development half and judged on splits 5 to 9. Then its discount of noise was changed once more, because it had taken the
weight from sites that are hard, not noisy. The tables show splits 5 to 9. *Fresh* are splits 10 to 14, which were run
after the last change.

    python -m reproduction sites --show [--json]                              # the recorded tables
    python -m reproduction sites --jobs 16 --data DATA --out runs/sites       # run everything again
    python -m reproduction sites --half development --untuned                 # for development
    python -m reproduction sites --half held-back --methods Fixed --methods Default --untuned --first-split 10
    python -m reproduction page                                               # write this page

Every number is the mean over five splits of the data and five seeds per split, in percent of the test rows of a site.
± is half of a 95 % interval over the splits. Test rows have the site's own distribution, including its wrong labels.

- **Local**: every site trains alone. **Constant**: the most frequent class of each site.
- **Pooled**: the optimizer of Tracked AD-GDA with fixed weights, uncompressed, on a complete graph. **Fixed**: the same
  on a ring, compressed. Fixed weights are the sites' shares of all training rows.
- **Pooled, oracle weights**: the weights follow the losses on the test rows, with the best of five strengths. It bounds
  what weights can gain.
- **Tracked, held-out**: the weights follow held-out rows of each site. **regret**: they follow the excess over what the
  site reaches alone. **Default**: what `fm.train(problem)` uses. The weights follow held-out rows, and discount losses
  that no model can lower and differences that chance explains.
- **mixture**: after the last round, each site mixes the common model, a fine-tuned one and its own, with weights that
  its held-out rows support. All other methods but Local give every site the same model.
- **DRFA** has ten gradient steps per round and a tenth of the rounds.
- **tuned**: the best of six candidates by the worst site, on {100 * HELD_OUT:.0f} % of the training rows of each site,
  then trained on all training rows. Every split is tuned by itself. A site alone chooses its own candidate.

*Better off than alone* is the share of the sites whose accuracy exceeds that of Local, *worst regret* the smallest
difference to Local over the sites. *Sites worse off* counts sites that lie below Local by more than the interval of the
difference.
"""

_SUMMARY = f"""\
## What the weights gained

*Oracle* is the change by oracle weights against equal ones, both pooled. *worst* and *mean* are changes against Fixed,
in points. Where the oracle gains at least {100 * table.WORTH_HAVING:.0f} points at the worst site, the goal is to gain
half of that and to lose at most {100 * table.MEAN_LOST:.0f} point of the mean. Elsewhere the goal is to lose at most
{100 * table.WORST_LOST:.1f} points at the worst site. *fresh: worst* is the change on fresh splits. AD-GDA, DR-DSGD and
DRFA have another optimizer than Fixed, so their changes are not due to the weights alone.
"""


def page(results: Path) -> str:
    """Returns the page for the problems that are recorded."""
    found = {name: rows for name in PROBLEMS if (rows := rows_of(results, name))}
    parts = [_INTRODUCTION]
    for tuning in ("untuned", "tuned"):
        head, *rows = table.summary_in_words([table.summary(name, rows, tuning) for name, rows in found.items()])
        if rows:
            parts.append((_SUMMARY if len(parts) == 1 else "### Tuned\n") + "\n" + markdown(head, rows) + "\n")
    for half in ("development", "held-back", "twins"):
        chosen = [PROBLEMS[name] for name in found if PROBLEMS[name].half == half]
        if chosen:
            parts.append("## Twins\n" if half == "twins" else f"## {half.capitalize()} half\n")
        for problem in chosen:
            head, *rows = table.table_in_words(table.table(table.book_of(found[problem.name])))
            parts.append(f"### {problem.name}: {problem.kind}\n\n{problem.difference}\n\n{markdown(head, rows)}\n")
    return "\n".join(parts)


def write(results: Path, path: Path) -> None:
    """Writes the page."""
    write_atomically(path, page(results).encode())
