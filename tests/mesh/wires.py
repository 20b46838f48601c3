"""A proxy process between the sites of a mesh, which can delay or cut the connection of any edge."""

import asyncio
import mmap
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fairmesh.mesh.enrol.roster import Mesh, host_and_port
from tests.mesh.fleet import MESH, forked, free_ports

PASS, RESET, HOLE = 0, 1, 2  # a hole swallows what is sent; a connection that lost bytes never passes any again
Edge = tuple[str, str]  # who dials whom


class Wires:
    """Runs as a process from `start` to `end`; `set` takes effect at once."""

    def __init__(self, folder: Path, mesh: Mesh, delay_s: float = 0.0):
        """Rewrites every site's mesh.toml, so that it dials its neighbours through this proxy, which passes bytes on
        after a delay, half a round trip."""
        self._delay_s = delay_s
        self._edges = list(mesh.edges)
        self._log = folder / "wires.log"
        self._ports = dict(zip(self._edges, free_ports(len(self._edges))))
        self._targets = {(a, b): host_and_port(mesh.member(b).address or "", b) for a, b in self._edges}
        self._modes = mmap.mmap(-1, len(self._edges))
        for name in mesh.names:
            members = [
                replace(m, address=f"127.0.0.1:{self._ports[name, m.name]}") if (name, m.name) in self._ports else m
                for m in mesh.members
            ]
            replace(mesh, members=tuple(members)).write(folder / name / MESH)
        self._process = 0

    def set(self, mode: int, between: Callable[[Edge], bool]) -> list[Edge]:
        chosen = [edge for edge in self._edges if between(edge)]
        for edge in chosen:
            self._modes[self._edges.index(edge)] = mode
        return chosen

    def start(self) -> None:
        self._process = forked(lambda: asyncio.run(self._serve()), self._log)

    def end(self) -> None:
        os.kill(self._process, 9)
        os.waitpid(self._process, 0)

    async def _serve(self) -> None:
        for k, edge in enumerate(self._edges):
            await asyncio.start_server(self._answer(k, self._targets[edge]), "127.0.0.1", self._ports[edge])
        await asyncio.Event().wait()

    def _answer(self, k: int, target: tuple[str, int]):
        async def answer(near_in: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
            holed = False

            async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None) -> None:
                nonlocal holed
                while data := await reader.read(1 << 16):
                    holed = holed or self._modes[k] == HOLE
                    if writer is not None and not holed:
                        if self._delay_s:
                            asyncio.get_running_loop().call_later(self._delay_s, writer.write, data)
                            continue
                        writer.write(data)
                        await writer.drain()

            async def watch() -> None:
                while self._modes[k] != RESET:
                    await asyncio.sleep(0.01)

            far_in, far_out = None, None
            if self._modes[k] == PASS:
                try:
                    far_in, far_out = await asyncio.open_connection(*target)
                except OSError:  # nobody listens there now
                    _reset(near_out)
                    return
            works = [watch(), carry(near_in, far_out), *([carry(far_in, near_out)] if far_in else [])]
            tasks = [asyncio.create_task(work) for work in works]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for writer in (near_out, far_out):
                if writer is not None:
                    _reset(writer)

        return answer


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection with a TCP reset."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
