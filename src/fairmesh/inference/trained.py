"""A trained model with all that is needed to use it, from a run's folder or from a result."""

import copy
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fairmesh.config.overrides import read_toml
from fairmesh.config.tables import from_table
from fairmesh.data.items import as_tensors
from fairmesh.data.preprocessing import Preprocessing
from fairmesh.errors import BadInput, nearest, refusing
from fairmesh.inference.predictor import Output, Predictor, named_parts
from fairmesh.numerics import trees
from fairmesh.personalization.outcome import PersonalModel
from fairmesh.problems.batch_norm import under_policy
from fairmesh.problems.flat_model import architecture_of, called_with
from fairmesh.problems.models import Model, build_in_units
from fairmesh.problems.row_loss import as_floats
from fairmesh.storage.executed import located, refuse_foreign
from fairmesh.storage.occupied import PERSONAL
from fairmesh.storage.run_folder import (
    EXPERIMENT,
    METRICS,
    SUMMARY,
    preprocessing_file,
    read_model,
    read_records,
    read_summary,
)
from fairmesh.training.model_files import about_model, model_facts
from fairmesh.training.result import Result

Which = Literal["final", "best", "time-average"]
_OWN = ("site", "personal")  # files of a site's model between organisations: one with local parts, or a chosen one


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model, with what its inputs and outputs mean.

    Args:
        module: The trained module, for evaluation.
        shape: The shape of one input of the module.
        dtype: The type of the numbers in the sites' data, such as "float32" or "uint8".
        output: What the module returns: "logits", "log-probabilities", a "logit", "numbers", "scores" of which nothing
            is known, or a "structure" of several tensors.
        classes: The names of the classes, in the order of the outputs; empty if they are not known. Default: ().
        preprocessing: How rows of a table become inputs; None if inputs are arrays. Default: None.
        about: What the model's file says: architecture, round, replica. Default: {}.
        form: [dtype, shape] of each input, in lists and tables as the module takes them, if there are several inputs or
            outputs; such a model can be exported, and `fm.predict` refuses it. Default: None.

    Example:
        >>> import fairmesh as fm
        >>> result = fm.run(fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20))
        >>> model = fm.inference.TrainedModel.of(result)
        >>> model.shape, model.output, model.about["round"]
        ((8, 8), 'logits', 20)
    """

    module: nn.Module = field(repr=False)
    shape: tuple[int, ...]
    dtype: str
    output: Output
    classes: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    form: Any = None

    @functools.cached_property
    def predictor(self) -> Predictor:
        """The model from raw inputs to predictions, as one module."""
        return Predictor(copy.deepcopy(self.module).cpu().float(), self.output, self.form, self.preprocessing)

    @property
    def parts(self) -> list[tuple[str, str, list[int]]]:
        """Name, dtype and shape of each tensor that the model takes."""
        return list(named_parts([self.dtype, list(self.shape)] if self.form is None else self.form))

    @staticmethod
    def of(
        result: Result, which: Which = "final", *, site: str | None = None, replica: int | None = None
    ) -> "TrainedModel":
        """Returns a model of a result.

        Args:
            result: The result of `fm.train` or `fm.run`.
            which: "final", the "best" round or the "time-average". Default: "final".
            site: The site whose own model is wanted, if the run has a personalization or local parts; None for the
                common model. Default: None.
            replica: The number of the replica; None for the chosen one, as `Result.chosen` says. Default: None.

        Raises:
            BadInput: The result has no such model.
        """
        replica = result.chosen if replica is None else replica
        if replica is None:
            raise BadInput("a sweep without validation data has no best settings; say which replica")
        if not 0 <= replica < len(result.replicas):
            raise BadInput(f"there is no replica {replica}; they are numbered from 0 to {len(result.replicas) - 1}")
        _refuse_diverged(result.diverged, replica)
        problem = result.problem.of_split(result.replicas[replica].split)
        module: nn.Module = problem.flat_model.module(result.whole_row(replica, which))
        about = about_model(result, replica, which)
        if site is not None and problem.flat_model.own_dim:
            module, about = problem.flat_model.module(result.whole_row(replica, which, site)), about | {"site": site}
        elif site is not None:
            found = {own.name: own for one in result.personal if one.replica == replica for own in one.sites}
            if site not in found:
                raise BadInput(f"there is no own model of a site {site!r}{nearest(site, found)}")
            module, about = found[site].module(module), about_model(result, replica, "personal") | {"site": site}
        return _trained(module, model_facts(problem), problem.preprocessing, about)

    def with_encoder(self, encoder: nn.Module, inputs: Any) -> "TrainedModel":
        """Returns the whole model: a frozen encoder, and this model as the head that was trained on its features.

        Args:
            encoder: The encoder, as `fm.models.frozen_features` was given it.
            inputs: A few rows of its inputs, as the sites have them: a tensor or an array, or a tuple or dictionary.

        Raises:
            BadInput: Encoder and head do not fit these inputs or each other.

        Example:
            >>> import tempfile
            >>> import torch
            >>> import fairmesh as fm
            >>> encoder, labels = torch.nn.Linear(3, 8), torch.arange(20) % 2
            >>> sites = [fm.Site((torch.randn(20, 3) + labels[:, None], labels)) for _ in range(3)]
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     features = fm.models.frozen_features(encoder, sites, folder=folder)
            ...     result = fm.train(fm.Problem(torch.nn.Linear(8, 2), features), rounds=5)
            >>> model = fm.inference.TrainedModel.of(result).with_encoder(encoder, sites[0].train[0])
            >>> fm.predict(model, torch.zeros(4, 3)).values.shape
            (4, 2)
        """
        rows = trees.at(as_tensors(inputs, "inputs"), slice(2))
        whole = EncoderAndHead(copy.deepcopy(encoder), copy.deepcopy(self.module)).cpu().float().eval()
        with refusing("encoder and head do not accept these inputs"), torch.no_grad():
            called_with(whole, as_floats(rows, torch.float32))
        about = dict(self.about) | {"architecture": architecture_of(whole)}
        if isinstance(rows, Tensor) and self.output != "structure":
            form = {"shape": tuple(rows.shape[1:]), "dtype": str(rows.dtype).removeprefix("torch.")}
        else:
            form = {"shape": (), "dtype": "structure", "output": "structure", "form": trees.form(rows)}
        return replace(self, module=whole, about=about, **form)


class EncoderAndHead(nn.Module):
    """A frozen encoder, and a head that takes what the encoder returns.

    Args:
        encoder: The encoder.
        head: The head.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns what the head returns for the encoder's features of these inputs."""
        return called_with(self.head, self.encoder(*arguments, **keywords))


def _trained(
    module: nn.Module, facts: Mapping[str, Any], preprocessing: Preprocessing | None, about: Mapping[str, Any]
) -> TrainedModel:
    classes = facts["classes"] or (() if preprocessing is None else preprocessing.classes)
    shape, dtype, output, form = facts["input_shape"], facts["input_dtype"], facts["output"], None
    if output == "structure":
        form = [f"torch.{dtype}", list(shape)] if isinstance(dtype, str) else dtype
        shape, dtype = (shape, dtype) if isinstance(dtype, str) else ((), "structure")
    return TrainedModel(module.eval(), tuple(shape), dtype, output, tuple(classes), preprocessing, dict(about), form)


def _refuse_diverged(diverged: list[int], replica: int) -> None:
    if replica in diverged:
        raise BadInput(f"replica {replica} of the run has diverged, so its model is of no use; lower the step size")


def as_trained(
    source: TrainedModel | Result | str | os.PathLike,
    which: Which = "final",
    *,
    site: str | None = None,
    replica: int | None = None,
) -> TrainedModel:
    """Returns a model as it is, that of a result, or that of a run's folder. Settings are those of `load_model`."""
    if isinstance(source, TrainedModel):
        return source
    if isinstance(source, Result):
        return TrainedModel.of(source, which, site=site, replica=replica)
    return load_model(source, which, site=site, replica=replica)


def load_model(
    folder: str | os.PathLike,
    which: Which = "final",
    *,
    site: str | None = None,
    replica: int | None = None,
    allow: Sequence[str] = (),
) -> TrainedModel:
    """Reads a trained model from a run's folder, with all that is needed to use it.

    Args:
        folder: The run's folder; also, between organisations, the folder of a site or of its node's state. Of these the
            final model is the site's own, if it has one; its folder "state/result" has the common one.
        which: "final", the "best" round or the "time-average". Default: "final".
        site: The site whose own model is wanted, if the run has a personalization or local parts; None for the common
            model. Default: None.
        replica: The number of the replica, if the run has several; None for that of `model.safetensors`. Default:
            None.
        allow: Modules and Python files, such as "mine.py", that the run's experiment.toml may have imported. Models of
            torch.nn and fairmesh, and code that a run of yours has executed on this machine with the same settings,
            need no entry. Default: ().

    Raises:
        BadInput: The run has not finished or has no such model, its module cannot be built again, or it names code that
            is not allowed.

    Example:
        >>> import tempfile
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fm.run(experiment, out=folder)
        ...     model = fm.inference.load_model(folder)
        >>> model.module
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=64, out_features=10, bias=True)
        )
    """
    path = finished_run(Path(folder))
    if site is None and which == "final" and path != Path(folder):
        site = _site_with_own_model(path)
    summary = read_summary(path)
    entry = _entry(summary, which, replica, path)
    _refuse_diverged(summary["diverged"], entry["replica"])
    stored = path / preprocessing_file(entry.get("split", 0))
    preprocessing = Preprocessing.from_json(stored.read_text(encoding="utf-8")) if stored.exists() else None
    module = _module(path, summary["model"], preprocessing, allow)
    file, personal = (path / entry["file"], False) if site is None else _own_file(path, summary, site, entry)
    if personal:
        about = _checked_about(file, module)
        module = PersonalModel.load(file, module)
    else:
        about = load_weights(file, module)
    return _trained(module, summary["model"], preprocessing, about)


def _site_with_own_model(result: Path) -> str | None:
    """Returns the site that has its own model next to the result of a mesh; None if there is no such model."""
    files = [result.parent / PERSONAL / f"{name}.safetensors" for name in _OWN]
    return next((read_model(file)[1].get("site") for file in files if file.exists()), None)


def finished_run(folder: Path) -> Path:
    """Returns the folder of a finished run, given itself, a node's state folder or a site's folder. Refuses others, and
    says what they are."""
    base = folder.parent if folder.is_file() else folder
    if not base.is_dir():
        raise BadInput(f"there is no folder {folder}; give that of a finished run")
    found = next((base / name for name in ("", "result", "state/result") if (base / name / SUMMARY).exists()), None)
    if found is not None and "planned_rounds" not in read_summary(found):
        return found
    if found is not None or any((base / name).is_dir() for name in ("progress", "state/progress")):
        raise BadInput(f"the run of {folder} has not finished; its model is there when all sites have ended it")
    if not (base / METRICS).exists() and not (base / EXPERIMENT).exists():
        raise BadInput(f"{folder} is not the folder of a run: it has neither {SUMMARY} nor {METRICS}")
    records = read_records(base, ragged=True)
    at = f", its last measurement is of round {records[-1]['round']}" if records else ""
    raise BadInput(
        f"the run in {folder} has not finished{at}: it is still running, or it was interrupted or has diverged; wait, "
        "or resume it with fairmesh run FILE --resume"
    )


def _entry(summary: Mapping[str, Any], which: str, replica: int | None, folder: Path) -> dict[str, Any]:
    """Returns the entry of the model file in a summary."""
    of_kind = [entry for entry in summary["models"] if entry["which"] == which]
    if not of_kind:
        kept = ", ".join(dict.fromkeys(entry["which"] for entry in summary["models"]))
        remedy = "; it needs validation data and keep_best = true in [options]" if which == "best" else ""
        raise BadInput(f"the run in {folder} has no model {which!r}, only: {kept}{remedy}")
    if replica is None and summary["chosen"] != summary["chosen"]:  # null
        settings = {e["replica"]: ", ".join(f"{key} = {value}" for key, value in e["variant"].items()) for e in of_kind}
        variants = "; ".join(f"{number}: {shown}" for number, shown in settings.items())
        raise BadInput(
            f"the run in {folder} is a sweep without validation data, so that no settings are the best; choose one by "
            f"the number of its replica, as with --replica {of_kind[-1]['replica']} ({variants})"
        )
    chosen = summary["chosen"] if replica is None else replica
    entry = next((entry for entry in of_kind if entry["replica"] == chosen), None)
    if entry is None:
        raise BadInput(f"the run in {folder} has no replica {chosen}; it has {summary['replicas']}, from 0")
    return entry


def _module(
    folder: Path, facts: Mapping[str, Any], preprocessing: Preprocessing | None, allow: Sequence[str]
) -> nn.Module:
    """Returns a module of the trained architecture, from the run's settings."""
    table = read_toml(folder / EXPERIMENT)
    if "model" not in table:
        raise BadInput(
            f"the model of the run in {folder} was given in Python, so its folder does not say how to build it; use "
            "fm.export(result, ...) after training, or name the model in an experiment file"
        )
    refuse_foreign(table["model"], folder, allow)
    model = from_table(Model, located(table["model"], folder), "model")
    given = facts["input_shape"]
    shape = torch.Size(given) if isinstance(facts["input_dtype"], str) else given
    target = None if preprocessing is None or preprocessing.target.kind != "number" else preprocessing.target
    if target is not None and (target.center, target.scale) != (0.0, 1.0):
        return build_in_units(model, shape, target.center, target.scale)
    built = model.build(shape, facts["outputs"])
    return under_policy(built, "convert") if table.get("batch_norm") == "convert" else built


def _checked_about(path: Path, module: nn.Module) -> dict[str, Any]:
    """Returns what a model's file says about itself. Refuses one of another architecture."""
    about, mine = read_model(path)[1], architecture_of(module)
    if about.get("architecture", mine) != mine:
        raise BadInput(
            f"{path} holds weights of another architecture ({about['architecture']}) than this module ({mine}); build "
            "the module as it was trained, or train it again"
        )
    return about


def load_weights(path: str | os.PathLike, module: nn.Module) -> dict[str, Any]:
    """Puts the weights of a model's file into a module.

    Args:
        path: The file, such as "runs/mine/model.safetensors".
        module: A module of the trained architecture; it is changed.

    Returns:
        What the file says about itself: architecture, round, replica.

    Raises:
        BadInput: The file cannot be read, or its weights belong to another architecture.

    Example:
        >>> import tempfile
        >>> import torch
        >>> import fairmesh as fm
        >>> experiment = fm.Experiment(fm.data.Digits(nodes=4), fm.Ring(), fm.TrackedADGDA(), rounds=20)
        >>> module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fm.run(experiment, out=folder)
        ...     about = fm.inference.load_weights(f"{folder}/model.safetensors", module)
        >>> about["which"], about["round"]
        ('final', 20)
    """
    path = Path(path)
    about = _checked_about(path, module)
    try:
        module.load_state_dict(read_model(path)[0])
    except RuntimeError as error:
        raise BadInput(f"the weights in {path} do not fit this module: {' '.join(str(error).split())}") from error
    return about


def _own_file(folder: Path, summary: Mapping[str, Any], site: str, entry: Mapping[str, Any]) -> tuple[Path, bool]:
    """Returns the file of a site's model, and whether it is one of a personalization, not one with local parts."""
    for name in _OWN:
        of_node = folder.parent / PERSONAL / f"{name}.safetensors"
        if of_node.exists() and "personal" not in summary:
            own = read_model(of_node)[1].get("site", site)
            if own != site:
                raise BadInput(f"{of_node} is the model of {own!r}, not of {site!r}; others are at their sites")
            return of_node, name == "personal"
    which, replica = entry["which"], entry["replica"]
    with_parts = [own for own in summary.get("site_models", []) if own["replica"] == replica]
    files = {own["site"]: f"{own['name']}.safetensors" for own in with_parts if own["which"] == which}
    if not with_parts:
        last = f"-{replica}.safetensors" if replica else ".safetensors"
        of_replica = [own["sites"] for own in summary.get("personal", []) if own["replica"] == replica]
        files = {own["name"]: f"personal-{own['number']}{last}" for sites in of_replica for own in sites}
        if not files:
            raise BadInput(f"the run in {folder} has no models of the sites' own; it needs a [personalization]")
    if site not in files:
        raise BadInput(f"there is no {which} model of a site {site!r} in {folder}{nearest(site, files)}")
    return folder / files[site], not with_parts
