"""Rounds on a GPU: one round is traced as a flat list of operations, fused where possible, captured as a CUDA graph,
and replayed. For each further round the CPU only launches the graph."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fairmesh.errors import BadInput, in_a_line
from fairmesh.numerics.tracing import recorded
from fairmesh.storage.state_tree import flatten_state, unflatten_state

Step = Callable[[Any, Tensor], Any]  # (state, round number) -> the state after the round

_WARM_UP = 3  # rounds before the capture, in which libraries choose algorithms and allocate memory
_COMPILER = {"triton.autotune_pointwise": False}  # it times variants of kernels for seconds, and gains nothing here


@torch.library.custom_op("fairmesh::kept", mutates_args=())
def kept(tensor: Tensor) -> Tensor:
    """Returns a copy that the compiler cannot remove. Inductor removes a plain `clone()` as redundant and then reads
    the source after it has been overwritten."""
    return tensor.clone()


@kept.register_fake
def _(tensor: Tensor) -> Tensor:
    return tensor.clone()


def recorded_round(step: Step, state: Any, done: int, device: torch.device) -> tuple[GraphModule, list[Tensor]]:
    """Traces a round.

    Returns:
        A function that changes the tensors of a state and the round number in place into those after the round; and
        these tensors. They are the state's own where possible, since copies of a large state may not fit.
    """
    buffers = _buffers(state, done, device)
    with _unchanged(buffers):
        return _traced(step, state, buffers), buffers


def _buffers(state: Any, done: int, device: torch.device) -> list[Tensor]:
    return [*_own_tensors(list(flatten_state(state).values())), torch.tensor(done, device=device)]


def _traced(step: Step, state: Any, buffers: list[Tensor]) -> GraphModule:
    """Returns the operations of a round on these buffers, which it changes."""
    names = list(flatten_state(state))

    def change(*buffers: Tensor) -> list[Tensor]:
        *parts, now = buffers
        after = [*flatten_state(step(unflatten_state(state, dict(zip(names, parts))), now)).values(), now + 1]
        held = {old.untyped_storage().data_ptr() for old in buffers}  # must not be overwritten before they are read
        changed = [(old, new) for old, new in zip(buffers, after) if new is not old]
        copied = [kept(new) if new.untyped_storage().data_ptr() in held else new for _, new in changed]
        for (old, _), new in zip(changed, copied):
            old.copy_(new)
        return []

    with torch.no_grad():
        step(state, buffers[-1])  # once untraced: errors in a user's code are clearer, and tables are made outside
        return recorded(change, *buffers)


def _own_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors, with a copy of each that shares its memory with an earlier one or with itself."""
    seen: set[int] = set()
    own = []
    for tensor in tensors:
        memory = tensor.untyped_storage()
        alone = tensor.is_contiguous() and memory.nbytes() == tensor.nbytes and memory.data_ptr() not in seen
        own.append(tensor if alone else tensor.clone())
        seen.add(memory.data_ptr())
    return own


@contextmanager
def _unchanged(buffers: list[Tensor]) -> Iterator[None]:
    """Restores the buffers' values at the end, from main memory: a GPU may have no room for a second copy."""
    before = [t.cpu() if t.is_cuda else t.clone() for t in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before):
            buffer.copy_(value)


def captured_rounds(step: Step, state: Any, done: int, device: torch.device, fuse: bool) -> "CapturedRounds | None":
    """Returns the rounds fused and captured, or only captured if fusing fails. Returns None with a warning if that
    fails too; then rounds run one operation at a time."""
    for fused in (True, False) if fuse else (False,):
        try:
            return CapturedRounds(step, state, done, device, fused)
        except (torch.cuda.OutOfMemoryError, BadInput):
            raise
        except Exception as error:  # anything that a compiler or a user's module may raise
            what = "compiled into fewer kernels" if fused else "captured as a CUDA graph, and run more slowly"
            warnings.warn(f"rounds cannot be {what}: {in_a_line(error)}", RuntimeWarning, stacklevel=2)
    return None


def _compiled(module: GraphModule, buffers: list[Tensor]) -> Callable[..., Any]:
    from torch import _inductor  # takes seconds to import, and only a GPU needs it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a compiler's remarks on what it might do better
        return _inductor.compile(module, buffers, options=_COMPILER)  # type: ignore[arg-type]


class CapturedRounds:
    """Replays one round repeatedly on buffers of its own."""

    def __init__(self, step: Step, state: Any, done: int, device: torch.device, fuse: bool = True):
        self._buffers = _buffers(state, done, device)
        self.state = unflatten_state(state, dict(zip(flatten_state(state), self._buffers)))  # which every round changes
        with _unchanged(self._buffers):  # once for all: for large models it takes seconds
            module = _traced(step, state, self._buffers)
            run: Callable[..., Any] = _compiled(module, self._buffers) if fuse else module
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), torch.no_grad():
                for _ in range(_WARM_UP):
                    run(*self._buffers)
            torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph), torch.no_grad():
            run(*self._buffers)

    def advance(self) -> None:
        """Starts one more round; does not wait for the GPU."""
        self._graph.replay()
