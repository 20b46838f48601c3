"""Runs with parts that stay at their site: results, folders, checkpoints, replicas, hosts and traffic."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fairmesh as fm
from tests.cluster.conftest import ranks_of, until
from tests.pairwise import case, some_quick
from tests.problems.test_parts import CLASSES, Small, problem, sites
from tests.refusals import refused

PARTS = fm.Parts(local=("head.*",))
TRACKED = fm.TrackedADGDA(primal_step=0.1)


def train(made: fm.Problem, algorithm=TRACKED, rounds: int = 4, **options) -> fm.Result:
    return fm.train(made, fm.Ring(), algorithm, rounds, **({"measure_every": 2, "trace": "no"} | options))


def accuracy(made: fm.Problem, state_dict: dict[str, Tensor], i: int) -> float:
    module = Small()
    module.load_state_dict(state_dict)
    samples = made.sites[i].test
    return float((module.eval()(samples.inputs).argmax(dim=1) == samples.targets).double().mean())


@pytest.mark.parametrize("policy", ["local", "shared"])
def test_sites_are_judged_with_their_own_parts_on_the_average_of_the_shared_ones(policy: str):
    made = problem(batch_norm=policy, parts=PARTS)
    result = train(made, seeds=(0, 1), placements=[[2, 0, 1]])
    found = result.final[1]["accuracy"]["sites"]
    assert found == pytest.approx(
        [accuracy(made, result.state_dict(1, site=s.name), i) for i, s in enumerate(made.sites)]
    )
    outcomes = result.outcomes()
    assert len({one.losses.sum().item() for one in outcomes.answers}) == made.n


def test_common_model_has_the_mean_of_local_parameters_and_the_statistics_of_all_samples():
    uneven = [*sites(2), sites(3, rows=24)[2]]
    made = problem(sites=uneven, batch_norm="local", parts=PARTS)
    result = train(made)
    own, common = [result.state_dict(site=site.name) for site in made.sites], result.state_dict()
    shares = torch.tensor([0.25, 0.25, 0.5])
    assert torch.allclose(common["head.bias"], sum(one["head.bias"] for one in own) / 3)
    means, variances = (torch.stack([one[f"norm.running_{w}"] for one in own]) for w in ("mean", "var"))
    mean = shares @ means
    assert torch.allclose(common["norm.running_mean"], mean)
    assert torch.allclose(common["norm.running_var"], shares @ (variances + means.square()) - mean.square(), atol=1e-5)
    assert all(torch.equal(one["stem.weight"], common["stem.weight"]) for one in own)
    assert not torch.equal(own[0]["head.bias"], own[1]["head.bias"])


def test_shared_batch_norm_judges_every_site_by_one_model():
    made = problem(batch_norm="shared")
    result = train(made)
    north, south = (result.state_dict(site=name) for name in ("north", "south"))
    assert all(torch.equal(north[name], south[name]) for name in north)
    assert torch.equal(north["norm.running_var"], result.state_dict()["norm.running_var"])


def test_only_shared_parameters_are_sent():
    sent = {}
    for policy, parts in (("shared", fm.Parts()), ("local", PARTS)):
        made = problem(batch_norm=policy, parts=parts)
        sent[policy] = train(made, fm.algorithms.DSGD(), 2, measure_every=1).final[0]["nominal_bits_total"] / (
            2 * 3 * 2 * 32
        )
    assert sent == {"shared": 67, "local": 36}  # numbers per edge and round


def test_state_dict_of_an_unknown_site_is_refused():
    result = train(problem(batch_norm="local"), rounds=1)
    with refused("nroth", "north"):
        result.state_dict(site="nroth")
    with refused("north", "shared"):
        train(problem(batch_norm="convert"), rounds=1).state_dict(site="north")


@some_quick("policy", ["local", "shared"], "local")
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(policy: str, tmp_path: Path):
    made = problem(batch_norm=policy, parts=PARTS)
    whole = train(made, fm.algorithms.DSGD(primal_step=0.1), 6, keep_best=True, out=tmp_path / "whole")
    train(made, fm.algorithms.DSGD(primal_step=0.1), 4, keep_best=True, out=tmp_path / "part")
    resumed = train(made, fm.algorithms.DSGD(primal_step=0.1), 6, keep_best=True, out=tmp_path / "part", resume=True)
    assert torch.equal(whole.own_parts(), resumed.own_parts())
    assert torch.equal(whole.own_parts("best"), resumed.own_parts("best"))
    names = {path.name for path in (tmp_path / "whole").glob("*.safetensors")}
    assert {"site-0.safetensors", "site-best-2.safetensors"} <= names
    for name in names:
        one, other = load_file(tmp_path / "whole" / name), load_file(tmp_path / "part" / name)
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_folder_has_a_model_per_site(tmp_path: Path):
    made = problem(batch_norm="local")
    result = train(made, out=tmp_path)
    for i, site in enumerate(made.sites):
        state, wanted = load_file(tmp_path / f"site-{i}.safetensors"), result.state_dict(site=site.name)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    train(problem(batch_norm="shared"), out=tmp_path / "shared")
    assert not list((tmp_path / "shared").glob("site-*"))


def test_replicas_give_what_each_gives_alone():
    made = problem(batch_norm="local", parts=PARTS)
    both = train(made, seeds=(0, 5), dtype="float64")
    alone = train(made, seeds=(5,), dtype="float64")
    assert torch.allclose(both.own_parts()[1], alone.own_parts()[0], rtol=0, atol=1e-10)
    assert both.final[1]["accuracy"] == alone.final[0]["accuracy"]


def test_sites_without_the_server_s_model_do_not_train_their_own_part():
    made = problem(batch_norm="local", parts=PARTS)
    result = train(made, fm.algorithms.FedAvg(participation=0.4, local_steps=2), 1)
    assert result.state.own.steps[0, :, 0].tolist().count(0.0) == 2
    assert result.state.own.steps.sum() == 2


@some_quick(
    "algorithm",
    {"default": None, "afl": fm.algorithms.AFL(), "drfa": fm.algorithms.DRFA(), "local": fm.algorithms.Local()},
    "drfa",
)
def test_algorithms_train_with_own_parts(algorithm):
    result = train(problem(batch_norm="local", parts=PARTS, sites=sites(4, rows=30)), algorithm, 3)
    assert not torch.equal(result.own_parts()[0, 0], result.own_parts()[0, 1])
    assert torch.isfinite(result.own_parts()).all()


@pytest.mark.slow
def test_site_that_is_left_out_is_judged_by_the_common_model():
    made = problem(batch_norm="shared", parts=PARTS)
    left_out = fm.leave_one_site_out(made, algorithm=fm.algorithms.DSGD(primal_step=0.1), rounds=2)
    expected = accuracy(made, left_out.result.state_dict(0), 0)  # replica 0 has all but site 0
    assert left_out.values["accuracy"][0][0] == pytest.approx(expected)


def test_personalization_is_refused():
    made = problem(batch_norm="local")
    for attempt in (
        lambda: fm.train(made, rounds=1, personalization=fm.personalization.Mixture()),
        lambda: fm.personalize(train(made, rounds=1)),
    ):
        with refused("stay at their sites", "frozen"):
            attempt()


def test_choice_is_announced():
    said: list[str] = []
    train(problem(batch_norm="local", parts=PARTS), rounds=1, announce=said.append)
    assert sum("local" in one and "never sent" in one and "36 shared" in one for one in said) == 1


def experiment_in(folder: Path, policy: str) -> Path:
    (folder / "model.py").write_text(
        "import torch\n\ndef build():\n    n = torch.nn\n    return n.Sequential(n.Flatten(), "
        "n.Linear(64, 8, bias=False), n.BatchNorm1d(8), n.ReLU(), n.Linear(8, 10))\n"
    )
    path = folder / "experiment.toml"
    path.write_text(
        f'rounds = 2\nbatch_norm = "{policy}"\nparts = {{ local = ["4.*"] }}\ndata = {{ name = "digits", nodes = 4 }}\n'
        'topology = "ring"\nalgorithm = "dsgd"\nmodel = { name = "import", path = "model.py:build" }\n'
    )
    return path


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["local", "shared"])
def test_two_processes_give_what_one_gives(policy: str, tmp_path: Path):
    path = experiment_in(tmp_path, policy)
    result = fm.run(fm.load_experiment(path))
    command = [
        sys.executable,
        "-m",
        "fairmesh",
        "launch",
        "--processes",
        "2",
        str(path),
        "--out",
        str(tmp_path / "run"),
    ]
    subprocess.run(command, check=True, timeout=200, capture_output=True)
    for i, site in enumerate(result.problem.sites):
        found, wanted = load_file(tmp_path / "run" / f"site-{i}.safetensors"), result.state_dict(site=site.name)
        assert all(torch.allclose(found[name], wanted[name], atol=1e-6) for name in wanted)


@pytest.mark.slow
def test_killed_rank_is_started_again_and_own_parts_end_bit_for_bit_where_they_would_have(tmp_path: Path):
    path = experiment_in(tmp_path, "local")
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 400") + "options.checkpoint_every = 20\n")
    command = [sys.executable, "-m", "fairmesh", "launch", "--processes", "2", str(path), "--out"]
    for name in ("calm", "killed"):
        run, pipe = tmp_path / name, subprocess.PIPE
        process = subprocess.Popen([*command, str(run)], stdout=pipe, stderr=pipe, text=True)
        try:
            if name == "killed":
                until(lambda run=run: (run / "checkpoint.safetensors").exists(), process)
                os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
            _, said = process.communicate(timeout=200)
        finally:
            process.terminate()
        assert process.returncode == 0, said
    for file in (tmp_path / "calm").glob("*.safetensors"):
        if not file.name.startswith("checkpoint"):
            assert file.read_bytes() == (tmp_path / "killed" / file.name).read_bytes(), file.name
    assert len(list((tmp_path / "killed").glob("site-*.safetensors"))) == 4


@pytest.mark.slow
def test_trained_model_of_a_site_comes_back_from_an_experiment(tmp_path: Path):
    path = experiment_in(tmp_path, "local")
    result = fm.run(fm.load_experiment(path), out=tmp_path / "run")
    site = result.problem.sites[1].name
    model = fm.inference.load_model(tmp_path / "run", site=site)
    wanted = fm.inference.TrainedModel.of(result, site=site).module.state_dict()
    assert model.about["site"] == site
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.module.state_dict().items())
    assert not torch.equal(wanted["4.bias"], fm.inference.load_model(tmp_path / "run").module.state_dict()["4.bias"])


class Residual(nn.Module):
    """A block of ResNet."""

    def __init__(self, channels: int, to: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, to, 3, 2, 1, bias=False), nn.BatchNorm2d(to)
        self.conv2, self.bn2 = nn.Conv2d(to, to, 3, 1, 1, bias=False), nn.BatchNorm2d(to)
        self.downsample = nn.Sequential(nn.Conv2d(channels, to, 1, 2, bias=False), nn.BatchNorm2d(to))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.bn2(self.conv2(self.bn1(self.conv1(inputs)).relu()))
        return (hidden + self.downsample(inputs)).relu()


class Inverted(nn.Module):
    """A block of MobileNet with a depthwise convolution."""

    def __init__(self, channels: int):
        super().__init__()
        wide = 2 * channels
        self.block = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
            nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.block(inputs)


def network(kind: str) -> nn.Module:
    blocks = [Residual(6, 8)] if kind == "resnet" else [Inverted(6), Inverted(6)]
    stem = [nn.Conv2d(1, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 if kind == "resnet" else 6, 3)
    )


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        case(kind, policy, quick=(kind, policy) in (("resnet", "local"), ("mobilenet", "shared")))
        for kind in ("resnet", "mobilenet")
        for policy in ("frozen", "local", "shared", "convert")
    ],
)
def test_small_resnet_and_mobilenet_learn_under_each_policy(kind: str, policy: str):
    torch.manual_seed(0)
    labels = torch.arange(18) % CLASSES
    data = [(labels[:, None, None, None] + 0.2 * torch.randn(18, 1, 4, 4), labels) for _ in range(2)]
    made = fm.Problem(network(kind), data, sampling=fm.Sampling(batch=9), batch_norm=policy, parts=fm.Parts(step=0.01))
    result = train(made, fm.TrackedADGDA(primal_step=0.2), 25, measure_every=25)
    before, after = (record["loss"]["mean"] for record in result.records)
    assert after < 0.8 * before
