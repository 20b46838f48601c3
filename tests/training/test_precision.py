"""How gradients are computed: in full, in TF32 or in bfloat16."""

import pytest
import torch

import fairmesh as fm
from fairmesh.numerics.tracing import Opaque, recorded
from tests import toys
from tests.refusals import refused


@pytest.mark.parametrize("at_once", ["all", 1])
def test_bf16_rounds_gradients_and_nothing_else(at_once):
    problem = toys.problem(models_at_once=at_once)
    exact, short = (
        fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), rounds=5, precision=precision)
        for precision in ("float32", "bf16")
    )
    models = [result.state.algorithm.models for result in (exact, short)]
    assert [one.dtype for one in models] == [torch.float32] * 2
    apart = float((models[0] - models[1]).norm() / models[0].norm())
    assert 1e-6 < apart < 2e-2
    assert not torch.equal(models[1], models[1].bfloat16().float())


def test_precision_is_part_of_a_runs_identity(tmp_path):
    problem = toys.problem()
    fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), rounds=2, out=tmp_path / "run", precision="bf16")
    with refused("precision", error=fm.errors.CheckpointError):
        fm.train(problem, fm.Ring(), fm.algorithms.DSGD(0.1), rounds=3, out=tmp_path / "run", resume=True)


def test_options_refuse_a_precision_that_cannot_be():
    with refused("tf32", "device"):
        fm.Options(precision="tf32")
    with refused("bf16", "float64"):
        fm.Options(precision="bf16", dtype="float64")


def test_opaque_function_is_one_operation_of_a_trace_and_may_differentiate():
    def gradients(rows: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = rows.detach().requires_grad_()
        with torch.enable_grad():
            values = (leaf * factors).sum(dim=-1).square()
            values.sum().backward()
        return leaf.grad, values.detach()

    opaque, rows, factors = Opaque(gradients), torch.randn(3, 4), torch.randn(3, 4)

    def step(rows: torch.Tensor, factors: torch.Tensor) -> list[torch.Tensor]:
        slopes, values = opaque(rows, factors)
        return [rows - 0.1 * slopes, values]

    with torch.no_grad():
        trace = recorded(step, rows, factors)
        others = torch.randn(3, 4)
        assert [str(node.target) for node in trace.graph.nodes].count("fairmesh.opaque.default") == 1
        for mine, theirs in zip(trace(others, factors), step(others, factors)):
            assert torch.equal(mine, theirs)
