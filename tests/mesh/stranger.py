"""Somebody at the door of a node: streams and handshakes as no honest neighbour makes them, written without the
package's own connections. Some are made in a process of their own, so that a node can be measured beside them."""

import asyncio
import json
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fairmesh.experiment import load_experiment
from fairmesh.mesh.enrol.agreement import agreed
from fairmesh.mesh.enrol.certificates import make_authority, make_key, sign
from fairmesh.mesh.enrol.roster import Member, Mesh, host_and_port
from fairmesh.mesh.wire import frames
from fairmesh.mesh.wire.greeting import greeting
from tests.mesh.fleet import ended, forked

Frames = Callable[[int], Sequence[bytes]]  # what to send, given the step that is due


def apart(folder: Path, work: Callable[[], Any], seconds: float = 30) -> Any:
    """Does some work in another process and returns its result, which must be JSON."""
    answer = folder / "answer.json"
    for before in (answer, folder / "stranger.log"):
        before.unlink(missing_ok=True)
    process = forked(lambda: answer.write_text(json.dumps(work())) and None, folder / "stranger.log")
    assert ended(process, seconds) == 0, (folder / "stranger.log").read_text()
    return json.loads(answer.read_text())


def certified(folder: Path, name: str, founder: Path, days: float = 30) -> Path:
    """Makes a folder with a key, its certificate, and the certificate of the authority that signed it."""
    mesh = Mesh.read(founder / "mesh.toml")
    known = mesh if name in mesh.names else Mesh(mesh.name, (Member(name, "", ("x",)), Member("x", "x:1", (name,))))
    folder.mkdir()
    _, request = make_key(folder, name)
    (folder / f"{name}.pem").write_bytes(sign(request.read_bytes(), founder, known, days))
    (folder / "authority.pem").write_bytes((founder / "authority.pem").read_bytes())
    return folder


def foreign(folder: Path, name: str, founder: Path) -> Path:
    """Does the same with another authority that has the same name."""
    other = folder.with_name(folder.name + "-authority")
    other.mkdir()
    make_authority(other, Mesh.read(founder / "mesh.toml").name, 30)
    (other / "mesh.toml").write_bytes((founder / "mesh.toml").read_bytes())
    return certified(folder, name, other)


def hello_of(home: Path, **changes: Any) -> dict[str, Any]:
    """Returns the greeting of a site, with changes."""
    mesh = Mesh.read(home / "mesh.toml")
    files = json.loads((home / "manifest.json").read_text())["files"]
    table = greeting(home.name, agreed(load_experiment(home / "experiment.toml")), mesh, files)
    due = changes.pop("due", 0)
    fields = changes.pop("agreed", {})
    return table | {"agreed": table["agreed"] | fields, "holds": [0, due], "clock": time.time()} | changes


def spoken(credentials: Path, name: str, address: str, whom: str, say: Frames, streams: int = 1) -> dict[str, Any]:
    """Opens a stream with a certificate, or several and speaks on the last: the reasons for which it was refused, and
    how many frames came."""
    context = ssl.create_default_context(cafile=credentials / "authority.pem")
    context.load_cert_chain(credentials / f"{name}.pem", credentials / f"{name}.key")
    return asyncio.run(asyncio.wait_for(_spoken(context, host_and_port(address, "it"), whom, say, streams), 15))


async def _spoken(context: ssl.SSLContext, where: tuple[str, int], whom: str, say: Frames, streams: int) -> dict:
    opened = []
    for _ in range(streams):
        opened.append(await asyncio.open_connection(*where, ssl=context, server_hostname=whom))
        if len(opened) < streams:
            await _frame(opened[-1][0])
    reader, writer = opened[-1]
    came, sending = [], None
    while frame := await _frame(reader):
        came.append(frame)
        if sending is None and frame[0] == frames.Kind.HELLO:
            said = say(frames.read_hello(frame)["holds"][1])
            sending = asyncio.create_task(_send(writer, said))
    for _, one in opened:
        one.transport.abort()
    if sending:
        await asyncio.gather(sending, return_exceptions=True)
    told = [frames.read_frame(frame).reason() for frame in came if frame[0] == frames.Kind.REFUSED]
    return {"told": told, "frames": len(came)}


async def _send(writer: asyncio.StreamWriter, said: Sequence[bytes]) -> None:
    for frame in said:
        writer.write(struct.pack("<I", len(frame)) + frame)
        await writer.drain()


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Returns the next frame that is not a heartbeat, or nothing at the end."""
    try:
        while (length := struct.unpack("<I", await reader.readexactly(4))[0]) == 0xFFFFFFFF:
            pass
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def handshaken(address: str, credentials: Path | None = None, name: str = "", tls_1_2: bool = False) -> bytes:
    """Returns the first byte that a server sends after a TLS handshake, or nothing if it refuses."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
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
