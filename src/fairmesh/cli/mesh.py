"""`fairmesh mesh`: found a mesh, make, sign and confirm sites' keys, show and approve what a site would run, check that
it is ready, and remove sites."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fairmesh.cli.node import Site
from fairmesh.cli.terminal import Json, few, print_json, put, readable_toml, say, show_table
from fairmesh.cli.without_torch import leave_out_torch
from fairmesh.errors import BadInput, listed, printable
from fairmesh.mesh.enrol.roster import MESH, OF_THE_EXPERIMENT, Mesh, SiteFile, host_and_port
from fairmesh.storage.files import read_bytes, write_atomically

mesh = typer.Typer(
    help="Set up training between organisations.\n\nFound a mesh, make and sign keys, check a site, remove sites.",
    no_args_is_help=True,
)

Days = Annotated[float, typer.Option(min=0.01, help="Days for which the certificate is valid.")]
_TEN_YEARS = 3652  # days: an authority has to outlive every run
SITE = "site.toml"


def _answer(json_: bool, facts: Any, *sentences: str) -> None:
    """Prints the facts as JSON, or says the sentences that are not empty."""
    if json_:
        print_json(facts)
        return
    for sentence in filter(None, sentences):
        say(sentence)


def _signed(handout: Any) -> tuple[dict[str, Any], list[str]]:
    """Returns what the founder has signed, and whether its messages show training rows, as facts and in sentences."""
    from fairmesh.mesh.enrol.revealing import ALLOW, revealing

    files, digest, reasons = handout.manifest.files, handout.manifest.digest(), revealing(handout.table)
    sentences = [f"signed: {', '.join(files)}; the manifest's digest is {digest}"]
    sentences += [f"neighbours could read training rows: {reason}" for reason in reasons]
    if reasons:
        sentences.append(f"every site that accepts this writes {ALLOW} at the beginning of its {SITE}, or cannot start")
    return {"files": files, "manifest": digest, "revealing": reasons}, sentences


def _refuse_other_fingerprint(said: str | None, shown: str, what: str) -> None:
    """Refuses a file whose fingerprint is not what a person read out, if one did."""
    if said is not None and said.replace(" ", "").lower() != shown.replace(" ", ""):
        raise BadInput(f"{what} has the fingerprint {shown}, not {said}, so it is not theirs; ask for it again")


def _site_and_mesh(site_file: Path, *names: str) -> tuple[SiteFile, Mesh]:
    """Returns a site and its mesh, which must have sites with these names."""
    site = SiteFile.read(site_file)
    founded = Mesh.read(site.mesh)
    for name in names:
        founded.member(name)
    return site, founded


@mesh.command()
def init(
    experiment: Annotated[
        Path, typer.Argument(help="The experiment file that all sites will run.", callback=readable_toml)
    ],
    site: Annotated[
        list[str], typer.Option(help="name=host:port, or only the name for a site that only dials; one per node.")
    ] = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="The founder's folder, which is created.")] = Path("mesh"),
    days: Days = _TEN_YEARS,
    json_: Json = False,
) -> None:
    """Found a mesh: its sites, graph and authority.

    Fixes the sites, their addresses, the graph and the experiment, and makes the authority that signs certificates."""
    from fairmesh.experiment import load_experiment
    from fairmesh.mesh.enrol.approval import not_allowed
    from fairmesh.mesh.enrol.certificates import AUTHORITY, AUTHORITY_KEY, fingerprint
    from fairmesh.mesh.enrol.founding import founded, graph_in_words, hand_out

    read = load_experiment(experiment)
    made = founded(read, _label(experiment.stem), _addresses(site))
    _new_folder(out, MESH)
    handout = hand_out(experiment, made, out, days)
    needed = sorted({module for module, _ in not_allowed(handout.contents, ())})
    shown, (signed, sentences) = fingerprint(read_bytes(out / AUTHORITY)), _signed(handout)
    edges = [{"dials": a, "answers": b} for a, b in made.edges]
    facts = {"mesh": made.name, "sites": list(made.names), "edges": edges, "allow": needed}
    if not json_:
        show_table(few([["site", "dials", "at"], *([a, b, made.member(b).address] for a, b in made.edges)]))
    _answer(
        json_,
        facts | signed | {"authority": shown, "folder": str(out)},
        *graph_in_words(read, len(made.names)),
        *sentences,
        f"every site that takes part must allow these modules in its {SITE}: {', '.join(needed)}" if needed else "",
        ""
        if read.contract
        else "there is no [contract], so no site's columns, units and classes are checked: fairmesh data contract",
        f"the authority's fingerprint is {shown}; read it out to every site by telephone",
        f"1. send the folder {out} without {AUTHORITY_KEY} to every site; keep {AUTHORITY_KEY} here and secret",
        f"2. each site runs: fairmesh mesh key {out / MESH} NAME, and sends you NAME.csr",
        f"3. you run: fairmesh mesh sign NAME.csr --authority {out}, and send NAME.pem back",
        "" if read.data else f"4. each site names its own data in its {SITE}, which must fulfil the [contract]",
    )


def _addresses(options: Sequence[str]) -> dict[str, str]:
    addresses: dict[str, str] = {}
    for option in options:
        name, separator, address = option.partition("=")
        if name in addresses:
            raise BadInput(f"--site {option}: there is a site {name} already; names must differ")
        if separator and not address:
            raise BadInput(f"--site {option}: write name=host:port, or only the name for a site that only dials")
        addresses[name] = address
    return addresses


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].strip("-") or "mesh"


def _new_folder(folder: Path, holds: str) -> None:
    """Makes a folder. Refuses one that already contains such a file."""
    if (folder / holds).exists():
        raise BadInput(f"{folder / holds} exists already and is not overwritten; give another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot make the folder {folder}: {error.strerror or error}") from error


@mesh.command()
def seal(
    authority: Annotated[Path, typer.Argument(metavar="MESH", help="The founder's folder.")] = Path("mesh"),
    json_: Json = False,
) -> None:
    """At the founder's: sign the experiment again.

    After a correction of the experiment or of a Python file in the founder's folder, before the run has begun. Every
    site then gets the files, and approves them again."""
    readable_toml(authority / MESH)
    from fairmesh.mesh.enrol.founding import hand_out_again

    handout = hand_out_again(authority)
    signed, sentences = _signed(handout)
    files = ", ".join(signed["files"])
    send = f"send {files} and manifest.json to every site; each approves them: fairmesh mesh show"
    _answer(json_, {"mesh": handout.manifest.mesh} | signed, *sentences, send)


@mesh.command()
def key(
    mesh_file: Annotated[
        Path, typer.Argument(metavar="MESH", help="mesh.toml, next to the other files from the founder.")
    ],
    name: Annotated[str, typer.Argument(help="This site's name in the mesh.")],
    out: Annotated[Path | None, typer.Option(help="The site's folder, which is created; NAME by default.")] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="For a trial: use the experiment's data at this site's position.")
    ] = False,
    json_: Json = False,
) -> None:
    """At a site: make its folder, its key and the request.

    The private key never leaves the site. The founder signs the request."""
    from fairmesh.mesh.enrol.certificates import AUTHORITY, fingerprint, make_key
    from fairmesh.mesh.enrol.manifest import EXPERIMENT, MANIFEST, Handout, read_handed_out, write_files

    joined = Mesh.read(mesh_file)
    address = joined.member(name).address
    listen = f"0.0.0.0:{host_and_port(address, name)[1]}" if address else ""  # on all interfaces
    source, folder = mesh_file.parent, out or Path(name)
    authority = read_handed_out(source / AUTHORITY)
    data = {"data": OF_THE_EXPERIMENT} if trial else {}
    site_file = SiteFile.of(folder / SITE, {"name": name, "listen": listen} | data)
    handout = Handout.read(source / EXPERIMENT, authority, joined, mesh_file)
    if trial and "data" not in handout.table:
        raise BadInput(f"--trial: {source / EXPERIMENT} has no [data]; every site names its own in its {SITE}")
    _new_folder(folder, SITE)
    write_files(folder, handout.contents)
    write_atomically(folder / MANIFEST, read_bytes(source / MANIFEST))
    joined.write(folder / MESH)
    write_atomically(folder / AUTHORITY, authority)
    _, request = make_key(folder, name)
    leave_out_torch()
    from fairmesh.mesh.enrol.revealing import ALLOW, commented, revealing

    site_file.write(commented(handout.table))
    reasons = revealing(handout.table)
    own_print, authority_print = fingerprint(request.read_bytes()), fingerprint(authority)
    facts = {"site": name, "folder": str(folder), "request": str(request), "fingerprint": own_print}
    accepted = f"neighbours could read training rows; {folder / SITE} says why, and how to accept it: {ALLOW}"
    _answer(
        json_,
        facts | {"authority": authority_print, "listen": listen or None, "revealing": reasons},
        f"{folder} is ready except for its certificate; keep {name}.key there and secret",
        f"1. send {request} to the mesh's founder, and read its fingerprint out to them: {own_print}",
        f"2. let the founder read out the authority's fingerprint; it must be: {authority_print}",
        f"3. put the {name}.pem that they send back into {folder}",
        "" if trial else f"   and name your data in {folder / SITE}",
        accepted if reasons else "",
        f"4. read what would run here, and approve it: fairmesh mesh show {folder / SITE} --approve",
        f"5. check the site: fairmesh mesh check {folder / SITE}",
    )


@mesh.command()
def sign(
    request: Annotated[Path, typer.Argument(help="The request NAME.csr of a site.")],
    authority: Annotated[Path, typer.Option(help="The founder's folder.")] = Path("mesh"),
    fingerprint: Annotated[str | None, typer.Option(help="What the site read out; another request is refused.")] = None,
    days: Days = 365,
    new_key: Annotated[
        bool,
        typer.Option("--new-key", help="The site had to replace its key; sign also if it has a valid certificate."),
    ] = False,
    json_: Json = False,
) -> None:
    """At the founder's: sign a site's request, or sign it again.

    Compare the fingerprint with the site before you send the certificate back. ledger.tsv in the founder's folder
    records what was signed."""
    from fairmesh.mesh.enrol import certificates, keys

    asked = read_bytes(request)
    name, shown = certificates.requested_name(asked), certificates.fingerprint(asked)
    _refuse_other_fingerprint(fingerprint, shown, f"the request of {name}")
    if not new_key:
        keys.refuse_other_key(authority, name, shown)
    signed = certificates.sign(asked, authority, Mesh.read(authority / MESH), days)
    path = request.with_suffix(".pem")
    keys.record_signed(authority, name, signed)
    write_atomically(path, signed)
    until = f"{certificates.valid_until(signed):%Y-%m-%d}"
    if not json_:
        print(f"{printable(name)}\t{shown}")
    compare = "compare this fingerprint with the one the site reads out before you send the certificate"
    _answer(
        json_,
        {"site": name, "fingerprint": shown, "certificate": str(path), "valid_until": until},
        "" if fingerprint else compare,
        f"written: {path}, valid until {until}; send it to {name}",
    )


@mesh.command()
def authority(
    folder: Annotated[Path, typer.Argument(help="The founder's folder.")] = Path("mesh"),
    days: Days = _TEN_YEARS,
    json_: Json = False,
) -> None:
    """At the founder's: renew the authority's certificate.

    The key stays, so all certificates that it signed stay valid. Also mends dates that a wrong clock gave it."""
    from fairmesh.mesh.enrol.certificates import fingerprint, renew_authority, valid_until

    path = renew_authority(folder, days)
    shown, until = fingerprint(path.read_bytes()), f"{valid_until(path.read_bytes()):%Y-%m-%d}"
    _answer(
        json_,
        {"authority": shown, "certificate": str(path), "valid_until": until},
        f"written: {path}, valid until {until}, with the same fingerprint {shown}",
        "send it to every site, which puts it in the place of its own and restarts its node",
    )


@mesh.command()
def trust(
    site_file: Site,
    name: Annotated[str, typer.Argument(help="The site that has a new key.")],
    fingerprint: Annotated[str, typer.Argument(help="The new key's fingerprint, as that site reads it out.")],
    json_: Json = False,
) -> None:
    """At a site: confirm the new key of another site.

    Until then connections and announcements with the new key are refused, and `fairmesh status` shows its fingerprint.
    Let the other site read it out, over a channel that you trust. From then on the old key is refused."""
    from fairmesh.mesh.enrol.keys import trust as confirm

    site, _ = _site_and_mesh(site_file, name)
    shown = confirm(site.state, name, fingerprint)
    trusts = f"{site.name} trusts the key {shown} of {name}, and no longer the one before"
    _answer(json_, {"site": name, "fingerprint": shown}, f"recorded: {trusts}; the node need not stop")


@mesh.command()
def accept(
    site_file: Site,
    name: Annotated[str, typer.Argument(help="The site whose data looks different.")],
    json_: Json = False,
) -> None:
    """At a site: begin although a site's data looks different.

    The node waits for this before the first round if a site declares more than twice its share of all samples. With
    on_unusual_data = "wait" in site.toml, it also does if a site's data looks different. `fairmesh status` shows which
    site it is, and why. Ask that site first."""
    from fairmesh.mesh.node.data_consent import accept as record

    site, _ = _site_and_mesh(site_file, name)
    accepted = record(site.state, name)
    accepts = f"{site.name} accepts the data of {name} ({'; '.join(accepted)})"
    _answer(json_, {"site": name, "accepted": accepted}, f"recorded: {accepts}; the node need not stop")


@mesh.command()
def show(
    site_file: Site,
    approve: Annotated[bool, typer.Option("--approve", help="Record that this site agrees to what is shown.")] = False,
    fingerprint: Annotated[
        str | None, typer.Option(help="The authority's fingerprint as the founder read it out; another is refused.")
    ] = None,
    json_: Json = False,
) -> None:
    """At a site: show what taking part means, and approve it.

    Shows what would run here, on which data, what leaves, to whom and for how long. Nothing of the experiment is
    imported. A node runs only what was approved."""
    from fairmesh.mesh.enrol.manifest import handed_out

    site, founded = _site_and_mesh(site_file)
    handout = handed_out(site, founded)
    if not handout.imports_modules() and "privacy" not in handout.table:  # whose price is computed
        leave_out_torch()
    from fairmesh.mesh.enrol import approval
    from fairmesh.mesh.enrol.overview import in_words, overview

    seen = overview(site, founded, handout)
    _refuse_other_fingerprint(fingerprint, seen["authority"], "the authority of the mesh's founder")
    if approve:
        approval.approve(site, handout)
        seen["approved"] = True
    for line in () if json_ else in_words(seen):
        put(line)
    done, to_do = f"approved by this site: {seen['manifest']}", f"fairmesh mesh show {site_file} --approve"
    _answer(json_, seen, done if seen["approved"] else f"not approved yet; to approve it: {to_do}")


@mesh.command()
def check(
    site_file: Site,
    json_: Json = False,
) -> None:
    """At a site: check that it is ready.

    Checks files, certificate, port, data and neighbours. Exits with 1 if a check fails."""
    from dataclasses import asdict

    from fairmesh.mesh.preflight import checks

    done = list(checks(site_file))
    wrong = [one for one in done if not one.ok]
    if json_:
        print_json({"ready": not wrong, "checks": [asdict(one) for one in done]})
    else:
        rows = [[one.what, "ok" if one.ok else "WRONG", one.found, one.advice] for one in done]
        show_table([["check", "", "found", "what to do"], *rows], marked={i for i, c in enumerate(done) if not c.ok})
        say(f"{len(wrong)} of {len(done)} checks failed" if wrong else "all checks passed")
    if wrong:
        raise typer.Exit(1)


@mesh.command()
def unit(
    site_file: Site,
    user: Annotated[str | None, typer.Option(help="Who runs the node; by default the owner of the site file.")] = None,
    options: Annotated[str, typer.Option(help="Options of `fairmesh node`, such as '--prometheus 9464'.")] = "",
) -> None:
    """At a site: print the systemd unit of its node.

    It makes the state folder, which must be there before systemd starts the node."""
    from fairmesh.mesh.enrol.unit import make_state_folder, unit_of

    text = unit_of(site_file, user, options)
    folder = make_state_folder(site_file, user)
    print(text, end="")
    say(f"the state folder is {folder}; write the unit to /etc/systemd/system/fairmesh.service, then run:")
    say("systemctl daemon-reload && systemctl enable --now fairmesh")


@mesh.command()
def remove(
    site_file: Site,
    gone: Annotated[list[str] | None, typer.Argument(metavar="NAMES", help="The sites that are gone for good.")] = None,
    json_: Json = False,
) -> None:
    """At every remaining site: continue without others.

    For sites that are gone for good. Once all remaining sites, more than half of the mesh, name the same sites, they
    continue without them. Without NAMES, this site takes its vote back."""
    names = gone or []
    _vote(site_file, f"continues without {', '.join(names)}", json_, gone=names)


@mesh.command()
def rewind(
    site_file: Site,
    back_to: Annotated[int, typer.Argument(metavar="ROUND", min=0, help="A round of which all keep a checkpoint.")],
    json_: Json = False,
) -> None:
    """At every site: go back to an earlier round.

    Every site keeps three checkpoints of a run for this. Once all sites name the same round, they continue from it.
    `fairmesh mesh remove SITE`, without names, takes the vote back."""
    _vote(site_file, f"goes back to round {back_to}", json_, back_to=back_to)


@mesh.command()
def restore(
    site_file: Site,
    lost: Annotated[list[str], typer.Argument(metavar="NAMES", help="The sites that have lost their state.")],
    json_: Json = False,
) -> None:
    """At every site: give a site that has lost its state a new one.

    For a site whose state folder is lost, damaged or too old. It runs this command too, which puts aside what it has of
    the run, and starts its node. Once all sites have voted, its neighbours send it what they know of it, and all
    continue. `fairmesh mesh remove SITE`, without names, takes the vote back."""
    _vote(site_file, f"restores {', '.join(lost)} from its neighbours", json_, restored=lost)


def _vote(
    site_file: Path,
    what: str,
    json_: bool,
    gone: Sequence[str] = (),
    back_to: int | None = None,
    restored: Sequence[str] = (),
) -> None:
    from fairmesh.mesh.node.ledger import still_in, wish

    site, founded = _site_and_mesh(site_file)
    present = still_in(site.state, founded, is_lost=site.name in restored)
    remaining = wish(site.state, present, site.name, gone, back_to, restored)
    others = [member.name for member in remaining.present if member.name != site.name]
    recorded = f"recorded: {site.name} {what} as soon as these sites have voted the same: {listed(others, 10)}"
    next_step = "the node announces this to the others and need not be stopped; `fairmesh status` shows the votes"
    if not gone and back_to is None and not restored:
        recorded, next_step = f"recorded: {site.name} takes its vote back, unless all have already agreed on it", ""
    elif site.name in restored:
        next_step = f"what this site had of the run was put aside; now start its node: fairmesh node {site_file}"
    decision = {"without": list(gone), "back_to": back_to, "restored": list(restored)}
    _answer(json_, decision | {"generation": remaining.generation, "others": others}, recorded, next_step)
