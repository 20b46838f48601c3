"""An experiment between organisations: what all sites must agree on, what is refused, and a site's own data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from fairmesh.algorithms.base import Algorithm, unmeasured
from fairmesh.algorithms.fitting import check_objective
from fairmesh.config.imports import imported
from fairmesh.config.overrides import flat_table, portable, resolved_files
from fairmesh.config.registry import registered_name
from fairmesh.config.tables import from_table, to_table
from fairmesh.data.datasets import Data
from fairmesh.data.reserve import reserve
from fairmesh.data.site import Site
from fairmesh.data.site_files import in_folder
from fairmesh.errors import BadInput
from fairmesh.experiment import Experiment
from fairmesh.mesh.enrol.roster import OF_ONE_SITE, OF_THE_EXPERIMENT, Mesh, SiteFile
from fairmesh.personalization.base import Personalization
from fairmesh.personalization.personalize import mixes_models, mixes_outputs, usual_choice
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.private_data import refuse_left_to_rows
from fairmesh.trackers import Tracker
from fairmesh.training.observers import CsvWriter, Observer


def agreed(experiment: Experiment) -> dict[str, Any]:
    """Returns the fields that must be equal at every site, with keys joined by dots: all that determine the rounds and
    what is shown of them, but not a site's data, device or memory. Files go by their names; the manifest has their
    contents, and so that of the data's contract. Default values are left out, so that a later version may have more
    fields."""
    given = to_table(experiment, defaults=False)
    table = {key: value for key, value in given.items() if key not in ("data", "contract", "sweep", "placements")}
    table["options"] = {key: value for key, value in given.get("options", {}).items() if key not in OF_ONE_SITE}
    return flat_table(portable(table))


def refuse_undeployable(experiment: Experiment) -> None:
    """Refuses what sites without a server cannot run. A deployment is one run of one algorithm."""
    algorithm, objective = experiment.algorithm, experiment.objective
    check_objective(algorithm, objective)
    _refuse_server(algorithm)
    left_open = [] if experiment.trainer else unmeasured(algorithm)  # a trainer's updates have no curvature
    if left_open:
        raise BadInput(
            f"{registered_name(algorithm)} leaves {' and '.join(left_open)} to the run, which measures it on the "
            "data of all sites in one place; between organisations name it, such as [algorithm] primal_step = { name = "
            '"linear", start = 0.1 }. On data of the same scale in one place, `fairmesh run` says what it measures'
        )
    if isinstance(objective.against, str):
        raise BadInput(
            f"objective.against = {objective.against!r} compares sites by numbers that they do not tell each other "
            "between organisations; give a table of losses by site name"
        )
    if objective.subgroups == "across" and not objective.subgroup_names:
        raise BadInput(
            'objective.subgroups = "across" needs objective.subgroup_names between organisations, since sites do not '
            "tell each other the names"
        )
    if experiment.privacy is not None and (experiment.personalization or experiment.options.choose_weights):
        raise BadInput(
            "privacy: models of a site's own would tell other sites sums over training rows; leave out "
            "personalization, choose_weights and compare_weights, and adapt the common model inside each site"
        )
    if experiment.sampling.order == "cyclic":
        raise BadInput(
            'sampling.order = "cyclic" uses the same rows together again and again, so that neighbours could solve for '
            'them; between organisations use "random"'
        )
    if experiment.placements is not None:
        raise BadInput("placements move data, which cannot move between organisations; remove placements")
    runs = {"seeds": len(experiment.seeds), "splits": experiment.splits, "sweep": 1 + len(experiment.sweep)}
    for key in (key for key, count in runs.items() if count > 1):
        raise BadInput(f"a deployment is one run, but {key} asks for more; compare them in a simulation, and keep one")
    _refuse_observers(experiment.observers)


def _refuse_server(algorithm: Algorithm) -> None:
    if algorithm.needs_server or not algorithm.sends:
        why = "needs a server that all sites trust with their models" if algorithm.needs_server else "sends nothing"
        why = why if algorithm.sends or not algorithm.needs_server else "trains on the data of all sites in one place"
        raise BadInput(
            f"{registered_name(algorithm)} {why}, so there is nothing to deploy between organisations; use "
            "tracked-ad-gda or ad-gda"
        )


def _refuse_observers(observers: Iterable[Observer]) -> None:
    for observer in observers:
        if isinstance(observer, Tracker):
            raise BadInput(
                f"the observer {registered_name(observer)!r} would track the run at every site; between organisations "
                "each site chooses for itself: remove it, and use fairmesh node SITE --track"
            )
        path = observer.path if isinstance(observer, CsvWriter) else ".csv"
        if Path(path).name != path or not path.endswith(".csv"):
            raise BadInput(
                f"the observer that writes {path!r} could overwrite any file of a site; between organisations "
                "give a file name that ends in .csv, without a folder"
            )


def own_site(site_file: SiteFile, experiment: Experiment, mesh: Mesh) -> Site:
    """Returns the data of this site alone, under its name in the mesh. Relative paths start at the site file's folder,
    wherever the command runs."""
    position = mesh.position(site_file.name)
    if not site_file.data:
        raise BadInput(
            f"{site_file.path} names no data; add data = 'file.py:function' or a table such as [data] name = 'table', "
            f"file = 'patients.csv', or data = '{OF_THE_EXPERIMENT}' for a trial with the experiment's data"
        )
    contract, data = experiment.contract, _data_of(site_file, experiment)
    if data is None:
        site = replace(_called(str(resolved_files(site_file.data, site_file.folder))), name=site_file.name)
        return site if contract is None else contract.checked([site])[0]
    sites = experiment.sites(data)
    if site_file.data == OF_THE_EXPERIMENT:
        if len(sites) != len(mesh.members):
            raise BadInput(
                f"the experiment's data has {len(sites)} sites, but the mesh has {len(mesh.members)}; give this "
                f"site's own data in {site_file.path.name}"
            )
        return replace(sites[position], name=site_file.name)
    if len(sites) != 1:
        raise BadInput(
            f"data gives {len(sites)} sites, but a site has only its own data; for one pool of samples use "
            "partition = { name = 'even', nodes = 1 }"
        )
    return replace(sites[0], name=site_file.name)


def _data_of(site_file: SiteFile, experiment: Experiment) -> Data | None:
    """Returns what a site's data is read from; None if its own code makes it."""
    folder, contract = site_file.folder, experiment.contract
    if site_file.data == OF_THE_EXPERIMENT:
        if experiment.data is None:
            raise BadInput(
                f"{site_file.path} says data = '{OF_THE_EXPERIMENT}', but the experiment has none; name this site's own"
            )
        return _in_folder(experiment.data, folder)
    given = resolved_files(site_file.data, folder)
    if isinstance(given, str):
        return None
    given = of_one_site(given)
    settled = given if contract is None else contract.settled(given)
    return _in_folder(from_table(Data, settled, "data"), folder)


def of_one_site(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of a site's own data: all rows of a table are this site's, unless they say otherwise."""
    if given.get("name") == "table" and not {"site", "partition"} & given.keys():
        return {**given, "partition": {"name": "even", "nodes": 1}}
    return given


def _called(path: str) -> Site:
    function = imported(path, "data")
    made = function() if callable(function) else function
    if not isinstance(made, Site):
        raise BadInput(f"data: {path} must return one fairmesh.Site, got {type(made).__name__}")
    return made


def _in_folder(data: Data, folder: Path) -> Data:
    """Returns the data with relative paths, also of the data inside it, resolved in this folder."""
    found: dict[str, Any] = {}
    for field in fields(data) if is_dataclass(data) else ():
        value = getattr(data, field.name)
        if isinstance(value, Data):
            found[field.name] = _in_folder(value, folder)
        elif field.name in ("file", "folder") and isinstance(value, str | tuple | Mapping):
            found[field.name] = in_folder(value, folder)
    return replace(data, **found) if found else data  # type: ignore[type-var]


@dataclass(frozen=True)
class _Given(Data):
    only: Site
    settled: int

    def sites(self) -> list[Site]:
        return [self.only]

    def settled_classes(self) -> int:
        return self.settled


def problem_of(site_file: SiteFile, experiment: Experiment, mesh: Mesh) -> Prepared:
    """Returns the problem of this site alone, from its own data. With privacy, the number of classes is what the
    contract or the data's settings say, since what a site announces may not follow from its labels."""
    settled = 0
    if experiment.privacy is not None:
        data = _data_of(site_file, experiment) if site_file.data else None
        settled = len(experiment.contract.classes) if experiment.contract else 0
        settled = settled or (0 if data is None else data.settled_classes())
        if data is not None:
            refuse_left_to_rows(data, experiment.contract)
    return own_problem(own_site(site_file, experiment, mesh), experiment, settled)


def own_problem(site: Site, experiment: Experiment, settled: int = 0) -> Prepared:
    """Returns the problem of one site alone, which has reserved rows if it chooses a model by them. Refuses data that
    does not fit the model, the loss or the settings.

    Args:
        site: The site.
        experiment: The experiment.
        settled: How many classes there are whatever labels the site has; 0 if only these tell. Default: 0.
    """
    problem = replace(experiment, data=_Given(site, settled), prior=None, contract=None).problem()
    method = personalization_of(experiment, problem)
    if method is None or not mixes_models(problem):
        return problem
    return problem.changed(sites=reserve(problem.sites, method.share))


def personalization_of(experiment: Experiment, problem: Prepared) -> Personalization | None:
    """Returns how sites get models of their own, which is the same at every site: as the experiment says; or, if it
    leaves the algorithm to fairmesh, by `Choice` where models can be mixed and are not too large to train dozens of
    them at every site; None if all use the common model.

    Args:
        experiment: The experiment.
        problem: That of one site or of all sites.
    """
    if experiment.personalization or not experiment.options.choose_weights or not mixes_outputs(problem):
        return experiment.personalization
    return usual_choice(problem, experiment.rounds)
