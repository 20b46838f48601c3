"""Traces a function of tensors once as a flat list of operations, and replays it without the layers above them."""

import itertools
import operator
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from fairmesh.errors import in_a_line
from fairmesh.numerics.trees import Tree, leaves

_traces: list[None] = []  # one entry per trace in progress


def values_readable(tensor: Tensor) -> bool:
    """Returns whether a decision may depend on a tensor's value. It may on a CPU, where reading it needs no
    synchronisation, but not while operations are traced, since they are replayed with other values."""
    return tensor.is_cpu and not _traces


@contextmanager
def _tracing() -> Iterator[None]:
    """Within it, no decision may depend on a tensor's value."""
    _traces.append(None)
    try:
        yield
    finally:
        _traces.pop()


def recorded(function: Callable[..., Any], *arguments: Tree) -> GraphModule:
    """Returns the operations on tensors that a call of the function performs, in a form that torch can compile."""
    from torch.fx.experimental.proxy_tensor import make_fx  # only a GPU needs it

    with _tracing():
        module = make_fx(function)(*arguments)
    module.graph.eliminate_dead_code()  # it never removes in-place operations
    module.recompile()
    return module


class _Recorder(TorchDispatchMode):
    """Writes every operation on tensors into a graph while it is carried out. `make_fx` does the same and more, but
    imports TorchDynamo, which takes longer than many small jobs."""

    def __init__(self, graph: Graph, inputs: list[Tensor]):
        super().__init__()
        self.module = torch.nn.Module()  # has the tensors that are neither inputs nor results
        self._graph, self._nodes, self._alive = graph, {}, []
        for number, tensor in enumerate(inputs):
            self._name(graph.placeholder(f"input_{number}"), tensor)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # asked by torch; with True the first operation would import TorchDynamo
        return False

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        node = self._graph.call_function(func, *self.nodes_of((args, kwargs or {})))
        if isinstance(result, Tensor):
            self._name(node, result)
        elif isinstance(result, tuple | list):
            for number, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._name(self._graph.call_function(operator.getitem, (node, number)), part)
        else:  # a replay would have other values
            raise RuntimeError(f"{func} reads the value of a tensor")
        return result

    def nodes_of(self, tree: Any) -> Any:
        """Returns a tree of arguments with the node of each tensor in its place."""
        return tree_map(lambda leaf: self._node_of(leaf) if isinstance(leaf, Tensor) else leaf, tree)

    def _name(self, node: Node, tensor: Tensor) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)  # so that no other tensor gets its id
        node.meta["val"] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def _node_of(self, tensor: Tensor) -> Node:
        if id(tensor) not in self._nodes:
            name = f"tensor_{len(self._nodes)}"
            self.module.register_buffer(name, tensor.detach())
            self._name(self._graph.get_attr(name), tensor)
        return self._nodes[id(tensor)]


def _recorded_on_cpu(function: Callable[..., tuple[Tensor, ...]], *arguments: Tree) -> GraphModule:
    graph = Graph()
    recorder = _Recorder(graph, leaves(arguments))
    with _tracing(), recorder:
        results = function(*arguments)
    graph.output(recorder.nodes_of(results))
    graph.eliminate_dead_code()
    return GraphModule(recorder.module, graph)


class Opaque:
    """A function that a trace holds as one operation, so that what it does with streams, settings of torch or automatic
    differentiation happens again in every replay.

    Args:
        function: (rows, further arguments) -> a tensor like rows, and a number per row.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, Tensor]]):
        self.function = function
        self._form: Any = None  # of the further arguments
        self._number = next(_numbers)
        _opaque[self._number] = self

    def __call__(self, rows: Tensor, *others: Tree) -> tuple[Tensor, Tensor]:
        if not _traces:
            return self.function(rows, *others)
        flat, self._form = tree_flatten(others)
        return torch.ops.fairmesh.opaque(self._number, rows, flat)

    def of_flat(self, rows: Tensor, others: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Calls the function with the tensors of the further arguments."""
        return self.function(rows, *tree_unflatten(others, self._form))


_numbers = itertools.count()
_opaque: "weakref.WeakValueDictionary[int, Opaque]" = weakref.WeakValueDictionary()
_library = torch.library.Library("fairmesh", "FRAGMENT")
_library.define("opaque(int number, Tensor rows, Tensor[] others) -> (Tensor, Tensor)")


@torch.library.impl(_library, "opaque", "CompositeExplicitAutograd")
def _run_opaque(number: int, rows: Tensor, others: list[Tensor]) -> tuple[Tensor, Tensor]:
    if _traces:  # the values do not matter, and automatic differentiation is switched off inside a trace
        return torch.zeros_like(rows), rows.new_zeros(len(rows))
    place = torch.cuda.stream(torch.cuda.current_stream(rows.device)) if rows.is_cuda else nullcontext()

    def run() -> tuple[Tensor, Tensor]:
        if rows.is_cuda:
            torch.cuda.set_device(rows.device)  # a new thread has no device yet
        with place, torch.no_grad():
            return _opaque[number].of_flat(rows, others)

    with ThreadPoolExecutor(1) as thread:  # torch forbids automatic differentiation inside an operation, per thread
        return thread.submit(run).result()


@torch.library.register_fake("fairmesh::opaque", lib=_library)
def _shape_of_opaque(number: int, rows: Tensor, others: list[Tensor]) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), rows.new_empty(len(rows))


_TOLERANCES = {torch.float64: (1e-9, 1e-12)}  # relative, absolute; documented in docs/results/performance.md
_USUAL_TOLERANCE = (1e-3, 1e-5)  # for float32 and shorter types


def _agree(one: Tensor, other: Tensor) -> bool:
    """Returns whether a replay agrees with the function itself up to rounding."""
    rtol, atol = _TOLERANCES.get(one.dtype, _USUAL_TOLERANCE)
    return torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)


class Traced:
    """Traces `function` for the shapes it is called with. What vmap, autograd and a user's module decide in Python is
    decided once instead of in every call. The operations stay the same."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]):
        self._function = function
        self._replays: dict[Any, GraphModule | None] = {}

    def __call__(self, *arguments: Tree) -> tuple[Tensor, ...]:
        if not values_readable(arguments[0]):  # a whole round, with this function in it, is being traced
            return self._function(*arguments)
        flat = arguments if all(isinstance(a, Tensor) for a in arguments) else leaves(arguments)
        shapes = tuple((t.shape, t.dtype) for t in flat)
        if shapes not in self._replays:
            self._replays[shapes] = self._checked(arguments)
        replay = self._replays[shapes]
        return self._function(*arguments) if replay is None else replay(*flat)

    def _checked(self, arguments: tuple[Tree, ...]) -> GraphModule | None:
        """Returns the trace, or None if the function cannot be traced or the replay does not agree with it."""
        try:
            replay = _tidied(_recorded_on_cpu(self._function, *arguments))
            pairs = zip(self._function(*arguments), replay(*leaves(arguments)), strict=True)
            if all(_agree(a, b) for a, b in pairs):
                return replay
            reason = "it does not give the same result twice: does it keep state in Python between calls?"
        except Exception as error:  # anything that a user's module may raise
            reason = in_a_line(error)
        warnings.warn(
            f"model and loss run more slowly, since they cannot be traced: {reason}", RuntimeWarning, stacklevel=3
        )
        return None


_SAME = {"view", "expand", "reshape", "_unsafe_view", "alias", "detach"}


def _tidied(module: GraphModule) -> GraphModule:
    """Simplifies a trace: merges operations with the same inputs, removes those that change nothing, folds constants,
    turns products so that the long side is last, and writes out the softmax of few classes. Leaves a trace with
    in-place operations as it is."""
    operations = [node for node in module.graph.nodes if isinstance(node.target, OpOverload)]
    if any(node.target._schema.is_mutable for node in operations):  # type: ignore[union-attr]
        return module
    _fold_constants(module)
    seen: dict[Any, Node] = {}
    for node in operations:
        other = _unchanged(node) or seen.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
        if other is not node:
            node.replace_all_uses_with(other)
            module.graph.erase_node(node)
    for node in list(module.graph.nodes):
        if node.target == torch.ops.aten.bmm.default:
            _turn(module.graph, node)
        elif node.target in (_LOG_SOFTMAX, _LOG_SOFTMAX_BACKWARD):
            _write_out(module.graph, node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


_MAKERS = {"ones_like": 1.0, "zeros_like": 0.0, "new_zeros": 0.0}  # operations whose result depends only on a shape


def _fold_constants(module: GraphModule) -> None:
    """Computes now what depends only on shapes, such as the start of the gradient of a mean."""
    known: dict[Node, Tensor] = {}
    for node in module.graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        value, name = node.meta.get("val"), node.target._schema.name.removeprefix("aten::")
        if not isinstance(value, Tensor):
            continue
        if name in _MAKERS:
            known[node] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).fill_(_MAKERS[name])
        elif node.all_input_nodes and all(argument in known for argument in node.all_input_nodes):
            known[node] = node.target(*map_arg(node.args, known.get), **map_arg(node.kwargs, known.get))
    for number, (node, value) in enumerate(known.items()):
        if any(user not in known for user in node.users):
            module.register_buffer(f"constant_{number}", value)
            with module.graph.inserting_before(node):
                constant = module.graph.get_attr(f"constant_{number}")
            constant.meta["val"] = value
            node.replace_all_uses_with(constant)


def _unchanged(node: Node) -> Node | None:
    """Returns the argument that an operation passes on unchanged, or None."""
    first, value = node.args[0] if node.args else None, node.meta.get("val")
    before = first.meta.get("val") if isinstance(first, Node) else None
    if not isinstance(value, Tensor) or not isinstance(before, Tensor) or value.dtype != before.dtype:
        return None
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    if value.shape != before.shape or value.stride() != before.stride():
        return None
    return first if name in _SAME or (name == "mul" and node.args[1] == 1) else None  # type: ignore[return-value]


def _turn(graph: Graph, node: Node) -> None:
    """Replaces A B with (B^T A^T)^T if the result is taller than wide and small compared with A. A CPU multiplies small
    matrices up to 1.5 times faster with the long side last."""
    rows, columns = node.meta["val"].shape[1:]
    if rows <= columns or node.args[0].meta["val"].shape[2] < 2 * rows:  # type: ignore[union-attr]
        return
    turned = torch.ops.aten.transpose.int
    with graph.inserting_before(node):
        left, right = (graph.call_function(turned, (argument, 1, 2)) for argument in node.args)
        product = graph.call_function(torch.ops.aten.bmm.default, (right, left))
        back = graph.call_function(turned, (product, 1, 2))
        contiguous: Any = {"memory_format": torch.contiguous_format}  # later operations may rely on its strides
        same = graph.call_function(torch.ops.aten.clone.default, (back,), contiguous)
    same.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(same)
    graph.erase_node(node)


_LOG_SOFTMAX = torch.ops.aten._log_softmax.default
_LOG_SOFTMAX_BACKWARD = torch.ops.aten._log_softmax_backward_data.default
_FEW_CLASSES = 15  # of more, whole vectors of a CPU are filled


def _write_out(graph: Graph, node: Node) -> None:
    """Replaces a logarithmic softmax over few classes, or its gradient, with elementary operations. On a CPU the
    operation itself handles row after row, which takes 3 to 6 times as long for ten classes."""
    aten, value = torch.ops.aten, node.meta["val"]
    given = [argument for argument in node.args if isinstance(argument, Node)]
    dim = node.args[len(given)] % value.ndim  # type: ignore[operator]
    alike = all(one.meta["val"].is_contiguous() and one.meta["val"].dtype == value.dtype for one in given)
    if not alike or dim != value.ndim - 1 or value.shape[-1] > _FEW_CLASSES:
        return

    def call(operation: OpOverload, *arguments: Any) -> Node:
        return graph.call_function(operation, arguments)

    with graph.inserting_before(node):
        if node.target == _LOG_SOFTMAX:
            centred = call(aten.sub.Tensor, given[0], call(aten.amax.default, given[0], [-1], True))
            total = call(aten.sum.dim_IntList, call(aten.exp.default, centred), [-1], True)
            found = call(aten.sub.Tensor, centred, call(aten.log.default, total))
        else:
            total = call(aten.sum.dim_IntList, given[0], [-1], True)
            softmax = call(aten.exp.default, given[1])
            found = call(aten.sub.Tensor, given[0], call(aten.mul.Tensor, softmax, total))
    found.meta["val"] = value
    node.replace_all_uses_with(found)
    graph.erase_node(node)
