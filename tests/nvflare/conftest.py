"""What the sites of the stand-in share, which in a deployment are processes of their own."""

import pytest

from fairmesh.numerics.random_streams import GeneratorStates


@pytest.fixture(autouse=True, scope="module")
def generators_of_one_process():
    """A site seeds torch's generator while it makes its model, and another one would take this for a draw of its own
    model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GeneratorStates, "moved", lambda before: [])
        yield
