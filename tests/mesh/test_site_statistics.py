"""Sites whose inputs are in another unit, order or scaling are named; honest sites that differ are not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fairmesh as fm
from examples.hospitals import sites as hospitals
from fairmesh.data.samples import Samples
from fairmesh.mesh.node.site_statistics import WITHHELD, statistics, unusual
from fairmesh.mesh.wire.bulletin import KINDS
from tests.refusals import missing_from

NAMES = ["age", "weight", "creatinine", "smokes"]


def patients(seed: int, count: int = 200) -> Samples:
    """Patients of a site: age, weight, creatinine, whether they smoke, and whether they are ill. Sites differ."""
    generator = np.random.default_rng(seed)
    age = generator.normal(45 + 5 * seed, 12, count)
    weight = generator.normal(80 - 3 * seed, 15, count)
    creatinine = generator.normal(1.0 + 0.1 * seed, 0.3, count)
    smokes = generator.random(count) < 0.05 + 0.1 * seed
    ill = 0.03 * age + creatinine + generator.normal(0, 0.3, count) > 2.6
    inputs = np.stack([age, weight, creatinine, smokes], axis=1).astype(np.float32)
    return Samples.of((inputs, ill.astype(np.int64)), "patients")


def compared(samples: list[Samples]) -> dict[str, list[str]]:
    return unusual({f"site-{k}": statistics(one) for k, one in enumerate(samples)}, NAMES)


def with_inputs(samples: Samples, change) -> Samples:
    return replace(samples, inputs=change(samples.inputs.clone()))


def times(column: int, factor: float):
    def change(inputs):
        inputs[:, column] *= factor
        return inputs

    return lambda samples: with_inputs(samples, change)


def standardized(samples: Samples) -> Samples:
    return with_inputs(samples, lambda x: (x - x.mean(0)) / x.std(0))


MISTAKES = {
    "grams": (times(1, 1000), ["weight", "00 times as large", "another unit"]),
    "micromoles": (times(2, 88.4), ["creatinine", "times as large", "another unit"]),
    "a thousandth": (times(1, 0.001), ["weight", "00 times as small", "another unit"]),
    "another order": (
        lambda samples: with_inputs(samples, lambda x: x[:, [2, 1, 0, 3]]),
        ["age", "looks like creatinine elsewhere", "creatinine", "looks like age elsewhere", "order"],
    ),
    "scaled only there": (standardized, ["scaled to mean 0 and spread 1 only there"]),
    "reversed classes": (lambda samples: replace(samples, targets=1 - samples.targets), ["classes are reversed"]),
}


@pytest.mark.parametrize("sites", [3, 4, 7])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_site_with_a_mistake_is_named_alone_with_the_likely_cause(mistake, sites):
    make, names = MISTAKES[mistake]
    honest = [patients(seed % 4) for seed in range(sites)]
    assert compared(honest) == {}
    for wrong in (0, sites - 1):
        found = compared([make(one) if k == wrong else one for k, one in enumerate(honest)])
        assert list(found) == [f"site-{wrong}"]
        assert missing_from("; ".join(found[f"site-{wrong}"]), *names) == []


def test_site_that_forgot_to_scale_is_named():
    honest = [standardized(patients(seed)) for seed in range(3)]
    assert compared(honest) == {}
    found = compared([*honest[:2], patients(2)])
    assert list(found) == ["site-2"]
    assert "inputs are probably not scaled there" in found["site-2"][-1]


def images(classes: list[float], factor: float = 1.0) -> Samples:
    generator = torch.Generator().manual_seed(len(classes))
    labels = torch.multinomial(torch.tensor(classes), 300, replacement=True, generator=generator)
    return Samples.of((factor * torch.rand(300, 1, 4, 4, generator=generator), labels), "images")


def test_images_are_compared_as_a_whole_and_by_the_shares_of_their_classes():
    usual = [0.6, 0.3, 0.1]
    found = compared([images(usual), images(usual), images(usual, 255.0)])
    assert missing_from("; ".join(found["site-2"]), "all inputs together", "another unit") == []
    found = compared([images(usual), images(usual[::-1]), images([0.65, 0.25, 0.1])])
    assert list(found) == ["site-1"]
    assert "classes are reversed" in found["site-1"][0]
    assert all(len(statistics(images(usual))[what]) == 1 for what in ("mean", "spread"))


@pytest.mark.parametrize(
    "sites",
    [
        *(hospitals(count) for count in (3, 6)),
        *(fm.data.Digits(nodes=10, split=split).sites() for split in ("instrument", "class")),
        fm.data.Digits(nodes=10, instrument="shifted").sites(),
    ],
)
def test_honest_sites_of_the_examples_are_not_named(sites):
    said = {site.name or str(k): statistics(Samples.of(site.train, "it")) for k, site in enumerate(sites)}
    assert all(one["mean"] for one in said.values())
    assert unusual(said) == {}


def test_two_sites_cannot_say_which_one_differs_and_withheld_ones_are_left_out():
    two = [patients(0), MISTAKES["grams"][0](patients(1))]
    assert compared(two) == {}
    said = {str(k): statistics(one) for k, one in enumerate([*two, patients(2)])}
    assert unusual(said | {"2": WITHHELD}, NAMES) == {}
    assert list(unusual(said | {"3": WITHHELD}, NAMES)) == ["1"]


def test_statistics_are_few_coarse_and_none_of_a_handful_of_samples():
    said = statistics(patients(1))
    assert [len(said[what]) for what in ("mean", "spread", "shares", "relation")] == [4, 4, 2, 4]
    assert all(len(f"{abs(value):.10e}".split("e")[0].rstrip("0").rstrip(".")) <= 3 for value in said["mean"])
    assert sum(said["shares"]) == pytest.approx(1)
    assert all(share * 20 == pytest.approx(round(share * 20)) for share in said["shares"])
    assert statistics(patients(1, 19)) == WITHHELD


def test_statistics_of_any_site_can_be_announced():
    huge = with_inputs(patients(0), lambda x: 1e30 * x)
    constant = with_inputs(patients(0), torch.zeros_like)
    numbers = Samples.of((np.ones((30, 2)), np.ones(30)), "numbers")
    for samples in (patients(0), huge, constant, numbers, images([0.5, 0.5])):
        said = statistics(samples)
        assert all(holds(said[what]) for what, holds in KINDS["statistics"].items())
    assert compared([constant, constant, patients(0)]) == {}  # nothing to compare with


def test_statistics_that_a_member_made_up_do_not_break_the_comparison():
    honest = {str(k): statistics(patients(k)) for k in range(3)}
    for lie in (
        WITHHELD | {"mean": [1.0]},
        WITHHELD | {"mean": [1.0] * 4, "spread": [0.0] * 4},
        honest["0"] | {"relation": [1.0]},
        honest["0"] | {"shares": [1.0] * 100},
        {"mean": [2.0**53] * 4, "spread": [-1.0] * 4, "shares": [], "relation": [0.0] * 4},
    ):
        assert unusual(honest | {"liar": lie}, NAMES).keys() <= {"liar"}
