"""deploy.md with its own example file at five sites: a restart, a moved folder, a removal, a restoration, a rewind, the
end, report, export and predict. No setting is named that the page's file does not name."""

import hashlib
import json
import shutil

import pytest

from tests.journeys.consortium import TABLE, Consortium
from tests.journeys.patients import write_ill
from tests.journeys.user import shown

SITES = ["north", "south", "west", "porto", "east"]
ROUNDS = 1600  # more than the page's 300, so that something can happen during the run


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """The mesh after the whole walk, with what was seen on the way."""
    folder = tmp_path_factory.mktemp("consortium")
    text = shown("docs/howto/deploy.md", "toml", "[[contract.columns]]", {"rounds = 300": f"rounds = {ROUNDS}"})
    (folder / "risk.toml").write_text(text)

    def give_data(home, k):
        write_ill(home / "patients.csv", 60 + 90 * k, seed=k)
        with open(home / "site.toml", "a") as file:
            file.write(TABLE)

    mesh = Consortium(folder, "risk.toml", SITES, give_data)
    try:
        yield mesh, _walk(mesh)
    finally:
        mesh.kill_all()


def _walk(mesh):
    seen = {}
    mesh.start()
    mesh.until("north", lambda status: status["round"] >= 100)

    # A restart, after being asked to stop and after a power cut.
    mesh.stop("north")
    mesh.kill("south")
    mesh.start("north", "south")
    mesh.until("south", lambda status: status["activity"] == "training" and status["round"] >= 150)

    # A folder that moves.
    mesh.stop("west")
    mesh.move("west", "backup/of/west")
    seen["check after the move"] = mesh.at("west", "check")
    mesh.start("west")
    mesh.until("west", lambda status: status["activity"] == "training" and status["round"] >= 200)

    # A site that does not come back. The others vote.
    mesh.kill("east")
    for site in SITES[:-1]:
        mesh.at(site, "remove east")
    for site in SITES[:-1]:
        mesh.until(site, lambda status: "east" not in status["sites"] or not status["sites"]["east"])
    before = json.loads((mesh.state("north") / "status.json").read_text())["round"]
    mesh.until("porto", lambda status: status["round"] > before + 20)

    # A site that has lost its state gets a new one from its neighbours.
    mesh.kill("porto")
    shutil.rmtree(mesh.state("porto"))
    mesh.at("porto", "show --approve")
    for site in SITES[:-1]:
        mesh.at(site, "restore porto")
    mesh.start("porto")
    mesh.until("porto", lambda status: status["activity"] == "training" and status["round"] > 0)
    begun = json.loads((mesh.state("porto") / "status.json").read_text())["round"]

    # All go back to a round that every site keeps.
    kept = ROUNDS // 8 * (begun // (ROUNDS // 8) + 1)
    for site in SITES[:-1]:
        mesh.until(site, lambda status: status["round"] > kept + 10)
    for site in SITES[:-1]:
        mesh.at(site, f"rewind {kept}")
    mesh.end(*SITES[:-1])
    return seen


@pytest.mark.slow
def test_all_remaining_sites_end_with_one_model(walked):
    mesh, seen = walked
    models = {mesh.state(site) / "result" / "model.safetensors" for site in SITES[:-1]}
    assert len({hashlib.sha256(model.read_bytes()).hexdigest() for model in models}) == 1
    assert json.loads((mesh.state("north") / "result" / "summary.json").read_text())["rounds"] == ROUNDS
    assert "error" not in seen["check after the move"].lower()


@pytest.mark.slow
def test_every_remaining_site_counts_in_the_weights_and_in_the_mean(walked):
    mesh, _ = walked
    summary = json.loads((mesh.state("north") / "result" / "summary.json").read_text())
    (final,) = summary["final"]
    assert min(final["lambda"]) > 0, "also the one that was restored"
    values = final["accuracy"]["sites"]
    assert summary["evidence"]["mean"]["value"] == pytest.approx(sum(values) / len(values))


@pytest.mark.slow
def test_every_decision_was_carried_out(walked):
    mesh, _ = walked
    decided = json.loads((mesh.state("north") / "decisions.json").read_text())
    text = json.dumps(decided)
    assert "east" in text
    assert "porto" in text
    assert mesh.status("north")["activity"] == "finished"


@pytest.mark.slow
def test_the_result_is_reported_exported_and_applied(walked):
    mesh, _ = walked
    result = f"{mesh.homes['west']}/state/result"
    mesh.user.runs(f"fairmesh report {result}")
    assert (mesh.folder / result / "report.html").exists()
    mesh.user.runs(f"fairmesh export {result} --onnx")
    write_ill(mesh.folder / "new.csv", 30, seed=99)
    mesh.user.runs(f"fairmesh predict {result} new.csv --out predicted.csv")
    assert len((mesh.folder / "predicted.csv").read_text().splitlines()) == 31


@pytest.mark.slow
def test_a_node_that_is_started_after_the_end_says_so_and_exits_with_0(walked):
    mesh, _ = walked
    mesh.start("north")
    mesh.end("north")
