"""Random numbers from secrets: the standard's key stream, the right distributions, and nothing that repeats."""

import itertools

import pytest
import torch
from scipy import stats

from fairmesh.privacy.secret_draws import ModelDigests, SecretDraws

CPU = torch.device("cpu")
SECRETS = [bytes(range(32)), bytes(range(1, 33))]
# RFC 8439, section 2.3.2: key 00 01 ... 1f, nonce 00000009 0000004a 00000000, block 1
RFC_NONCE = bytes.fromhex("000000090000004a00000000")
RFC_BLOCK = bytes.fromhex(
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
)


def _nonces(*rows: tuple[int, int, int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_key_stream_is_chacha20_of_rfc_8439():
    draws = SecretDraws([bytes(32)], "units", CPU)
    draws._keys = [bytes(range(32))]
    words = [int.from_bytes(RFC_NONCE[k : k + 4], "little", signed=True) for k in (0, 4, 8)]
    stream = draws._words(_nonces((words[0], words[1], words[2])), 16).numpy().astype("<i8").tobytes()
    assert stream[64:] == RFC_BLOCK


def test_uniforms_and_normals_are_distributed_as_they_say():
    draws = SecretDraws(SECRETS, "noise", CPU)
    nonces = _nonces((0, 1, 2), (0, 1, 2))
    uniforms, normals = draws.uniforms(nonces, 40_000), draws.normals(nonces, 40_001)
    assert uniforms.dtype == normals.dtype == torch.float64
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    for row in uniforms:
        assert stats.kstest(row.numpy(), "uniform").pvalue > 1e-3
    for row in normals:
        assert stats.kstest(row.numpy(), "norm").pvalue > 1e-3
        assert abs(float(row.square().mean()) - 1) < 0.03  # five standard deviations
        assert abs(float(torch.corrcoef(torch.stack([row[:-1], row[1:]]))[0, 1])) < 0.025
        halves = torch.stack([row[:20_000], row[20_001:]])  # the two numbers of a pair come from one radius
        assert abs(float(torch.corrcoef(halves)[0, 1])) < 0.035
        assert abs(float(torch.corrcoef(halves.square())[0, 1])) < 0.035


def test_draws_differ_for_every_secret_purpose_and_nonce_and_repeat_otherwise():
    nonces = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (-1, 0, 0)]
    rows = {
        (secret, purpose, nonce): SecretDraws([secret], purpose, CPU).normals(_nonces(nonce), 64)
        for secret, purpose, nonce in itertools.product(SECRETS, ("units", "rows", "noise"), nonces)
    }
    every = torch.cat(list(rows.values()))
    assert len(every.flatten().unique()) == every.numel()
    for (secret, purpose, nonce), row in rows.items():
        assert torch.equal(row, SecretDraws([secret], purpose, CPU).normals(_nonces(nonce), 64))


def test_draws_of_a_node_do_not_depend_on_the_other_nodes():
    nonces = _nonces((3, 4, 5), (6, 7, 8))
    both = SecretDraws(SECRETS, "noise", CPU).uniforms(nonces, 10)
    for k, secret in enumerate(SECRETS):
        assert torch.equal(both[k : k + 1], SecretDraws([secret], "noise", CPU).uniforms(nonces[k : k + 1], 10))


def test_secret_draws_refuse_secrets_of_another_length():
    with pytest.raises(ValueError, match="32"):
        SecretDraws([bytes(16)], "noise", CPU)


@pytest.mark.parametrize("traced", [False, True], ids=["hash", "traced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_model_digests_differ_for_models_that_differ_in_one_bit(dtype, traced, monkeypatch):
    if traced:  # what a GPU computes, and a trace
        monkeypatch.setattr("fairmesh.privacy.secret_draws.values_readable", lambda _: False)
    digests = ModelDigests(SECRETS, CPU)
    rows = torch.randn(2, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    whole = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    bits = torch.iinfo(whole).bits
    found = [digests.of(rows)]
    for place, bit in itertools.product(range(5), range(bits)):
        flipped = rows.clone()
        flipped.view(whole)[:, place] ^= (-(1 << bit)) if bit == bits - 1 else 1 << bit
        found.append(digests.of(flipped))
    every = torch.cat(found)
    assert every.shape == (2 * (1 + 5 * bits), 2)
    assert every.dtype == torch.int32
    assert len(every.unique(dim=0)) == len(every)  # nor are those of two secrets equal
    assert torch.equal(found[0], ModelDigests(SECRETS, CPU).of(rows.clone()))
