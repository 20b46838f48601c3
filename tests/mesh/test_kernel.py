"""Nodes report as many bytes as the kernel counts, but for headers of TCP and IP."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADERS = 20 + 32  # IP, and TCP with timestamps: of every packet; the loopback interface counts no Ethernet header
NODES, STEPS = 4, 200

_INSIDE = """
import json
from pathlib import Path
from dataclasses import asdict
from benchmarks.peers import network_cost


def counted():
    table = dict(line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:])
    numbers = table[next(name for name in table if name.strip() == "lo")].split()
    return int(numbers[8]), int(numbers[9])  # bytes and packets sent


if __name__ == "__main__":
    before = counted()
    cost = asdict(network_cost(%d, 20_000, %d))
    after = counted()
    print(json.dumps(cost | {"kernel_bytes": after[0] - before[0], "packets": after[1] - before[1]}))
""" % (NODES, STEPS)  # noqa: UP031


@pytest.mark.slow
def test_bytes_counted_by_nodes_are_those_counted_by_the_kernel_but_for_headers_of_packets():
    alone = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]  # a network of its own
    try:
        possible = subprocess.run([*alone, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("network namespaces are not allowed here")
    ran = subprocess.run(
        [*alone, sys.executable, "-c", _INSIDE], cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    found = json.loads(ran.stdout)
    carried = found["kernel_bytes"] - HEADERS * found["packets"]
    told = found["bytes_of_messages"] + found["bytes_overhead"]
    messages = 2 * NODES * STEPS
    assert found["bytes_of_messages"] == found["message_bytes"] * messages
    overhead = found["bytes_overhead"] / messages
    print(f"{overhead:.0f} bytes besides a message of {found['message_bytes']}, TLS and certificates included")
    # Uncounted are the ends of connections and larger headers at their beginnings.
    assert -10 * NODES < carried - told < 200 * NODES
