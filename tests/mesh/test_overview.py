"""What `fairmesh mesh show` says about what leaves a site is what algorithms send."""

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

import fairmesh as fm
from fairmesh.algorithms import Part, Sent, plain
from fairmesh.config.registry import registered_name
from fairmesh.mesh.announcements import KINDS
from fairmesh.mesh.enrol.manifest import handed_out
from fairmesh.mesh.enrol.overview import in_words, overview, sent, sent_to_choose
from fairmesh.mesh.enrol.revealing import bits_per_parameter, revealing
from fairmesh.mesh.enrol.roster import Mesh, SiteFile
from fairmesh.networks.memory import MemoryNetwork
from fairmesh.testing.messages import check_message
from tests import toys
from tests.mesh.fleet import provisioned
from tests.refusals import missing_from, refused

WORDS = {"model": "model", "tracker": "tracker", "dual": "of all sites", "price": "price"}  # of the parts of messages


@pytest.fixture
def parts(monkeypatch):
    """The parts of the messages of a run."""
    found: dict = {}
    honest = MemoryNetwork.exchange

    def exchange(self, parts, round_index):
        found.update(parts)
        return honest(self, parts, round_index)

    monkeypatch.setattr(MemoryNetwork, "exchange", exchange)
    return found


@pytest.mark.parametrize("name", [name for name, one in toys.ALGORITHMS.items() if not one.needs_server])
@pytest.mark.quick_cases(4)
def test_every_part_of_a_message_is_named_and_no_other(name, parts):
    algorithm = toys.ALGORITHMS[name]
    fm.train(toys.problem(4), fm.Ring(), algorithm, 1)
    told = sent(algorithm, registered_name(algorithm))
    assert len(told) == max(1, len(parts)), (told, list(parts))
    for part, words in zip(parts, told):
        assert WORDS[part] in words
    compressed = [type(one.code).__name__ != "Dense" for one in parts.values()]
    assert [", compressed" in words for words in told] == (compressed or [False])
    if not parts:
        assert "nothing" in told[0]


def test_gradients_are_said_to_leave():
    for algorithm in (fm.ADGDA(), fm.ChocoSGD(), fm.TrackedADGDA(), fm.algorithms.DSGD(), fm.algorithms.DRDSGD()):
        first = sent(algorithm, registered_name(algorithm))[0]
        assert missing_from(first, "in every round", "gradient of one batch at a model that it knows") == []
    tracker = sent(fm.TrackedADGDA(), "tracked-ad-gda")[2]
    assert missing_from(tracker, "tracker", "gradients", "in every round", "gradient of one batch") == []
    assert not any("tracker" in words for words in sent(fm.TrackedADGDA(tracking=False), "tracked-ad-gda"))


@pytest.mark.parametrize(
    ("table", "leaves"),
    [
        ({}, ["if its models can be mixed", "losses", "how likely"]),
        ({"algorithm": "ad-gda"}, None),
        ({"options": {"choose_weights": False}}, None),
        ({"algorithm": "ad-gda", "options": {"choose_weights": True}}, ["how likely"]),
        ({"personalization": {"name": "mixture"}}, None),
        ({"algorithm": "ad-gda", "personalization": "choice"}, ["losses", "how likely"]),
        ({"personalization": {"name": "import", "path": "mine.py:Own"}}, ["own code"]),
    ],
)
@pytest.mark.quick_cases("all")
def test_sums_of_the_choice_are_said_to_leave_where_sites_choose_by_them(table, leaves):
    told = sent_to_choose(table)
    assert bool(told) == bool(leaves)
    assert not leaves or missing_from(told[0], *leaves) == []


class OwnState(NamedTuple):
    models: fm.roles.Models


@dataclass(frozen=True)
class Own(fm.algorithms.Algorithm):
    """An algorithm of a user."""

    compressor: fm.compressors.Compressor = field(default_factory=fm.compressors.Sign)

    def init(self, oracle, network):
        return OwnState(oracle.initial_models())

    def step(self, state, ctx):
        losses, gradients = ctx.losses_and_gradients(state.models)
        gist = self.compressor.compress(gradients, ctx.draws("gist"))
        bits = self.compressor.nominal_bits(gradients.shape[-1])
        delivery = ctx.exchange(model=plain(state.models), gist=Part(gist, bits), loss=plain(losses, "losses"))
        return OwnState(delivery.mix("model") - 0.1 * delivery.mix("gist"))

    def message(self):
        return Sent("model"), Sent("gist", compressor=self.compressor), Sent("loss", "losses")


def test_own_algorithm_says_what_it_sends(monkeypatch):
    check_message(Own())
    model, gist, loss = sent(Own(), "own")
    assert missing_from(model, "whole model", "uncompressed", "gradient of one batch") == []
    assert missing_from(gist, "gist", ", compressed", "gradient of one batch") == []
    assert missing_from(loss, "loss", "uncompressed", "its own loss") == []
    monkeypatch.setattr("fairmesh.mesh.enrol.revealing.algorithm_of", lambda table: Own())
    assert bits_per_parameter({}) == 32 + 1
    assert bits_per_parameter({"options": {"dtype": "float64"}}) == 64 + 1
    [reason] = revealing({"sampling": {"batch": 64}})
    assert missing_from(reason, "gradient of one batch", "uncompressed") == []


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        (Own().message()[:2], ["'loss'", "does not name"]),
        ((*Own().message(), Sent("secret")), ["'secret'", "only"]),
        ((Sent("model"), Sent("gist"), Sent("loss", "losses")), ["'gist'", "compressor"]),
        ((*Own().message()[:2], Sent("loss")), ["'loss'", "vectors", "losses"]),
    ],
)
def test_algorithm_that_says_something_else_than_it_sends_breaks_its_contract(declared, names):
    @dataclass(frozen=True)
    class Wrong(Own):
        def message(self):
            return declared

    with refused(*names, error=fm.testing.ContractViolation):
        check_message(Wrong())


def test_algorithm_that_says_nothing_of_its_messages_is_said_to_be_unknown(monkeypatch):
    @dataclass(frozen=True)
    class Silent(Own):
        def message(self):
            return None

    assert missing_from(sent(Silent(), "silent")[0], "silent", "own code") == []
    monkeypatch.setattr("fairmesh.mesh.enrol.revealing.algorithm_of", lambda table: Silent())
    assert bits_per_parameter({}) is None


@pytest.mark.parametrize(
    ("algorithm", "name", "words"),
    [(toys.ALGORITHMS[name], name, ["server", "refuses"]) for name in ("drfa", "afl")]
    + [(None, "own.py:Mine", ["own.py:Mine", "own code"])],
)
def test_algorithms_with_a_server_are_said_to_be_refused_and_those_of_own_code_to_be_unknown(algorithm, name, words):
    assert missing_from(sent(algorithm, name)[0], *words) == []


EXPERIMENT = """
rounds = 8
data = { name = "digits", nodes = 3 }
topology = "complete"
sampling = { batch = 40 }
"""
PRIVACY = "privacy = { epsilon = 3.0, delta = 1e-4 }\n"


def _seen(folder, text: str, data: str = 'data = "experiment"') -> dict:
    """What `fairmesh mesh show` has of site a, whose file names its data in this way."""
    (folder / "trial.toml").write_text(text)
    provisioned(folder, folder / "trial.toml", ["a", "b", "c"])
    path = folder / "a" / "site.toml"
    path.write_text(path.read_text().replace('data = "experiment"', data))
    site = SiteFile.read(path)
    mesh = Mesh.read(site.mesh)
    return overview(site, mesh, handed_out(site, mesh))


def test_site_reads_what_privacy_means_for_its_own_units_before_it_approves(tmp_path):
    pytest.importorskip("dp_accounting")
    seen = _seen(tmp_path, EXPERIMENT + PRIVACY)
    terms, text = seen["privacy"], "\n".join(in_words(seen))
    units = len(fm.load_experiment(tmp_path / "trial.toml").problem().sites[0].train)
    assert (terms["units"], terms["parameters"]) == (units, 650)
    assert terms["price"]["sizes"] == (units,)
    assert terms["price"]["terms"]["releases"] == 8
    assert [row["epsilon"] for row in terms["price"]["rows"]] == [1, 2, 3, 4, 8]
    assert missing_from(text, f"{units} training units", "epsilon = 3 ", "a.privacy.jsonl", "instead of 50 %") == []
    assert "other runs" not in text
    assert "other runs" in "\n".join(in_words({**seen, "privacy": {**terms, "begun": True}}))
    leaves = seen["leaves"]
    assert not {KINDS[kind].tells for kind in ("statistics", "table", "versus_local", "measured")} & {
        *leaves["to_all_sites"]
    }
    assert missing_from(" ".join(leaves["to_all_sites"]), "noised loss", "one noised evaluation", "public") == []
    assert missing_from(" ".join(leaves["to_neighbours_in_every_round"]), "noised losses", "clipped") == []
    assert len(leaves["to_neighbours_in_every_round"]) == 3
    assert not any("choose" in part for part in leaves["at_the_end"])


def test_price_is_of_usual_sizes_where_a_sites_data_or_the_model_cannot_be_known_yet(tmp_path):
    pytest.importorskip("dp_accounting")
    (tmp_path / "mine.py").write_text("raise SystemExit('code of the site was run')")
    seen = _seen(tmp_path, EXPERIMENT + PRIVACY, 'data = "../mine.py:rows"')
    assert seen["privacy"]["units"] is None
    assert seen["privacy"]["price"]["sizes"] == (200, 1_000, 5_000)
    assert missing_from("\n".join(in_words(seen)), "not known yet", "1,000 parameters", "5,000 units") == []


def test_overview_without_privacy_says_nothing_of_it(tmp_path):
    seen = _seen(tmp_path, EXPERIMENT)
    assert "privacy" not in seen
    assert KINDS["statistics"].tells in seen["leaves"]["to_all_sites"]
    assert not any("PRIVACY" in line or "noised" in line for line in in_words(seen))
