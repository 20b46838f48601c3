"""What taking part means for a site, for its operator to read before approving: what would run, on which data, what
leaves, to whom and for how long. Nothing of the experiment is imported."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairmesh.algorithms import Algorithm, Sent
from fairmesh.config.overrides import resolved_files
from fairmesh.config.registry import IMPORT, registered_name
from fairmesh.config.tables import from_table
from fairmesh.config.trusted import import_paths
from fairmesh.errors import BadInput
from fairmesh.mesh.announcements import KINDS
from fairmesh.mesh.enrol import private_terms
from fairmesh.mesh.enrol.approval import is_approved, not_allowed, outside
from fairmesh.mesh.enrol.certificates import fingerprint, valid_until
from fairmesh.mesh.enrol.manifest import Handout, python_files
from fairmesh.mesh.enrol.revealing import ALLOW, algorithm_of, bits_per_parameter, compresses, default_of, revealing
from fairmesh.mesh.enrol.roster import OF_THE_EXPERIMENT, Mesh, SiteFile
from fairmesh.personalization import Choice, Personalization
from fairmesh.problems.models import Logistic
from fairmesh.storage.files import read_bytes
from fairmesh.training.defaults import DEFAULT_ALGORITHM, ROUNDS
from fairmesh.training.options import Options

_MILLION = 10**6
_GRADIENTS = (
    "computed from gradients of the site's data, plus gossip; in every round, a neighbour that subtracts the gossip "
    "sees the gradient of one batch at a model that it knows, up to compression"
)
_WEIGHTS = "its estimate of the weights of all sites, which follow their losses"
_TO_RESTORE = "what is known of both sites' models from messages, and what is nearly the same at all sites"
_BEFORE_THE_FIRST_ROUND = (
    "the model to start from, made from the experiment's files and not from data",
    "its version of torch, its processor, threads and device",
)
_ON_UNUSUAL = {
    "warn": "the node warns of it, and begins",
    "wait": "the node waits until somebody here accepts it",
}
_AT_THE_END = (
    "partial sums of the models of the last and of the best round, weights and traffic, along a tree of neighbours",
    "partial sums that contain its metrics of the common models on its own data",
)


def sent(algorithm: Algorithm | None, name: str, private: bool = False) -> tuple[str, ...]:
    """Returns what an algorithm sends to each neighbour in every round, in plain words.

    Args:
        algorithm: The algorithm, or None if only the experiment's own code knows it.
        name: Its name.
        private: Whether gradients and losses are clipped and noised. Default: False.
    """
    if algorithm and algorithm.needs_server:
        return ("nothing: this algorithm needs a server, and a node refuses it",)
    parts = algorithm and algorithm.message()
    if parts is None:
        return (f"what the algorithm {name} sends, which only the experiment's own code knows",)
    if not parts:
        return ("nothing: this algorithm trains every site alone",)
    return tuple(_in_words(part, private) for part in parts)


def _in_words(part: Sent, private: bool) -> str:
    """Returns what a part of a message is, from what the algorithm declares of it."""
    name, form = part.name, "compressed" if compresses(part.compressor) else "uncompressed"
    if part.content == "vectors":
        gradients = private_terms.GRADIENTS if private else _GRADIENTS
        return f"{'the change of its' if part.followed else 'its whole'} {name}, {form}: {gradients}"
    if part.content == "weights":
        return f"{private_terms.WEIGHTS if private else _WEIGHTS}, {form}"
    if private:
        return f"its {name}, {form}: it follows the noised losses of all sites"
    return f"its {name}, {form}: it follows the losses of all sites, and shows its own loss in the first round"


def sent_to_choose(table: Mapping[str, Any]) -> list[str]:
    """Returns what a site sends to choose its own model, in words; nothing if it sends nothing for it.

    Args:
        table: The experiment.
    """
    section = table.get("personalization")
    if import_paths(section):
        return ["what the personalization sends, which only the experiment's own code knows"]
    if section is None and not _chooses_by_default(table):
        return []
    try:
        method = Choice() if section is None else from_table(Personalization, section, "personalization")
    except BadInput:
        return []  # refused where the experiment is read
    when = "partial sums to choose its own model, if its models can be mixed" if section is None else "partial sums"
    return [f"{when}: {method.sends}"] if method.sends else []


def _chooses_by_default(table: Mapping[str, Any]) -> bool:
    try:
        options: Options = from_table(Options, table.get("options", {}), "options")
        return bool((options if "algorithm" in table else default_of(table).completed(options)).choose_weights)
    except BadInput:
        return False  # refused where the experiment is read


def overview(site: SiteFile, mesh: Mesh, handout: Handout) -> dict[str, Any]:
    """Returns what taking part means for a site, as a table."""
    table, manifest = handout.table, handout.manifest
    algorithm, settings = _named(table.get("algorithm"), registered_name(DEFAULT_ALGORITHM))
    announces = {"statistics": site.announce_statistics, "versus_local": site.compare_with_local}
    terms = private_terms.private_terms(site, mesh, handout)
    private = terms is not None
    if private:
        announces |= dict.fromkeys(private_terms.WITHHELD, False)
    return {
        "site": site.name,
        "mesh": mesh.name,
        "manifest": manifest.digest(),
        "signed": manifest.date(),
        "authority": fingerprint(read_bytes(site.authority)),
        "approved": is_approved(site, handout),
        "runs": {
            "files": dict(manifest.files),
            "names": import_paths(table),
            "imports": {file: outside(handout.contents, file) for file in python_files(handout.contents)},
            "allowed": list(site.allow),
            "refused": [reason for _, reason in not_allowed(handout.contents, site.allow)],
            "algorithm": {"name": algorithm} | settings,
            "model": table.get("model", registered_name(Logistic())),
            "loss": table.get("loss", "cross-entropy"),
            "observers": table.get("observers", []),
            "own_options": dict(site.options),
        },
        "data": _data(site, table) | {"contract": table.get("contract"), "on_unusual": site.on_unusual_data},
        "weights": {"prior": table.get("prior"), "largest_prior": site.largest_share(len(mesh.present))},
        "leaves": {
            "to_neighbours_before_the_first_round": list(_BEFORE_THE_FIRST_ROUND),
            "to_neighbours_in_every_round": list(sent(algorithm_of(table), algorithm, private)),
            "bits_per_parameter": bits_per_parameter(table),
            "revealing": revealing(table),
            "allow_revealing": site.allow_revealing,
            "to_all_sites": [_told(kind, private) for kind in KINDS if announces.get(kind, True)],
            "at_the_end": list(private_terms.AT_THE_END) if private else [*_AT_THE_END, *sent_to_choose(table)],
            "to_restore_a_neighbour": _TO_RESTORE,
        },
        "to": {
            "neighbours": {name: mesh.member(name).address or None for name in mesh.neighbours(site.name)},
            "all_sites": [member.name for member in mesh.present if member.name != site.name],
        },
        "until": {"rounds": table.get("rounds", ROUNDS), "certificate": _certificate_end(site)},
    } | ({"privacy": terms} if private else {})


def _told(kind: str, private: bool) -> str:
    return private_terms.REWORDED.get(kind, KINDS[kind].tells) if private else KINDS[kind].tells


def _named(value: Any, default: str) -> tuple[str, dict[str, Any]]:
    """Returns the name and the settings of a section, which a file may give as a name or as a table."""
    if isinstance(value, Mapping):
        settings = {key: item for key, item in value.items() if key != "name"}
        name = str(value.get("name", default))
        return (str(settings.get("path", name)) if name == IMPORT else name), settings
    return (value if isinstance(value, str) else default), {}


def _data(site: SiteFile, table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns which data are used, and the digests of this site's own Python files that read them."""
    if not site.data:
        return {"from": site.path.name, "data": "not named yet, so that a node refuses to start", "files": {}}
    if site.data == OF_THE_EXPERIMENT:
        return {"from": "experiment.toml", "data": table.get("data"), "files": {}}
    paths = import_paths(resolved_files(site.data, site.folder)).values()
    files = [file for file in (path.rpartition(":")[0] for path in paths) if file.endswith(".py")]
    digests = {file: hashlib.sha256(read_bytes(Path(file))).hexdigest() for file in files}
    return {"from": site.path.name, "data": site.data, "files": digests}


def _certificate_end(site: SiteFile) -> str | None:
    try:
        return f"{valid_until(read_bytes(site.certificate)):%Y-%m-%d}"
    except BadInput:
        return None


def in_words(seen: Mapping[str, Any]) -> list[str]:
    """Returns an overview as lines of text."""
    runs, data, leaves, to, until = (seen[key] for key in ("runs", "data", "leaves", "to", "until"))
    ends = f"; the certificate ends on {until['certificate']}" if until["certificate"] else ""
    return [
        f"Site {seen['site']} of the mesh {seen['mesh']}.",
        f"The manifest was signed on {seen['signed']} with the authority {seen['authority']}.",
        f"Its digest is {seen['manifest']}.",
        "",
        "WHAT RUNS HERE",
        *(f"  {name}  sha256 {digest}" for name, digest in runs["files"].items()),
        f"  algorithm: {_shown(runs['algorithm'])}",
        f"  model: {_shown(runs['model'])}; loss: {_shown(runs['loss'])}",
        *([f"  observers: {_shown(runs['observers'])}"] if runs["observers"] else []),
        *(f"  experiment.toml calls {path} ({key})" for key, path in runs["names"].items()),
        *(f"  {file} imports {', '.join(modules)}" for file, modules in runs["imports"].items() if modules),
        *([f"  this site allows: {', '.join(runs['allowed'])}"] if runs["allowed"] else []),
        *(f"  REFUSED unless allowed: {reason}" for reason in runs["refused"]),
        "  Python files can do anything that this user may do on this machine. Read them.",
        "",
        "ON WHICH DATA",
        f"  {data['from']}: data = {_shown(data['data'])}",
        *([f"  checked by the experiment's contract: {_shown(data['contract'])}"] if data["contract"] else []),
        f"  if a site's data looks different: {_ON_UNUSUAL[data['on_unusual']]} (on_unusual_data)",
        f"  weight of each site before training: {_weights(seen['weights'])}",
        *(f"  this site's own code: {file}  sha256 {digest}" for file, digest in data["files"].items()),
        "",
        "WHAT LEAVES THIS SITE",
        *(f"  to each neighbour, before the first round: {p}" for p in leaves["to_neighbours_before_the_first_round"]),
        *(f"  to each neighbour, in every round: {part}" for part in leaves["to_neighbours_in_every_round"]),
        f"  {_size(leaves['bits_per_parameter'], until['rounds'])}",
        *_revealed(leaves),
        *(f"  to all sites: {part}" for part in leaves["to_all_sites"]),
        *(f"  at the end: {part}" for part in leaves["at_the_end"]),
        f"  if this site has voted to restore a neighbour, to that one: {leaves['to_restore_a_neighbour']}",
        *_on_samples("privacy" in seen),
        "",
        *(["WHAT IT SPENDS OF ITS PRIVACY", *private_terms.in_words(seen["privacy"]), ""] if "privacy" in seen else []),
        "TO WHOM",
        *(f"  neighbour {name}, {address or 'which dials this site'}" for name, address in to["neighbours"].items()),
        f"  through them to all sites: {', '.join(to['all_sites'])}",
        "",
        "FOR HOW LONG",
        f"  {until['rounds']} rounds{ends}",
        "",
    ]


def _on_samples(private: bool) -> list[str]:
    if private:
        return [
            "  Samples, labels and keys are not sent as such. What is computed from training and test rows has noise,",
            '  except for what is named as public below. "Privacy", in the documentation, says what that protects.',
        ]
    return [
        "  Samples, labels and keys are not sent as such. What is sent is computed from samples and labels.",
        '  It can reveal some of them. "Security of a mesh", in the documentation, has measurements.',
    ]


def _revealed(leaves: Mapping[str, Any]) -> list[str]:
    known = "this site accepts" if leaves["allow_revealing"] else f"REFUSED without {ALLOW} in this site's file"
    return [f"  {known}: neighbours could read training rows: {reason}" for reason in leaves["revealing"]]


def _weights(weights: Mapping[str, Any]) -> str:
    if weights["prior"] is not None:
        return f"{weights['prior']}, as experiment.toml says"
    limit = weights["largest_prior"]
    return (
        f"its share of all samples; if another site declares more than {limit:.0%} (largest_prior), the node waits "
        "until somebody here accepts it"
    )


def _size(bits: float | None, rounds: Any) -> str:
    if bits is None:
        return "the size of a message is known only to the experiment's own code"
    mega = bits * _MILLION / 8 / 1e6
    total = f", and {mega * rounds / 1e3:,.3g} GB in {rounds} rounds" if isinstance(rounds, int) else ""
    return (
        f"a message has about {bits:g} bits per parameter of the model: for a million parameters {mega:.3g} MB{total}; "
        "headers and norms add to this, and coding takes from it"
    )


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
