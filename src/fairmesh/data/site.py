"""One site: the data that a node holds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, eq=False)
class Site:
    """The data of one site, which one node holds.

    A set of samples is a pair (inputs, targets) of tensors or arrays, or a torch Dataset of such pairs, which is
    `fm.data.Streamed` if it shall not be held in memory. A third item, (inputs, targets, subgroups), names the subgroup
    of each sample, such as its scanner. It never leaves the site. Sites that share a test set should be given the same
    object, so that it is kept once. Without labels, as for an autoencoder, inputs are the targets too: (x, x), with
    `Problem(loss=torch.nn.functional.mse_loss)`.

    Args:
        train: Training samples.
        test: Test samples that the site is judged by; None for those of the Problem. Default: None.
        validation: Samples that `keep_best` chooses the round by; None for those of the Problem. Default: None.
        group: What the site has in common with others, such as its instrument. Results are also averaged by group.
            None for a group of its own. Default: None.
        name: The site's name in reports; None for "node 0", "node 1", ... Default: None.
        reserved: Samples that the common model is not trained on, by which the site's own model is chosen; `reserve`
            takes them from the training samples. None for none. Default: None.
        table: Of samples from a table, its rows and the preprocessing that made the samples. `fm.data.Table` sets it.
            Default: None.
        rows: What identifies each test row in all splits of the data, such as patient numbers or positions in a file:
            whole numbers or names, one per test row. Intervals over several splits need to know which test rows splits
            share, and inputs do not tell it where each split scales them by its own training rows. `fm.data.Table` sets
            it. None to compare inputs. Default: None.
        units: What each row belongs to, such as its patient or device, if several rows belong together: names or whole
            numbers of the training rows, one per row, or a table of them by the names of the sets, as in {"train": ...,
            "test": ...}. Rows of one unit are not divided when rows are held out, and intervals count units. No unit
            may have rows in two sets: `fm.data.split` makes a test set of whole units. None if every row is a unit of
            its own. Default: None.
        unit: What a unit is called, such as "patient", where a private run says what it protects. Default: "unit".
        left_to_rows: What single rows have decided about all others, such as how they are scaled, each with what to do;
            a private run refuses it. `fm.data` and `fm.models.frozen_features` set it. Default: {}.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> inputs, labels = torch.randn(20, 3), torch.arange(20) % 2
        >>> site = fm.Site((inputs, labels), test=(inputs, labels), group="scanner A", name="Lyon")
        >>> site.name
        'Lyon'
    """

    train: Any
    test: Any = None
    validation: Any = None
    group: str | None = None
    name: str | None = None
    reserved: Any = None
    table: Any = None
    rows: Any = None
    units: Any = None
    unit: Any = "unit"
    left_to_rows: Mapping[str, str] = field(default_factory=dict, hash=False)


def with_sets(
    sites: Sequence[Site],
    change: Callable[[Any, str], Any],
    names: Sequence[str] = ("train", "test", "validation", "reserved"),
) -> list[Site]:
    """Returns sites with changed sets of samples. Sites that share a set share what becomes of it.

    Args:
        sites: The sites.
        change: A set, and what it is in words -> the set that replaces it.
        names: Which sets. Default: all of them.
    """
    done: dict[int, Any] = {id(None): None}
    made = []
    for i, site in enumerate(sites):
        for name in names:
            samples = getattr(site, name)
            if id(samples) not in done:
                kind = "training" if name == "train" else name
                done[id(samples)] = change(samples, f"{site.name or f'site {i}'}, {kind} samples")
        made.append(replace(site, **{name: done[id(getattr(site, name))] for name in names}))
    return made
