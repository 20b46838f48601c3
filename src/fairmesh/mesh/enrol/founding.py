"""Founds a mesh: its members, their graph, and the files that each site gets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fairmesh.data.made_up import made_up_site
from fairmesh.errors import BadInput
from fairmesh.experiment import Experiment, load_experiment, topology_of
from fairmesh.mesh.enrol.agreement import agreed, refuse_undeployable
from fairmesh.mesh.enrol.approval import not_allowed
from fairmesh.mesh.enrol.certificates import make_authority
from fairmesh.mesh.enrol.manifest import EXPERIMENT, Handout, collected, loaded, refuse_others, seal, write_files
from fairmesh.mesh.enrol.roster import MESH, Member, Mesh
from fairmesh.numerics import trees
from fairmesh.problems.batches import Sampling
from fairmesh.problems.objective import Objective
from fairmesh.topology.mixing import union_of
from fairmesh.training.agreement import in_a_file, on_too_few_rounds


def founded(experiment: Experiment, name: str, addresses: Mapping[str, str]) -> Mesh:
    """Returns the first generation of a mesh: the experiment's graph over these sites, in this order."""
    refuse_undeployable(experiment)
    sites = list(addresses)
    if len(sites) < 2:
        raise BadInput(f"a mesh needs at least two sites, got {len(sites)}; name them with --site")
    if experiment.prior is not None and len(experiment.prior) != len(sites):
        raise BadInput(f"prior has {len(experiment.prior)} entries for {len(sites)} sites; give one number for each")
    refuse_unfit_model(experiment)
    neighbours = neighbours_of(experiment, sites)
    members = [Member(site, addresses[site], tuple(neighbours[site])) for site in sites]
    return Mesh(name, tuple(members))


def refuse_unfit_model(experiment: Experiment) -> None:
    """Tries model and loss on made-up rows of the contract. Refuses those that no site could train, since a site would
    find it out only after it was handed the files."""
    contract = experiment.contract
    site = contract and made_up_site(contract)
    if contract is None or site is None:
        return
    settings = {"sampling": Sampling(), "objective": Objective(), "metrics": {}, "personalization": None, "prior": None}
    try:
        replace(experiment, **settings).problem([site])
    except BadInput as error:
        classes = f", and there are {len(contract.classes)} classes" if contract.classes else ""
        raise BadInput(
            f"the model does not fit the [contract], by which a sample has {trees.form_in_words(site.train[0])} as the "
            f"model sees it{classes}: {error}. Correct [model] or [contract]"
        ) from error


def neighbours_of(experiment: Experiment, sites: Sequence[str]) -> dict[str, list[str]]:
    """Returns each site's neighbours in any round, by the experiment's graph over these sites."""
    weights = union_of(topology_of(experiment, len(sites)).build(len(sites))).matrix.toarray()
    return {a: [b for j, b in enumerate(sites) if j != i and weights[i, j] > 0] for i, a in enumerate(sites)}


def graph_in_words(experiment: Experiment, n: int) -> list[str]:
    """Returns what the founder of n sites should know about the graph: which one it is, if the experiment does not name
    one, and whether its rounds suffice."""
    topology = topology_of(experiment, n)
    cycle, chosen = topology.build(n), experiment.topology is None
    said = [
        f"the experiment names no topology; the graph is the default for {n} sites and {experiment.rounds:,} rounds, "
        f"topology = {in_a_file(topology)}, in which a site has {int(cycle[0].degrees.max())} neighbours"
    ]
    too_few = on_too_few_rounds(cycle, experiment.rounds, experiment.algorithm)
    return [*(said if chosen else ()), *([too_few] if too_few else ())]


def refuse_other_graph(experiment: Experiment, mesh: Mesh, where: Path) -> None:
    """Refuses a mesh file whose sites have other neighbours than by the experiment's graph."""
    graph = neighbours_of(experiment, mesh.names)
    for member in mesh.members:
        if set(graph[member.name]) != set(member.neighbours):
            raise BadInput(
                f"{where}: {member.name} has the neighbours {list(member.neighbours)}, but the experiment's graph "
                f"gives it {graph[member.name]}; use the mesh file as it was founded, or found a mesh for another graph"
            )


def hand_out(experiment: Path, mesh: Mesh, folder: Path, days: float) -> Handout:
    """Writes the founder's folder: the authority, mesh.toml, the experiment with the Python files that it needs, and
    the manifest of them. The copy names the copied files."""
    contents = _checked(experiment, folder)
    make_authority(folder, mesh.name, days)
    mesh.write(folder / MESH)
    return _sealed(contents, mesh, folder)


def hand_out_again(folder: Path) -> Handout:
    """Signs what the founder's folder contains by now, after a file in it was corrected. The sites, their neighbours
    and the authority stay."""
    mesh, experiment = Mesh.read(folder / MESH), load_experiment(folder / EXPERIMENT)
    founded(experiment, mesh.name, {member.name: member.address for member in mesh.members})
    refuse_other_graph(experiment, mesh, folder / MESH)
    return _sealed(_checked(folder / EXPERIMENT, folder), mesh, folder)


def _checked(experiment: Path, folder: Path) -> dict[str, bytes]:
    """Returns the files of an experiment, which work alone in this folder."""
    contents, home = collected(experiment), folder.resolve()
    refuse_others(home, contents)
    for module, reason in not_allowed(contents, ()):
        if not module:
            raise BadInput(f"no site could allow this experiment: {reason}")
    if agreed(loaded(home, contents, {})) != agreed(load_experiment(experiment)):
        raise BadInput(
            f"the copy of {experiment} for {folder} is not the same experiment; put the files it names next to it"
        )
    return contents


def _sealed(contents: Mapping[str, bytes], mesh: Mesh, folder: Path) -> Handout:
    write_files(folder, contents)
    return Handout(seal(folder, mesh, list(contents)), folder.resolve(), contents)
