"""over-a-wan.md: three sites of which one listens, with the page's own file and commands."""

import pytest

from tests.docs.pages import ROOT
from tests.journeys.user import shown
from tests.journeys.walk import steps, walking
from tests.refusals import missing_from

PAGE = "docs/howto/over-a-wan.md"


@pytest.mark.slow
def test_star_around_one_open_port_trains_as_the_page_says(tmp_path):
    with walking(tmp_path / "star", extras=["mesh"]) as walk:
        walk.write("star.toml", shown(PAGE, "toml", 'topology = "star"'))
        walk.write("hospitals.py", (ROOT / "examples" / "hospitals.py").read_text())
        printed = {}
        for step in steps(PAGE, "Sites behind NAT and firewalls: a star"):
            printed[" ".join(step.text.split()[:2])] = walk.do(step, timeout=300)
            if step.text.startswith("for site"):
                cut = walk.run("fairmesh mesh remove south/site.toml north", code=2)
                assert missing_from(cut, "south", "east") == []
    assert printed["grep listen"].split() == ["north/site.toml:listen", "=", '"0.0.0.0:7711"']
    assert missing_from(printed["fairmesh mesh"], "round trip", "rounds per second") == []
    digests = [line.split()[0] for line in printed["sha256sum */state/result/model.safetensors"].splitlines()]
    assert len(digests) == 3
    assert len(set(digests)) == 1
