"""Founds a mesh: its members, their graph, and the files that each site gets."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fairmesh.errors import BadInput
from fairmesh.experiment import Experiment, load_experiment
from fairmesh.mesh.agreement import _QUOTED, agreed, digest_of, refuse_undeployable
from fairmesh.mesh.members import Member, Mesh
from fairmesh.storage.files import write_atomically
from fairmesh.topology.mixing import union_of


def founded(experiment: Experiment, name: str, addresses: Mapping[str, str | None]) -> Mesh:
    """Returns the first generation of a mesh: the experiment's graph over these sites, in this order."""
    refuse_undeployable(experiment)
    sites = list(addresses)
    if len(sites) < 2:
        raise BadInput(f"a mesh needs at least two sites, got {len(sites)}; name them with --site")
    if experiment.prior is not None and len(experiment.prior) != len(sites):
        raise BadInput(f"prior has {len(experiment.prior)} entries for {len(sites)} sites; give one number for each")
    neighbours = neighbours_of(experiment, sites)
    members = [Member(site, addresses[site], tuple(neighbours[site])) for site in sites]
    return Mesh(name, digest_of(agreed(experiment)), tuple(members))


def neighbours_of(experiment: Experiment, sites: Sequence[str]) -> dict[str, list[str]]:
    """Returns each site's neighbours in any round, by the experiment's graph over these sites."""
    links = union_of(experiment.topology.build(len(sites))).matrix.tocoo()
    names = list(sites)
    found: dict[str, list[str]] = {site: [] for site in names}
    for i, j, weight in zip(links.row.tolist(), links.col.tolist(), links.data.tolist()):
        if i != j and weight > 0:
            found[names[i]].append(names[j])
    return found


def copied(experiment: Path, folder: Path) -> list[Path]:
    """Copies an experiment file, as experiment.toml, and the Python files that it names into a folder. The copy names
    the copied files.

    Returns:
        The paths of the copies.
    """
    try:
        text = experiment.read_text(encoding="utf-8")
        named = {found["file"]: experiment.parent / found["file"] for found in _QUOTED.finditer(text)}
        contents = {path.name: path.read_bytes() for path in named.values()}
    except OSError as error:
        raise BadInput(f"cannot read {error.filename}: {error.strerror or error}") from error
    homes = {path.resolve() for path in named.values()}
    if len({home.name for home in homes}) < len(homes):
        raise BadInput(f"{experiment} names two Python files with the same name in different folders; rename one")
    text = _QUOTED.sub(lambda f: f"{f['quote']}{Path(f['file']).name}:{f['name']}{f['quote']}", text)
    contents["experiment.toml"] = text.encode()
    for name, content in contents.items():
        write_atomically(folder / name, content)
    if agreed(load_experiment(folder / "experiment.toml")) != agreed(load_experiment(experiment)):
        raise BadInput(
            f"the copy of {experiment} in {folder} is not the same experiment; put the files it names next to it"
        )
    return [folder / name for name in contents]
