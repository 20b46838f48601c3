"""A small mesh of three sites, two of which can be dialled."""

import pytest

from fairmesh.mesh.enrol.roster import Member, Mesh
from tests.cli.conftest import called  # noqa: F401  (a fixture)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(
        "trial",
        (
            Member("alpha", "alpha.example:7700", ("beta", "gamma")),
            Member("beta", "10.0.0.2:7700", ("alpha", "gamma")),
            Member("gamma", "", ("alpha", "beta")),
        ),
    )
