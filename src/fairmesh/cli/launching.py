"""Runs an experiment over several processes of this machine, which torchrun starts, watches and restarts."""

import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OUTCOME = "FAIRMESH_OUTCOME"  # names the file in which a rank records the exit code of a run that ended on purpose
_PATIENCE_S = 60  # for ranks to finish their round when asked to stop


def launched(arguments: Sequence[str], processes: int, restarts: int) -> int:
    """Runs `fairmesh run` with these arguments over `processes` ranks. A rank that dies uses up a restart; a run that
    ends with an error of its own does not.

    Returns:
        The exit code.
    """
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome"
        command = [
            sys.executable, "-m", "fairmesh.cli.launching",
            "--nnodes=1", f"--nproc-per-node={processes}", f"--max-restarts={restarts}",
            "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", f"--rdzv-id={uuid.uuid4()}",
            "--local-addr=127.0.0.1", f"--shutdown-timeout={_PATIENCE_S}",
            "-m", "fairmesh", "run", *arguments, "--network", "cluster",
        ]  # fmt: skip
        # A session of its own, so that Ctrl-C reaches the ranks once, through torchrun.
        process = subprocess.Popen(
            command, env=_environment(processes) | {OUTCOME: str(outcome)}, start_new_session=True
        )
        with _forwarded(process) as asked:
            code = process.wait()
        if outcome.exists():
            return int(outcome.read_text())
        return 128 + asked[0] if asked else abs(code)


def _environment(processes: int) -> dict[str, str]:
    """Returns the environment with what gloo needs on one machine, also after a restart."""
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}
    if sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"
    return defaults | os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@contextmanager
def _forwarded(process: subprocess.Popen) -> Iterator[list[int]]:
    """Forwards the first stop signal to torchrun, and so to every rank; later ones are ignored while ranks finish their
    round. Yields the list of forwarded signals."""
    asked: list[int] = []

    def forward(number: int, frame: Any) -> None:
        if not asked:
            asked.append(number)
            process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.terminate()


def stop_where_ended() -> None:
    """Exits if torchrun restarted this rank although the run has ended on purpose."""
    if OUTCOME in os.environ and Path(os.environ[OUTCOME]).exists():
        sys.exit(0)


def record_outcome(code: int) -> bool:
    """Records the exit code for the launcher, so that the rank is not restarted. Returns whether it is the first to do
    so."""
    try:
        with open(os.environ[OUTCOME], "x") as file:
            file.write(str(code))
    except FileExistsError:
        return False
    return True


def _quiet_about_signals(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if kind.__name__ != "SignalException":  # torchrun's own, when it was asked to stop
        sys.__excepthook__(kind, error, trace)


def known_to(options: Container[str], arguments: Sequence[str]) -> list[str]:
    """Returns the arguments without the time for ranks to finish, if this torchrun does not take it: that of torch 2.11
    always waits for 30 s."""
    return [one for one in arguments if "--shutdown-timeout" in options or not one.startswith("--shutdown-timeout=")]


if __name__ == "__main__":
    sys.excepthook = _quiet_about_signals
    parser = importlib.import_module("torch.distributed.run").get_args_parser()
    sys.argv = known_to({option for action in parser._actions for option in action.option_strings}, sys.argv)
    sys.modules.pop("torch.distributed.run")  # runpy warns of a module that is imported and then run
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
