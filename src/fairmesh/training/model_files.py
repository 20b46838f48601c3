"""The models that a run writes, what their files say about them, and what is needed to use them."""

import functools
from typing import Any, NamedTuple

from torch import Tensor

from fairmesh.numerics import trees
from fairmesh.problems.prepared import Prepared
from fairmesh.training.result import Result, variants_of


class ModelFile(NamedTuple):
    """A model that a run writes."""

    name: str  # of the file, without its ending
    replica: int
    which: str  # "final", "best" or "time-average"
    site: str | None = None  # whose own part it has


_FILES = {"final": "model", "best": "model-best", "time-average": "model-time-average"}


def model_files(result: Result) -> list[ModelFile]:
    """Returns the models that a run writes. Files of the chosen replica have plain names, those of others end with the
    number of the replica. In a sweep every replica has its number, also the chosen one."""
    several = len(variants_of(result.replicas)) > 1
    files = []
    for which, stem in _FILES.items():
        if which == "best" and not result.state.best:
            continue
        if result.chosen is not None:
            files.append(ModelFile(stem, result.chosen, which))
        numbered = [r for r in range(len(result.replicas)) if several or r != result.chosen]
        files += [ModelFile(f"{stem}-{r}", r, which) for r in numbered]
    return files


def site_files(result: Result) -> list[ModelFile]:
    """Returns the sites' models that a run writes next to the common ones, if parts of the model are local. Sites are
    numbered, since their names need not be names of files."""
    if not result.problem.flat_model.differs_by_site:
        return []
    kinds = {"final": "site", "best": "site-best"}
    return [
        ModelFile(file.name.replace(_FILES[file.which], f"{kinds[file.which]}-{i}", 1), file.replica, file.which, name)
        for file in model_files(result)
        if file.which in kinds
        for i, name in enumerate(str(one.name) for one in result.problem.sites)
    ]


def about_model(result: Result, replica: int, which: str) -> dict[str, Any]:
    """Returns what a model's file says about itself. It is the same wherever the same model was trained."""
    best = result.state.best
    rounds = {"final": result.rounds} | ({"best": int(best.round[replica])} if best else {})
    about = {"architecture": result.problem.flat_model.architecture, "which": which, "replica": replica}
    return about | ({"round": rounds[which]} if which in rounds else {})


def model_facts(problem: Prepared) -> dict[str, Any]:
    """Returns what is needed to build the model again and to use it: its inputs, and what its outputs mean."""
    inputs, targets = problem.sites[0].train.inputs, problem.sites[0].train.targets
    return {
        "architecture": problem.flat_model.architecture,
        "input_shape": trees.shapes(inputs),
        "input_dtype": str(inputs.dtype).removeprefix("torch.") if isinstance(inputs, Tensor) else trees.form(inputs),
        "outputs": problem.classes or max(1, trees.leaves(targets)[0].shape[1:].numel()),
        "output": _output(problem),
        "classes": list(problem.class_names),
    }


def _output(problem: Prepared) -> str:
    """Returns what the model's outputs are, by its task and the loss that it is trained with."""
    if problem.structured:
        return "structure"
    if problem.task in ("binary", "multi-label"):
        return "logit"
    if problem.task != "classes":
        return "numbers" if problem.task == "numbers" else "scores"
    loss: Any = problem.loss
    while isinstance(loss, functools.partial):
        loss = loss.func
    name = getattr(loss, "__name__", type(loss).__name__)
    if name in ("nll_loss", "NLLLoss"):
        return "log-probabilities"
    own = getattr(loss, "__module__", "").startswith("fairmesh.")  # all of these take logits
    return "logits" if own or name in ("cross_entropy", "CrossEntropyLoss") else "scores"
