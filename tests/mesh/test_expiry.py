"""A certificate that expires during a stream ends it, with a sentence at both ends."""

import time
from contextlib import ExitStack
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from fairmesh.mesh.wire import links
from fairmesh.mesh.wire.bulletin import Bulletin
from fairmesh.mesh.wire.connections import TlsCarrier
from fairmesh.mesh.wire.journal import Journal
from fairmesh.mesh.wire.links import Links, Neighbour
from fairmesh.mesh.wire.mailroom import Mailroom
from tests.mesh.credentials import signed, terms_of
from tests.mesh.fleet import free_ports


@pytest.fixture
def clock(monkeypatch):
    """The clock that streams look at, which can be set ahead."""
    ahead = SimpleNamespace(days=0.0)
    now = lambda zone: datetime.now(zone) + timedelta(days=ahead.days)  # noqa: E731
    monkeypatch.setattr(links, "datetime", SimpleNamespace(now=now))
    monkeypatch.setattr(links, "_LOOK_AT_CLOCK_S", 0.02)
    return ahead


@pytest.mark.parametrize("expires", ["alpha", "beta"])
def test_stream_ends_at_both_sites_when_one_of_the_two_certificates_expires(tmp_path, clock, expires):
    names, address = ("alpha", "beta"), f"127.0.0.1:{free_ports(1)[0]}"
    sites, logged = signed(tmp_path, names, {expires: 0.5}), {name: [] for name in names}

    def until(condition) -> None:
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, logged
            time.sleep(0.01)

    def opened(place: int) -> Links:
        name, other = names[place], names[1 - place]

        def report(level: str, what: str, **fields) -> None:
            logged[name].append((what, fields.get("reason") or ""))

        mailroom = Mailroom([1 - place], Journal(tmp_path / name), 0, lambda point, step: None)
        return Links(
            [Neighbour(other, 1 - place, "" if place else address)], sites[name],
            TlsCarrier(sites[name], address if place else ""), mailroom,
            Bulletin(name, sites[name], terms_of(names)), lambda: {"site": name}, lambda who, table: True, report, 1000,
            lambda point, step: None,
        )  # fmt: skip

    with ExitStack() as stack:
        for place in (1, 0):
            link = opened(place)
            link.start()
            stack.callback(link.stop)
        until(lambda: all("connected" in dict(events) for events in logged.values()))
        clock.days = 0.4
        time.sleep(0.1)
        assert not any("disconnected" in dict(events) for events in logged.values())
        clock.days = 0.6
        until(lambda: all("disconnected" in dict(events) for events in logged.values()))
    for name in names:
        reason = dict(reversed(logged[name]))["disconnected"]
        whose = "this site's" if name == expires else "its"
        assert reason.startswith(f"{whose} certificate has expired") or "closed the connection" in reason, reason
    assert any("has expired" in reason for events in logged.values() for _, reason in events)
