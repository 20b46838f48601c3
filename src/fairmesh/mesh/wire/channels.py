"""gRPC as a mesh uses it: mutual TLS 1.3 under the sites' names, frames and connections of bounded size and number."""

import os
import resource
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fairmesh.errors import BadInput

# A certificate of an elliptic key cannot be used with a cipher for RSA keys, so with this alone no handshake of TLS 1.2
# succeeds; TLS 1.3, whose ciphers are not chosen this way, remains. gRPC reads it once, when it is imported.
_SETTING, _TLS_1_3_ONLY = "GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES256-GCM-SHA384"
if "grpc" in sys.modules and os.environ.get(_SETTING) != _TLS_1_3_ONLY:
    raise BadInput(
        "gRPC was imported before fairmesh could forbid TLS 1.2 to it; import fairmesh.mesh.node.running first"
    )
os.environ[_SETTING] = _TLS_1_3_ONLY

try:
    import grpc
    import grpc.aio
except ImportError as error:  # pragma: no cover
    raise BadInput("networks between organisations need gRPC: pip install 'fairmesh[peers]'") from error

RpcError = grpc.aio.AioRpcError
METHOD = "/fairmesh.Mesh/Edge"
BESIDE = 1 << 20  # bytes a frame may have beyond the largest message: news of many sites
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]
_HANDSHAKE_MS = 10_000  # then a stranger who says nothing is cut off
_OPEN_FILES = 8192
_CONNECTIONS = 2048  # at once, strangers included; some 30 kB each
_RPCS = 64  # beside those of neighbours, for whoever is about to be refused


@dataclass(frozen=True)
class Credentials:
    """PEM texts of a site: its key, its certificate, and the authority's."""

    key: bytes
    certificate: bytes
    authority: bytes


def dialled(address: str, name: str, credentials: Credentials, largest: int) -> Any:
    """A channel to whoever has a certificate of this name at an address."""
    options = [
        *_options(largest),
        ("grpc.ssl_target_name_override", name),
        ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the pauses of the one that failed
        ("grpc.min_reconnect_backoff_ms", 5_000),  # for one attempt; by default 20 s where nothing answers
        ("grpc.enable_retries", 0),
    ]
    given = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
    return grpc.aio.secure_channel(address, given, options=options)


def listening(
    address: str,
    credentials: Credentials,
    largest: int,
    streams: int,
    answer: Callable[[Any, Any], Awaitable[None]],
) -> Any:
    """A server for so many streams at once that gives each stream of a certified caller to `answer`."""
    server = grpc.aio.server(
        options=[
            *_options(largest),
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", 4),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_allowed_incoming_connections", _connections()),
        ],
        maximum_concurrent_rpcs=streams + _RPCS,
    )
    server.add_generic_rpc_handlers((_Edges(answer),))
    given = grpc.ssl_server_credentials(
        [(credentials.key, credentials.certificate)],
        root_certificates=credentials.authority,
        require_client_auth=True,
    )
    try:
        server.add_secure_port(address, given)
    except RuntimeError as error:
        raise BadInput(f"cannot listen on {address}: is another program using the port?") from error
    return server


def frames_of(stream: Any) -> Callable[[], Awaitable[bytes | None]]:
    """Reads a stream's next frame; none at its end."""

    async def read() -> bytes | None:
        data = await stream.read()
        return None if data is _END else data

    return read


def _options(largest: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", largest + BESIDE),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def _connections() -> int:
    """How many to allow. Half of the files a process may open at least remain for what a node must write: many
    systems allow 1,024 unless asked, and strangers could take them all."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    return min(_CONNECTIONS, wanted // 2)


class _Edges(grpc.GenericRpcHandler):
    """Raw bytes in both directions, at one method and no other."""

    def __init__(self, answer: Callable[[Any, Any], Awaitable[None]]):
        self._handler = grpc.stream_stream_rpc_method_handler(answer)  # type: ignore[arg-type]

    def service(self, handler_call_details: Any) -> Any:
        return self._handler if handler_call_details.method == METHOD else None
