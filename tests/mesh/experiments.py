"""The experiments that meshes of the tests run: digits at three sites in a ring, unless a test needs another one."""

from typing import Any

import tomli_w

STARTS = {"ad-gda": 6.0, "choco-sgd": 0.6, "dsgd": 0.6}  # of steps, which a mesh wants to be named
AD_GDA = {"name": "ad-gda", "consensus_step": 0.5, "compressor": {"name": "quantize", "bits": 4}}
STEADY_AD_GDA = AD_GDA | {"primal_step": 1.0, "dual_step": 0.05, "consensus_step": 0.4}
BY_CLASS = {"odd": None, "split": "class"}  # each site has another digit, instead of one with another scanner


def experiment(
    rounds: int,
    nodes: int = 3,
    algorithm: Any = AD_GDA,
    topology: Any = "ring",
    data: dict[str, Any] | None = None,
    **sections: Any,
) -> str:
    """Returns an experiment file. Sections and settings that are None are left out.

    Args:
        rounds: How many rounds it has.
        nodes: How many sites.
        algorithm: The section of the algorithm.
        topology: The section of the graph.
        data: Settings of the digits, besides the number of sites and one site with another scanner; or another section
            with a name of its own.
        sections: Others, such as options.
    """
    given = data or {}
    digits = given if "name" in given else {"name": "digits", "nodes": nodes, "odd": 1} | given
    data = {key: value for key, value in digits.items() if value is not None}
    table = {
        "rounds": rounds,
        "data": data or None,
        "topology": topology,
        "algorithm": _with_step(algorithm),
    } | sections
    return tomli_w.dumps({name: section for name, section in table.items() if section is not None})


def _with_step(algorithm: Any) -> Any:
    """Returns the section of an algorithm with a step, if it needs one and has none."""
    table = {"name": algorithm} if isinstance(algorithm, str) else algorithm
    if table is None or table["name"] not in STARTS or "primal_step" in table:
        return algorithm
    return table | {"primal_step": {"name": "linear", "start": STARTS[table["name"]]}}
