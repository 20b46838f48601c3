"""What `[privacy]` of an experiment means for a site, for its operator to read before approving: what leaves with
noise, what does not leave, what it spends and where that is written, and what the noise means for its own units."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fairmesh.config.tables import from_table
from fairmesh.config.trusted import import_paths
from fairmesh.errors import BadInput
from fairmesh.mesh.enrol.manifest import Handout
from fairmesh.mesh.enrol.revealing import algorithm_of
from fairmesh.mesh.enrol.roster import Mesh, SiteFile
from fairmesh.privacy.settings import Privacy
from fairmesh.problems.batches import Sampling
from fairmesh.training.defaults import ROUNDS

if TYPE_CHECKING:
    from fairmesh.privacy.price import Price

WITHHELD = ("statistics", "table", "versus_local")  # what a site with privacy does not announce
GRADIENTS = (
    "computed from the gradients of the site's units, each clipped, summed and noised, plus gossip; in every round, a "
    "neighbour that subtracts the gossip sees the noised mean of one random draw of units"
)
WEIGHTS = "its estimate of the weights of all sites, which follow their noised losses"
AT_THE_END = (
    "partial sums of the model of the last round, weights and traffic, along a tree of neighbours",
    "partial sums that contain its noised metrics of the common model on its own test units",
)
REWORDED = {
    "facts": "number of training, test and validation units, shape and type of inputs and targets, number of outputs, "
    "name of its group, and what a unit is called: these are public, and have no noise",
    "status": "round, activity, latest noised loss, weight, sites it waits for, of how many rounds it has sent its "
    "messages, bytes sent, and after how many seconds it tells this again at the latest",
    "measured": "every few rounds (measure_every): the noised loss of the last round, what it has spent, its weight, "
    "its traffic and a running hash of the messages that it has sent; no other metric",
    "result": "at the end: one noised evaluation of the common model on its test units, the digests of its result and "
    "of all sites' metrics, and which neighbours have sent it other messages than they have signed",
}
_PARAMETERS = 1_000  # where those of the model are not known


def privacy_of(table: Mapping[str, Any]) -> Privacy | None:
    """Returns the privacy of an experiment's table; None if it has none, or one that is refused where it is read."""
    try:
        return from_table(Privacy, table["privacy"], "privacy") if "privacy" in table else None
    except BadInput:
        return None


def refuse_larger_budget(site: SiteFile, table: Mapping[str, Any]) -> None:
    """Refuses an experiment without privacy, or with a larger budget than the site's own file allows, if it says so."""
    privacy = privacy_of(table)
    limits = {"epsilon": "largest_epsilon", "evaluation_epsilon": "largest_epsilon", "delta": "largest_delta"}
    for key, limit in limits.items():
        most = getattr(site, limit)
        if most is None:
            continue
        if privacy is None:
            raise BadInput(f"the experiment has no [privacy], and {site.path} asks for it ({limit} = {most:g})")
        if getattr(privacy, key) > most:
            raise BadInput(
                f"privacy.{key} = {getattr(privacy, key):g} is more than {site.path} allows ({limit} = {most:g}); "
                "agree on less with the mesh's founder"
            )


def private_terms(site: SiteFile, mesh: Mesh, handout: Handout) -> dict[str, Any] | None:
    """Returns what privacy means for a site, as a table; None without privacy."""
    privacy = privacy_of(handout.table)
    if privacy is None:
        return None
    price, own, why_not = None, None, ""
    try:
        own = _own_numbers(site, mesh, handout)
        price = _price(privacy, handout.table, own)
    except BadInput as error:
        why_not = str(error)
    return {
        "epsilon": privacy.epsilon,
        "delta": privacy.delta,
        "clip": privacy.clip,
        "evaluation_epsilon": privacy.evaluation_epsilon,
        "ledger": str(site.ledger_path),
        "begun": site.ledger_path.exists(),
        "units": own and own[0],
        "parameters": own and own[1],
        "price": price and price.as_json(),
        "table": price.table() if price else [],
        "no_price": why_not,
    }


def _own_numbers(site: SiteFile, mesh: Mesh, handout: Handout) -> tuple[int, int, str] | None:
    """Returns how many training units this site has, how many parameters the model has, and what a unit is called; None
    if they cannot be known without running anybody's code, or without the data."""
    if handout.imports_modules() or import_paths(handout.table) or import_paths(site.data) or not site.data:
        return None
    from fairmesh.data.sealed import unit_of
    from fairmesh.data.units import units_of
    from fairmesh.experiment import experiment_from
    from fairmesh.mesh.enrol.agreement import problem_of

    try:
        experiment = experiment_from(dict(handout.table), handout.folder)
        problem = problem_of(site, experiment, mesh)
        train = problem.sites[0].train
        return units_of(train), problem.flat_model.dim, unit_of(train)
    except (BadInput, OSError):
        return None  # `fairmesh mesh check` says what is wrong with the data


def _price(privacy: Privacy, table: Mapping[str, Any], own: tuple[int, int, str] | None) -> "Price | None":
    from fairmesh.privacy.price import SIZES, Terms, price_of

    algorithm = algorithm_of(table)
    if algorithm is None:
        raise BadInput("only the experiment's own code knows how many releases a round has")
    units, parameters, unit = own or (None, _PARAMETERS, "unit")
    terms = Terms(
        privacy.delta,
        from_table(Sampling, table.get("sampling", {}), "sampling").batch,
        table.get("rounds", ROUNDS) * algorithm.oracle_calls(),
        parameters,
        privacy.loss_share if algorithm.uses_losses() else 0.0,
        privacy.clip,
    )
    return price_of(terms, privacy.epsilon, [units] if units else SIZES, unit=unit, all_sites=False)


def in_words(terms: Mapping[str, Any]) -> list[str]:
    """Returns what privacy means for a site, as lines of text."""
    evaluation = terms["evaluation_epsilon"]
    told = (
        f"at most epsilon = {evaluation:g}, for one evaluation at the end" if evaluation else "nothing is told of them"
    )
    known = terms["units"] is not None
    whose = (
        f"  of this site's {terms['units']:,} training units:"
        if known
        else f"  this site's units, or the model, are not known yet: for some sizes, and {_PARAMETERS:,} parameters "
        "(four times as many make twice the noise):"
    )
    return [
        f"  its training units: at most epsilon = {terms['epsilon']:g} at delta = {terms['delta']:g} per unit, against "
        "all other sites together, in all runs of its ledger; then its rows are used no more",
        f"  its test units: {told}",
        f"  what it has spent is written to {terms['ledger']} before anything is sent; keep a backup",
        *(
            ["  this ledger has releases already: for another run less is left, and the noise is larger than below"]
            * terms["begun"]
        ),
        "  public, and told as it is: how many units the site has, when it takes part, sizes and times of messages",
        *([whose] if terms["table"] else []),
        *(
            "    " + "; ".join(f"{name}: {cell}" for name, cell in zip(terms["table"][0], row))
            for row in terms["table"][1:]
        ),
        *(f"  {sentence}" for sentence in (terms["price"] or {}).get("sentences", [])),
        *([f"  no price can be told: {terms['no_price']}"] if terms["no_price"] else []),
    ]
