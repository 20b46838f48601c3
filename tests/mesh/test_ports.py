"""Listening sockets and the processes that a node forks."""

import asyncio
import os
import signal
import socket
import ssl
import time

from fairmesh.mesh.node.watching import Monitor
from fairmesh.mesh.wire import connections
from fairmesh.mesh.wire.connections import Listener, keep_from_forks
from tests.mesh.fleet import free_ports


def test_port_is_free_again_although_a_forked_process_lives_on():
    listening = socket.create_server(("127.0.0.1", 0))
    address = listening.getsockname()
    keep_from_forks([listening])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"forked")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reading, 6) == b"forked"
        listening.close()
        socket.create_server(address).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_listeners_and_monitors_keep_their_ports_from_forks():
    async def held_while_listening(port: int) -> set[int]:
        listener = Listener(ssl.create_default_context(), 1, lambda connection: asyncio.sleep(0), lambda *told: None)
        await listener.start(f"127.0.0.1:{port}")
        found = _held()
        await listener.close()
        return found

    listening, watched = free_ports(2)
    assert listening in asyncio.run(held_while_listening(listening))
    Monitor(watched)
    assert watched in _held()
    assert listening not in _held()  # closed


def _held() -> set[int]:
    """The ports that forks let go."""
    found = set()
    for one in connections._listening:
        if one.fileno() >= 0:
            with socket.socket(fileno=os.dup(one.fileno())) as copy:
                found.add(copy.getsockname()[1])
    return found


def test_closed_sockets_are_forgotten_and_their_numbers_left_alone_in_forks(tmp_path):
    listening = socket.create_server(("127.0.0.1", 0))
    number = listening.fileno()
    keep_from_forks([listening])
    listening.close()
    opened = os.open(tmp_path / "file", os.O_CREAT | os.O_WRONLY)
    os.dup2(opened, number)  # often the same, since the lowest free number is taken
    child = os.fork()
    if child == 0:
        os.write(number, b"written")
        os._exit(0)
    os.waitpid(child, 0)
    for one in {opened, number}:
        os.close(one)
    assert (tmp_path / "file").read_text() == "written"
