"""Somebody at the door of a node: streams and handshakes as no honest neighbour makes them, each in a process of its
own, so that the one that forks the nodes never has gRPC running."""

import json
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fairmesh.experiment import load_experiment
from fairmesh.mesh.agreement import greeting
from fairmesh.mesh.certificates import make_authority, make_key, sign
from fairmesh.mesh.members import Member, Mesh, host_and_port
from fairmesh.mesh.wire import frames
from tests.mesh.fleet import ended, forked

Frames = Callable[[int], Sequence[bytes]]  # what to send, given the step that is due


def apart(folder: Path, work: Callable[[], Any], seconds: float = 30) -> Any:
    """What some work gives, done in another process; it must be JSON."""
    answer = folder / "answer.json"
    for before in (answer, folder / "stranger.log"):
        before.unlink(missing_ok=True)
    process = forked(lambda: answer.write_text(json.dumps(work())) and None, folder / "stranger.log")
    assert ended(process, seconds) == 0, (folder / "stranger.log").read_text()
    return json.loads(answer.read_text())


def certified(folder: Path, name: str, founder: Path, days: float = 30) -> Path:
    """A folder with a key, a certificate for it by an authority, and the authority's."""
    mesh = Mesh.read(founder / "mesh.toml")
    known = (
        mesh
        if name in mesh.names
        else Mesh(mesh.name, mesh.experiment, (Member(name, None, ("x",)), Member("x", "x:1", (name,))))
    )
    folder.mkdir()
    _, request = make_key(folder, name)
    (folder / f"{name}.pem").write_bytes(sign(request.read_bytes(), founder, known, days))
    (folder / "authority.pem").write_bytes((founder / "authority.pem").read_bytes())
    return folder


def foreign(folder: Path, name: str, founder: Path) -> Path:
    """The same, by another authority of the same name."""
    other = folder.with_name(folder.name + "-authority")
    other.mkdir()
    make_authority(other, Mesh.read(founder / "mesh.toml").name, 30)
    (other / "mesh.toml").write_bytes((founder / "mesh.toml").read_bytes())
    return certified(folder, name, other)


def hello_of(home: Path, **changes: Any) -> dict[str, Any]:
    """The greeting of a site, or nearly."""
    mesh = Mesh.read(home / "mesh.toml")
    table = greeting(home.name, load_experiment(home / "experiment.toml"), mesh)
    due = changes.pop("due", 0)
    fields = changes.pop("agreed", {})
    return table | {"agreed": table["agreed"] | fields, "holds": [0, due], "clock": time.time()} | changes


def spoken(credentials: Path, name: str, address: str, whom: str, say: Frames, streams: int = 1) -> dict[str, Any]:
    """Opens a stream with a certificate, or several and speaks on the last: how it ended, and what came."""
    from fairmesh.mesh.wire.channels import METHOD, grpc

    files = ("authority.pem", f"{name}.key", f"{name}.pem")
    given = grpc.ssl_channel_credentials(*((credentials / file).read_bytes() for file in files))
    came: list[bytes] = []
    with ExitStack() as opened:

        def stream(requests) -> Any:
            options = [("grpc.ssl_target_name_override", whom), ("grpc.max_send_message_length", -1)]
            options.append(("grpc.use_local_subchannel_pool", 1))
            channel = opened.enter_context(grpc.secure_channel(address, given, options=options))
            return channel.stream_stream(METHOD)(requests, timeout=15)

        silent = [stream(_silent()) for _ in range(streams - 1)]
        for one in silent:
            next(one)

        def requests():
            while not came:
                time.sleep(0.005)
            yield from say(frames.read_hello(came[0])["holds"][1])
            yield from _silent()

        try:
            for frame in stream(requests()):
                came.append(frame)  # noqa: PERF402  (requests() looks at it)
        except grpc.RpcError as error:
            told = [frames.read_frame(frame).reason() for frame in came[1:] if frame[0] == frames.Kind.REFUSED]
            return {"code": error.code().name, "details": error.details(), "told": told, "frames": len(came)}
    return {"code": "OK", "details": "", "told": [], "frames": len(came)}


def _silent():
    while True:
        time.sleep(0.05)
        if False:
            yield b""


def handshaken(address: str, credentials: Path | None = None, name: str = "", tls_1_2: bool = False) -> bytes:
    """What a server says after a handshake of TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if credentials:
        context.load_cert_chain(credentials / f"{name}.pem", credentials / f"{name}.key")
    if tls_1_2:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(host_and_port(address, "it"), timeout=5) as plain:
        try:
            with context.wrap_socket(plain) as secured:
                return secured.recv(1)
        except (ssl.SSLError, ConnectionError):
            return b""
