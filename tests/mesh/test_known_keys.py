"""A site's key is recorded when it is first seen; another one needs a person's confirmation and retires the first."""

import pytest

from fairmesh.errors import BadInput
from fairmesh.mesh.enrol.certificates import fingerprint, make_authority, make_key, sign
from fairmesh.mesh.enrol.keys import KnownKeys, trust
from tests.refusals import missing_from, refused


@pytest.fixture
def certificates(tmp_path, mesh):
    """Two certificates of alpha's first key, and one of its second."""
    make_authority(tmp_path, mesh.name, 30)
    key, request = make_key(tmp_path, "alpha")
    first = [sign(request.read_bytes(), tmp_path, mesh, 20) for _ in range(2)]
    key.unlink()
    _, request = make_key(tmp_path, "alpha")
    return *first, sign(request.read_bytes(), tmp_path, mesh, 20)


@pytest.fixture
def state(tmp_path):
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def known(state, events=None):
    return KnownKeys(state, lambda level, what, **fields: None if events is None else events.append((what, fields)))


def test_new_certificate_of_the_same_key_is_accepted_and_logged_once(state, certificates):
    events, (first, renewed, _) = [], certificates
    keys = known(state, events)
    assert [keys.refusal("alpha", one) for one in (first, first, renewed, renewed)] == [""] * 4
    ((what, fields),) = events
    assert "same key" in what
    assert fields == {"site": "alpha", "fingerprint": fingerprint(renewed)}


def test_new_key_is_refused_with_its_fingerprint_until_it_is_confirmed_also_after_a_restart(state, certificates):
    first, _, other = certificates
    events = []
    assert known(state).refusal("alpha", first) == ""
    for keys in (known(state, events), known(state)):
        reason = keys.refusal("alpha", other)
        assert missing_from(reason, "alpha", fingerprint(other), "mesh trust") == []
        assert keys.refusal("alpha", other) == reason
        assert keys.view() == {"alpha": {"fingerprint": fingerprint(first), "unconfirmed": fingerprint(other)}}
        assert keys.refusal("alpha", first) == ""
    assert len(events) == 1


def test_confirmed_key_retires_the_old_one_for_good(state, certificates):
    first, _, other = certificates
    keys = known(state)
    keys.refusal("alpha", first)
    trust(state, "alpha", fingerprint(first))
    assert keys.refusal("alpha", other) != ""
    assert trust(state, "alpha", fingerprint(other).replace(" ", "").upper()) == fingerprint(other)
    assert keys.refusal("alpha", other) == ""
    assert "replaced" in (keys.refusal("alpha", first) or "")
    assert "replaced" in (known(state).refusal("alpha", first) or "")
    trust(state, "alpha", fingerprint(first))  # a slip of the hand does not bring a stolen key back
    assert "replaced" in (known(state).refusal("alpha", first) or "")
    assert known(state).refusal("alpha", other) == ""


@pytest.mark.parametrize("text", ["", "abcd", "xyz" * 8, "ab" * 32])
def test_what_is_no_fingerprint_is_refused(state, text):
    with refused("fingerprint", "24", error=BadInput):
        trust(state, "alpha", text)


def test_damaged_record_is_refused_by_its_name_instead_of_trusting_anybody(state):
    (state / "keys.json").write_text("[")
    with refused("keys.json", "backup", error=BadInput):
        known(state)
