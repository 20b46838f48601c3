"""`fairmesh mesh`: found a mesh, make a site's key, sign it, and check that a site is ready."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fairmesh.cli.terminal import (
    Json,
    print_json,
    say,
    show_table,
)
from fairmesh.errors import BadInput

mesh = typer.Typer(
    help="Training between organisations: found a mesh, make and sign keys, check a site.", no_args_is_help=True
)

Days = Annotated[float, typer.Option(min=0.01, help="For how long it is valid.")]
MESH, EXPERIMENT, SITE = "mesh.toml", "experiment.toml", "site.toml"


@mesh.command()
def init(
    experiment: Annotated[Path, typer.Argument(help="The experiment file that all sites will run.")],
    site: Annotated[
        list[str], typer.Option(help="name=host:port, or name alone for a site that only dials; one for each node.")
    ] = [],  # noqa: B006
    name: Annotated[str | None, typer.Option(help="The mesh's name; that of the experiment file by default.")] = None,
    out: Annotated[Path, typer.Option(help="The founder's folder; made new.")] = Path("mesh"),
    days: Days = 365,
    json_: Json = False,
) -> None:
    """Founds a mesh: who is in, at which addresses, over which graph, with which experiment; and its authority."""
    from fairmesh.experiment import load_experiment
    from fairmesh.mesh.certificates import (
        AUTHORITY,
        AUTHORITY_KEY,
        fingerprint,
        make_authority,
    )
    from fairmesh.mesh.founding import copied, founded

    made = founded(load_experiment(experiment), name or _label(experiment.stem), _addresses(site))
    _new_folder(out, MESH)
    copied(experiment, out)
    make_authority(out, made.name, days)
    made.write(out / MESH)
    shown = fingerprint((out / AUTHORITY).read_bytes())
    if json_:
        edges = [{"dials": a, "answers": b} for a, b in made.edges]
        facts = {"mesh": made.name, "experiment": made.experiment, "sites": list(made.names), "edges": edges}
        print_json(facts | {"digest": made.digest(), "authority": shown, "folder": str(out)})
        return
    show_table([["site", "dials", "at"], *([a, b, made.member(b).address or ""] for a, b in made.edges)])
    say(f"the authority's fingerprint is {shown}")
    say(f"1. send the folder {out} without {AUTHORITY_KEY} to every site; {AUTHORITY_KEY} stays here, and secret")
    say(f"2. each site runs: fairmesh mesh key {out / MESH} NAME, and sends you NAME.csr")
    say(f"3. you run: fairmesh mesh sign NAME.csr --authority {out}, and send NAME.pem back")


def _addresses(options: Sequence[str]) -> dict[str, str | None]:
    addresses: dict[str, str | None] = {}
    for option in options:
        name, separator, address = option.partition("=")
        if name in addresses:
            raise BadInput(f"--site {option}: there is a site {name} already")
        if separator and not address:
            raise BadInput(f"--site {option}: write name=host:port, or the name alone for a site that only dials")
        addresses[name] = address if separator else None
    return addresses


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].strip("-") or "mesh"


def _new_folder(folder: Path, holds: str) -> None:
    """Makes a folder, refused where it already holds such a file."""
    if (folder / holds).exists():
        raise BadInput(f"{folder / holds} is there already; it is not written over. Give another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {folder}: {error.strerror or error}") from error


@mesh.command()
def key(
    mesh_file: Annotated[Path, typer.Argument(metavar="MESH", help="mesh.toml, with what the founder sent beside it.")],
    name: Annotated[str, typer.Argument(help="This site's name in the mesh.")],
    out: Annotated[Path | None, typer.Option(help="The site's folder; made new, and named after it.")] = None,
    listen: Annotated[
        str | None, typer.Option(help="host:port to listen on; its port in the mesh, on all interfaces, by default.")
    ] = None,
    json_: Json = False,
) -> None:
    """At a site: makes its private key, which never leaves it, the request to be signed, and the site's folder."""
    from fairmesh.experiment import load_experiment
    from fairmesh.mesh.agreement import agreed, digest_of
    from fairmesh.mesh.certificates import AUTHORITY, fingerprint, make_key
    from fairmesh.mesh.founding import copied
    from fairmesh.mesh.members import Mesh, SiteFile, host_and_port
    from fairmesh.storage.files import write_atomically

    joined = Mesh.read(mesh_file)
    address = joined.member(name).address
    if listen is None and address:
        listen = f"0.0.0.0:{host_and_port(address, name)[1]}"
    source, folder = mesh_file.parent, out or Path(name)
    try:
        authority = (source / AUTHORITY).read_bytes()
    except OSError as error:
        raise BadInput(
            f"cannot read {source / AUTHORITY}: {error.strerror or error}; ask the founder for it"
        ) from error
    site_file = SiteFile.of(folder / SITE, {"name": name, "listen": listen})
    found = digest_of(agreed(load_experiment(source / EXPERIMENT)))
    if found != joined.experiment:
        raise BadInput(
            f"{source / EXPERIMENT} is not what the mesh agreed on: digest {found[:12]}, not {joined.experiment[:12]}"
        )
    _new_folder(folder, SITE)
    copied(source / EXPERIMENT, folder)
    joined.write(folder / MESH)
    write_atomically(folder / AUTHORITY, authority)
    _, request = make_key(folder, name)
    site_file.write()
    mine, theirs = fingerprint(request.read_bytes()), fingerprint(authority)
    if json_:
        facts = {"site": name, "folder": str(folder), "request": str(request), "fingerprint": mine}
        print_json(facts | {"authority": theirs, "listen": listen})
        return
    say(f"{folder} is ready but for its certificate; {name}.key stays in it, and secret")
    say(f"1. send {request} to the mesh's founder, and read out its fingerprint: {mine}")
    say(f"2. hear the authority's fingerprint, which must be: {theirs}")
    say(f"3. put {name}.pem, which comes back, into {folder}; name your data in {folder / SITE}")
    say(f"4. look whether all is well: fairmesh mesh check {folder / SITE}")


@mesh.command()
def sign(
    request: Annotated[Path, typer.Argument(help="The request NAME.csr of a site.")],
    authority: Annotated[Path, typer.Option(help="The founder's folder.")] = Path("mesh"),
    fingerprint: Annotated[
        str | None, typer.Option(help="What the site read out; refused where the request's is another.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where the certificate goes; beside the request by default.")] = None,
    days: Days = 365,
    json_: Json = False,
) -> None:
    """At the founder's: signs a site's request. Compare the fingerprint with the site before you send it back."""
    from fairmesh.mesh import certificates
    from fairmesh.mesh.members import Mesh
    from fairmesh.storage.files import write_atomically

    try:
        asked = request.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {request}: {error.strerror or error}") from error
    name, shown = certificates.requested_name(asked), certificates.fingerprint(asked)
    if fingerprint is not None and fingerprint.replace(" ", "").lower() != shown.replace(" ", ""):
        raise BadInput(f"the request's fingerprint is {shown}, not {fingerprint}: it is not the one that the site made")
    signed = certificates.sign(asked, authority, Mesh.read(authority / MESH), days)
    path = out or request.with_suffix(".pem")
    write_atomically(path, signed)
    until = f"{certificates.valid_until(signed):%Y-%m-%d}"
    if json_:
        print_json({"site": name, "fingerprint": shown, "certificate": str(path), "valid_until": until})
        return
    print(f"{name}\t{shown}")
    if fingerprint is None:
        say("compare this fingerprint with the one the site reads out before you send the certificate")
    say(f"written: {path}, valid until {until}; send it to {name}")


@mesh.command()
def check(
    site_file: Annotated[Path, typer.Argument(metavar="SITE", help="The site's site.toml.")],
    json_: Json = False,
) -> None:
    """At a site: files, certificate, port, data, neighbours; exits with 1 where something is wrong."""
    from dataclasses import asdict

    from fairmesh.mesh.preflight import checks

    done = list(checks(site_file))
    wrong = [one for one in done if not one.ok]
    if json_:
        print_json({"ready": not wrong, "checks": [asdict(one) for one in done]})
    else:
        rows = [[one.what, "ok" if one.ok else "WRONG", one.found, one.advice] for one in done]
        show_table([["check", "", "found", "what to do"], *rows], marked={i for i, c in enumerate(done) if not c.ok})
        say(f"{len(wrong)} of {len(done)} checks failed" if wrong else "all is well")
    if wrong:
        raise typer.Exit(1)


@mesh.command()
def remove(
    site_file: Annotated[Path, typer.Argument(metavar="SITE", help="This site's site.toml.")],
    gone: Annotated[list[str] | None, typer.Argument(metavar="NAMES", help="The sites that are gone for good.")] = None,
    json_: Json = False,
) -> None:
    """At every remaining site: go on without sites that will not come back; with no names, take that back. When all who
    remain have said the same, they go on."""
    from fairmesh.mesh.members import Mesh, SiteFile
    from fairmesh.mesh.node.leaving import still_in, wish

    site, names = SiteFile.read(site_file), gone or []
    remaining = wish(site.state, still_in(site.state, Mesh.read(site.mesh)), site.name, names)
    others = [member.name for member in remaining.present if member.name != site.name]
    if json_:
        print_json({"without": names, "generation": remaining.generation, "others": others})
        return
    if not names:
        say(f"noted: {site.name} goes on with all, unless all have already agreed otherwise")
        return
    say(f"noted: {site.name} goes on without {', '.join(names)}, as soon as {', '.join(others)} have said the same")
    say("the node tells the others; it need not be stopped. `fairmesh status` shows who has said so")
