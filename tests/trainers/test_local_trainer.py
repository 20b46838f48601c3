"""Training code of the user's own as the local work of every node, in simulations."""

import dataclasses
import datetime
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fairmesh as fm
from fairmesh.errors import TrainerFailed
from fairmesh.networks import process_group
from fairmesh.problems.local_work import Activity
from fairmesh.problems.row_loss import as_floats
from fairmesh.storage import finished_work
from fairmesh.training import long_work
from fairmesh.training.long_work import LongWorkNotices
from tests.refusals import missing_from, refused

UNSCALED = {"primal_step": 1.0, "beta1": 0.0, "beta2": 0.0}


def sites(count: int = 3, rows: int = 24) -> list[fm.Site]:
    draw = torch.Generator().manual_seed(5)
    found = []
    for i in range(count):
        labels = torch.arange(rows + 4 * i) % 3
        inputs = torch.randn(len(labels), 4, generator=draw) + labels[:, None] * (2 + 0.3 * i)
        found.append(fm.Site((inputs, labels), test=(inputs, labels), name=f"site-{'abcdefgh'[i]}"))
    return found


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def problem_of(trainer=None, model=None, **fields) -> fm.Problem:
    fields = {"sampling": fm.Sampling(batch=6)} | fields
    return fm.Problem(model or network(), sites(), trainer=trainer, **fields).prepared


def sgd_step(eta: float):
    """One plain step on the batch that fairmesh would use."""

    def step(module, data, ctx):
        inputs, targets = ctx.batch()
        loss = cross_entropy(module(inputs), targets)
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= eta * parameter.grad
        return loss

    return step


def adamw(module, data, ctx):
    """An epoch of AdamW whose state stays at the site."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.02)
    if ctx.state:
        optimizer.load_state_dict(ctx.state["optimizer"])
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    ctx.state["optimizer"] = optimizer.state_dict()
    ctx.state["rounds"] = ctx.state.get("rounds", 0) + 1


def same(a: fm.Result, b: fm.Result, atol: float) -> None:
    for name, tensor in a.state_dict().items():
        assert torch.allclose(tensor.double(), b.state_dict()[name].double(), rtol=0, atol=atol), name


PAIRS = {  # the algorithm that takes updates, and the one that takes gradients with the step 0.3
    "ad-gda": (
        fm.ADGDA(3.0, compressor=fm.compressors.Quantize(4)),
        fm.ADGDA(0.9, compressor=fm.compressors.Quantize(4)),
    ),
    "tracked-ad-gda": (
        fm.TrackedADGDA(**UNSCALED, compressor=fm.compressors.Identity()),
        fm.TrackedADGDA(**(UNSCALED | {"primal_step": 0.3}), compressor=fm.compressors.Identity()),
    ),
    "choco-sgd": (fm.ChocoSGD(1.0), fm.ChocoSGD(0.3)),
    "dsgd": (fm.algorithms.DSGD(1.0), fm.algorithms.DSGD(0.3)),
    "dr-dsgd": (fm.algorithms.DRDSGD(1.0, 6.0), fm.algorithms.DRDSGD(0.3, 6.0)),
    "afl": (fm.algorithms.AFL(1.0), fm.algorithms.AFL(0.3)),
    "fed-avg": (
        fm.algorithms.FedAvg(local_steps=1, **UNSCALED),
        fm.algorithms.FedAvg(local_steps=1, **(UNSCALED | {"primal_step": 0.3})),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_one_plain_step_equals_the_batched_oracle(name: str):
    updates, gradients = PAIRS[name]
    options = {"rounds": 8, "seeds": (0, 3), "dtype": "float64"}
    mine = fm.train(problem_of(sgd_step(0.3)), fm.Ring(), updates, **options)
    theirs = fm.train(problem_of(), fm.Ring(), gradients, **options)
    for r in range(2):
        for key, tensor in mine.state_dict(r).items():
            assert torch.allclose(tensor, theirs.state_dict(r)[key], rtol=0, atol=1e-6), key  # stored as float32
    whole, other = (one.state.algorithm.models for one in (mine, theirs))
    assert (whole - other).abs().max() < 1e-12
    if name == "tracked-ad-gda":
        assert torch.allclose(mine.weights(), theirs.weights(), rtol=0, atol=1e-12)


def test_loss_is_measured_as_the_batched_oracle_does_if_the_function_returns_none():
    def silent(module, data, ctx):
        sgd_step(0.3)(module, data, ctx)

    runs = [
        fm.train(problem_of(step), fm.Ring(), fm.TrackedADGDA(**UNSCALED), rounds=5, dtype="float64")
        for step in (sgd_step(0.3), silent)
    ]
    assert torch.allclose(runs[0].weights(), runs[1].weights(), rtol=0, atol=1e-12)


def test_full_batches_of_unequal_sites_are_not_padded_for_the_function():
    lengths = set()

    def look(module, data, ctx):
        lengths.add((len(ctx.batch()[0]), len(data)))
        return sgd_step(0.3)(module, data, ctx)

    problem = problem_of(look, sampling=fm.Sampling(order="full"))
    plain = problem_of(sampling=fm.Sampling(order="full"))
    mine = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(1.0), rounds=3, dtype="float64").state.algorithm.models
    theirs = fm.train(plain, fm.Ring(), fm.algorithms.DSGD(0.3), rounds=3, dtype="float64").state.algorithm.models
    assert lengths == {(24, 24), (28, 28), (32, 32)}
    assert (mine - theirs).abs().max() < 1e-12


def test_local_epochs_of_adamw_learn_with_the_default_algorithm():
    result = fm.train(problem_of(fm.trainers.LocalTrainer(adamw)), rounds=20, measure_every=20)
    assert result.worst > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_modules_train_as_others_do(how: str):
    def compiled(module, data, ctx):
        if how == "in place":
            module.compile(backend="aot_eager")
            return sgd_step(0.3)(module, data, ctx)
        return sgd_step(0.3)(torch.compile(module, backend="aot_eager"), data, ctx)

    one, other = (fm.train(problem_of(train), rounds=2, dtype="float64") for train in (compiled, sgd_step(0.3)))
    assert (one.state.algorithm.models - other.state.algorithm.models).abs().max() < 1e-12


@pytest.mark.parametrize(("algorithm", "told"), [(fm.ChocoSGD(), True), (fm.ADGDA(3.0), False), (None, False)])
def test_default_steps_for_gradients_are_told_before_the_first_round(algorithm, told):
    said = []
    fm.train(problem_of(sgd_step(0.3)), fm.Ring(), algorithm, rounds=1, announce=said.append)
    assert any(missing_from(line, "primal_step", "gradients", "updates") == [] for line in said) == told


def test_context_is_seeded_by_round_site_and_seed_and_generators_are_left_alone():
    seen = {}

    def look(module, data, ctx):
        drawn = float(torch.rand(()))
        assert torch.rand((), generator=ctx.generator()) is not None
        seen.setdefault((ctx.seed, ctx.round, ctx.site), []).append(drawn)
        return sgd_step(0.1)(module, data, ctx)

    torch.manual_seed(11)
    before = torch.get_rng_state()
    for _ in range(2):
        fm.train(problem_of(look, model=network()), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=2, seeds=(0, 1))
        torch.manual_seed(11)
    assert torch.equal(before, torch.get_rng_state())
    assert len(seen) == 2 * 2 * 3
    assert len({seed for seed, _, _ in seen}) == 12
    assert all(len(drawn) == 2 and len(set(drawn)) == 1 for drawn in seen.values())


def test_a_replica_gives_what_it_gives_alone():
    both = fm.train(problem_of(adamw), fm.Ring(), fm.ChocoSGD(1.0), rounds=3, seeds=(0, 4))
    alone = fm.train(problem_of(adamw), fm.Ring(), fm.ChocoSGD(1.0), rounds=3, seeds=(4,))
    assert torch.equal(both.state.algorithm.models[1], alone.state.algorithm.models[0])


def test_state_at_the_site_is_in_the_checkpoint(tmp_path: Path):
    algorithm = fm.ADGDA(3.0, compressor=fm.compressors.Quantize(4))
    whole = fm.train(problem_of(adamw), fm.Ring(), algorithm, rounds=6)
    fm.train(problem_of(adamw), fm.Ring(), algorithm, rounds=3, out=tmp_path)
    resumed = fm.train(problem_of(adamw), fm.Ring(), algorithm, rounds=6, out=tmp_path, resume=True)
    assert torch.equal(whole.state.algorithm.models, resumed.state.algorithm.models)


def test_function_sees_held_out_rows_never():
    lengths = set()

    def look(module, data, ctx):
        lengths.add(len(data) if ctx.round == 0 else None)  # at the end all rows are trained on
        return sgd_step(0.1)(module, data, ctx)

    problem = problem_of(look, objective=fm.Objective(judged_on="held-out", share=0.25))
    fm.train(problem, fm.Ring(), fm.TrackedADGDA(**UNSCALED), rounds=2)
    assert lengths == {18, 21, 24, None}


def test_site_data_is_what_the_model_sees():
    pixels = torch.randint(0, 256, (12, 4), dtype=torch.uint8)
    samples = fm.data.Samples.of((pixels, torch.arange(12) % 3), "pixels")
    data = fm.trainers.SiteData(samples, lambda tree: as_floats(tree, torch.float64))
    assert data.inputs.dtype == torch.float64
    assert float(data.inputs.max()) <= 1.0
    assert torch.equal(data[2][0], data.inputs[2])
    assert data[2][1].dtype == torch.int64
    assert len(list(data)) == 12


def test_streamed_data_is_read_by_a_data_loader():
    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, k):
            return torch.full((4,), float(k % 3)) + 0.1 * torch.randn(4), k % 3

    seen = []

    def train(module, data, ctx):
        seen.append(data[0][0])
        with refused("DataLoader"):
            _ = data.inputs
        return sgd_step(0.1)(module, data, ctx)

    streamed = [fm.Site(fm.data.Streamed(Items(), workers=0)) for _ in range(2)]
    problem = fm.Problem(network(), streamed, trainer=train, sampling=fm.Sampling(batch=4))
    fm.train(problem, fm.Ring(), fm.algorithms.DSGD(1.0), rounds=2)
    assert len({tuple(item.tolist()) for item in seen}) == 4  # random transforms are drawn again


def test_frozen_and_local_parts_and_statistics_stay():
    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))

    problem = problem_of(adamw, model=model(), parts=fm.Parts(frozen=("0.*",), local=("4.*",)), batch_norm="local")
    result = fm.train(problem, fm.Ring(), fm.algorithms.DSGD(1.0), rounds=3)
    own = result.state.own.rows[0]
    assert own.shape == (3, problem.flat_model.own_dim)
    assert (own[0] - own[1]).abs().max() > 0.01
    assert (own - problem.initial_whole_row(0)[problem.flat_model.dim :]).abs().max() > 0.01
    assert torch.equal(result.state_dict()["0.weight"], model()[0].weight)


def test_clients_that_sit_out_do_no_work():
    worked = []

    def note(module, data, ctx):
        worked.append((ctx.round, ctx.site))
        return sgd_step(0.1)(module, data, ctx)

    algorithm = fm.algorithms.FedAvg(local_steps=1, participation=0.34, **UNSCALED)
    fm.train(problem_of(note), fm.Ring(), algorithm, rounds=4)
    assert [round for round, _ in worked] == [0, 1, 2, 3]


def test_clip_norm_bounds_the_update():
    result = fm.train(
        problem_of(sgd_step(5.0), clip_norm=0.01), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=1, dtype="float64"
    )
    moved = result.state.algorithm.models[0] - problem_of().initial_row(0)
    assert 0.005 < float(moved.norm(dim=-1).max()) < 0.012


# Bad input ------------------------------------------------------------------------------------------------------------


def raising(module, data, ctx):
    raise ZeroDivisionError("boom")


def leaving(module, data, ctx):
    raise SystemExit("usage: train.py [--epochs N]")


def nan_weights(module, data, ctx):
    with torch.no_grad():
        module[0].weight.fill_(float("nan"))


def nan_loss(module, data, ctx):
    adamw(module, data, ctx)
    return float("nan")


def reshaping(module, data, ctx):
    module[2] = nn.Linear(5, 4)


def wrapping(module, data, ctx):
    module[2] = nn.Sequential(module[2])


def forgetting(module, data, ctx):
    nn.Sequential(*[nn.Linear(4, 3)])


def returning_a_table(module, data, ctx):
    adamw(module, data, ctx)
    return {"loss": 1.0}


def keeping_a_function(module, data, ctx):
    adamw(module, data, ctx)
    ctx.state["hook"] = raising


def adding(module, data, ctx):
    adamw(module, data, ctx)
    module.register_parameter("extra", nn.Parameter(torch.zeros(3)))


def on_nothing(module, data, ctx):
    module.to("meta")


FAULTS = {
    raising: ("ZeroDivisionError", "boom", "test_local_trainer.py"),
    leaving: ("SystemExit", "usage"),
    nan_weights: ("0.weight", "not finite", "learning rate"),
    nan_loss: ("nan", "None"),
    reshaping: ("2.weight", "(4, 5)", "(3, 5)"),
    wrapping: ("2.weight", "in place"),
    forgetting: ("unchanged", "optimizer"),
    returning_a_table: ("dict", "None"),
    keeping_a_function: ("ctx.state", "state_dict"),
    adding: ("extra", "Problem"),
    on_nothing: ("0.weight", "no values"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_name_the_site_and_the_way_out(fault):
    def trainer(module, data, ctx):
        return (fault if ctx.site == "site-b" else adamw)(module, data, ctx)

    with refused("site-b", "round 0", *FAULTS[fault], error=TrainerFailed):
        fm.train(problem_of(trainer), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=2)


def test_training_frozen_parts_is_refused():
    def trainer(module, data, ctx):
        with torch.no_grad():
            module[0].weight += 1.0
            module[2].weight += 1.0

    with refused("site-a", "0.weight", "frozen", error=TrainerFailed):
        fm.train(problem_of(trainer, parts=fm.Parts(frozen=("0.*",))), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=1)


def test_frozen_statistics_that_change_are_refused():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

    def trainer(module, data, ctx):
        module.train()
        adamw(module, data, ctx)

    with refused("site-a", "1.running_mean", "batch_norm", error=TrainerFailed):
        fm.train(problem_of(trainer, model=model, batch_norm="frozen"), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=1)


def test_modules_left_in_evaluation_mode_or_another_dtype_are_read_all_the_same():
    def leaves(module, data, ctx):
        loss = sgd_step(0.3)(module, data, ctx)
        module.eval().double()
        return loss

    runs = [
        fm.train(problem_of(step), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=3).state.algorithm.models
        for step in (leaves, sgd_step(0.3))
    ]
    assert torch.equal(*runs)


def test_unchanged_models_are_accepted_later_or_if_asked():
    def warming_up(module, data, ctx):
        return None if ctx.round == 0 else sgd_step(0.3)(module, data, ctx)

    fm.train(
        problem_of(fm.trainers.LocalTrainer(warming_up, unchanged="accept")),
        fm.Ring(),
        fm.algorithms.DSGD(1.0),
        rounds=2,
    )
    fm.train(
        problem_of(lambda module, data, ctx: sgd_step(0.3)(module, data, ctx) if ctx.round == 0 else None),
        fm.Ring(),
        fm.algorithms.DSGD(1.0),
        rounds=2,
    )


def test_failed_run_is_resumed_without_repeating_finished_rounds(tmp_path: Path):
    worked = []

    def trainer(broken: bool):
        def train(module, data, ctx):
            if broken and ctx.round == 3 and ctx.site == "site-c":
                raise RuntimeError("out of memory")
            worked.append((ctx.round, ctx.site))
            return adamw(module, data, ctx)

        return train

    algorithm = fm.ChocoSGD(1.0)
    with refused("site-c", "round 3", "out of memory", error=TrainerFailed):
        fm.train(problem_of(trainer(True)), fm.Ring(), algorithm, rounds=5, out=tmp_path)
    mended = fm.train(problem_of(trainer(False)), fm.Ring(), algorithm, rounds=5, out=tmp_path, resume=True)
    assert sorted(worked) == [(r, site) for r in range(5) for site in ("site-a", "site-b", "site-c")]  # each once
    assert not (tmp_path / "work").exists()
    whole = fm.train(problem_of(adamw), fm.Ring(), algorithm, rounds=5)
    assert torch.equal(whole.state.algorithm.models, mended.state.algorithm.models)


def test_finished_work_is_not_used_from_another_start(tmp_path: Path):
    """Who resumes an earlier checkpoint with another function gets its work, not that of the former one."""

    def trainer(eta: float, broken: bool):
        def train(module, data, ctx):
            if broken and ctx.round == 3 and ctx.site == "site-c":
                raise RuntimeError("no memory")
            return sgd_step(eta)(module, data, ctx)

        return train

    rounds = {"rounds": 5, "checkpoint_every": 2}
    with refused("site-c", error=TrainerFailed):
        fm.train(problem_of(trainer(0.3, True)), fm.Ring(), fm.algorithms.DSGD(1.0), out=tmp_path, **rounds)
    (work,) = {path.name.split("-")[1] for path in (tmp_path / "work").iterdir()}
    assert int(work) == 3
    state, done = tmp_path / "work", tmp_path / "elsewhere"
    fm.train(problem_of(sgd_step(0.1)), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=3, out=done)
    state.rename(done / "work")
    mixed = fm.train(problem_of(sgd_step(0.1)), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=5, out=done, resume=True)
    whole = fm.train(problem_of(sgd_step(0.1)), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=5)
    assert torch.equal(mixed.state.algorithm.models, whole.state.algorithm.models)


def test_folder_of_work_that_another_process_removes_while_it_is_listed_is_empty(tmp_path: Path, monkeypatch):
    kept = finished_work.FinishedWork(tmp_path / "work")
    (tmp_path / "work").mkdir()

    def removed(self, pattern):
        (tmp_path / "work").rmdir()
        raise FileNotFoundError(self)

    with monkeypatch.context() as racing:
        racing.setattr(Path, "glob", removed)
        kept.drop_before(3)
    assert not (tmp_path / "work").exists()


def test_work_that_took_long_is_on_disk_before_the_next_node_begins(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(finished_work, "WORTH_WRITING_S", 0.0)
    seen = []

    def look(module, data, ctx):
        seen.append(len(list((tmp_path / "work").glob("work-*"))))
        return sgd_step(0.1)(module, data, ctx)

    fm.train(problem_of(look), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=2, out=tmp_path, checkpoint_every=1)
    assert seen == [0, 1, 2, 0, 1, 2]


# Work that takes long -------------------------------------------------------------------------------------------------


def test_long_work_is_told_after_a_minute_and_then_at_growing_intervals():
    told, now = [], [0.0]
    notices = LongWorkNotices(told.append, clock=lambda: now[0])
    for now[0] in range(0, 3600, 10):
        notices([Activity(7, "site-b", 100.0), None, Activity(7, "site-a", 0.0)])
    assert len(told) == 6  # after 1, 2, 4, 8, 16 and 32 minutes
    assert missing_from(told[0], "site-a", "round 7", "since", "1 min") == []
    notices([])  # a round ended
    now[0] = 3600.0
    notices([Activity(8, "site-c", 3000.0)])
    assert len(told) == 7
    assert missing_from(told[-1], "site-c", "round 8") == []


def test_run_says_for_which_site_it_waits(monkeypatch):
    monkeypatch.setattr(process_group, "_BEAT_S", 0.01)
    monkeypatch.setattr(long_work, "_FIRST_S", 0.1)
    told = []

    def slow(module, data, ctx):
        if ctx.site == "site-b":
            time.sleep(0.4)
        return sgd_step(0.1)(module, data, ctx)

    fm.train(problem_of(slow), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=1, announce=told.append)
    assert missing_from(" ".join(told), "site-b", "round 0", "since") == []
    assert missing_from(" ".join(told), "site-a", "site-c") == ["site-a", "site-c"]


REFUSED = {
    "local_steps": (fm.algorithms.FedAvg(), {}),
    "tracked local_steps": (fm.TrackedADGDA(local_steps=3), {}),
    "DRFA": (fm.algorithms.DRFA(), {}),
    "Pooled": (fm.algorithms.Pooled(), {}),
    "optimizer": (fm.algorithms.DSGD(1.0, optimizer=fm.optimizers.AdamW()), {}),
    "discount_noise": (
        fm.TrackedADGDA(),
        {"objective": fm.Objective(judged_on="held-out", share=0.3, discount_noise=True)},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_algorithms_that_cannot_take_updates_are_refused(name: str):
    algorithm, fields = REFUSED[name]
    with refused(name.split()[-1]):
        fm.train(problem_of(adamw, **fields), fm.Ring(), algorithm, rounds=2)


@pytest.mark.parametrize(
    "fields", [{"weight_decay": 0.1}, {"augment": lambda sample: sample}], ids=["weight_decay", "augment"]
)
def test_settings_of_gradients_are_refused_with_a_trainer(fields):
    with refused(next(iter(fields)), "function"):
        problem_of(adamw, **fields)


class _OfOne:
    def __call__(self, module):
        pass


@pytest.mark.parametrize("function", [lambda module, data: None, lambda module, data, ctx, more: None, _OfOne()])
def test_functions_with_other_arguments_are_refused(function):
    with refused("trainer", "(module, data, ctx)"):
        problem_of(function)


def test_state_that_cannot_be_read_again_is_refused_in_its_round():
    def trainer(module, data, ctx):
        adamw(module, data, ctx)
        if ctx.round == 1:
            ctx.state["since"] = datetime.timedelta(1)

    with refused("round 1", "ctx.state", "datetime.timedelta", error=TrainerFailed):
        fm.train(problem_of(trainer), fm.Ring(), fm.algorithms.DSGD(1.0), rounds=3)


@pytest.mark.parametrize("order", ["cyclic", "full"])
def test_data_that_a_function_changes_in_place_is_as_before_in_the_next_round(order: str):
    seen = []

    def trainer(module, data, ctx):
        inputs, targets = data[0]
        batch = ctx.batch()
        seen.append([data.inputs.clone(), data.targets.clone(), inputs.clone(), batch[0].clone()])
        adamw(module, data, ctx)
        for tensor in (data.inputs, data.targets, inputs, targets, *batch):
            tensor.mul_(0)

    sampling = fm.Sampling(batch=6, order=order)
    problem = problem_of(trainer, sampling=sampling)
    fm.train(problem, fm.Ring(), fm.algorithms.DSGD(1.0), rounds=2)
    changed = len(seen[0]) if order == "full" else 3  # a cyclic batch is another one in the next round
    assert all(torch.equal(a, b) for a, b in zip(seen[0][:changed], seen[3]))


def test_experiment_files_name_the_function(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def train(module, data, ctx):\n"
        "    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)\n"
        "    loss = torch.nn.functional.cross_entropy(module(data.inputs), data.targets)\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    return loss\n"
    )
    (tmp_path / "experiment.toml").write_text(
        'rounds = 3\ntrainer = "mine.py:train"\ndata = { name = "digits", nodes = 3 }\n'
    )
    experiment = fm.load_experiment(tmp_path / "experiment.toml")
    assert experiment.algorithm.beta2 == 0.0
    assert experiment.objective == fm.Objective()
    result = fm.run(experiment, out=tmp_path / "run")
    assert result.rounds == 3
    assert result.worst > 0.2
    assert dataclasses.replace(experiment, trainer=None).trainer is None
