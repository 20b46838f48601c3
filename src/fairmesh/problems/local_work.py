"""Local work by a training function of the user's own: called for one node after another, and checked."""

import functools
import inspect
import io
import math
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from fairmesh.errors import BadInput, FairmeshError, TrainerFailed, in_a_line, named
from fairmesh.numerics.random_streams import GeneratorStates, seed_generators
from fairmesh.problems.batches import Batches
from fairmesh.problems.flat_model import FlatModel, tensors_of
from fairmesh.problems.gradient_path import refuse_for_updates
from fairmesh.problems.hosted_nodes import Division, HostedNodes
from fairmesh.problems.objective import held_out_rows
from fairmesh.problems.row_loss import as_floats
from fairmesh.trainers.local_trainer import LocalContext, LocalTrainer, SiteData

_HEAD = 8  # bytes that say how long a memory is
LOCAL_TRAINING = "local training"


class Work(NamedTuple):
    """What the local work of a round has given, for all hosted nodes."""

    losses: Tensor  # at the start, as the functions returned them (replicas, nodes, 1); NaN where they returned None
    updates: Tensor  # shared parameters before minus after (replicas, nodes, dim)
    own: Tensor  # the own parts afterwards (replicas, nodes, own_dim)
    memory: Tensor  # what the functions keep at their sites, as bytes (replicas, nodes, length)


class Node(NamedTuple):
    """One hosted node of one replica."""

    replica: int
    place: int  # among the hosted nodes
    number: int  # among all nodes of the network
    site: str
    seed: int


class Activity(NamedTuple):
    """What a process does in a round of local work."""

    round: int
    site: str
    since: float  # by time.time()

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"{LOCAL_TRAINING} of round {self.round} at {named(self.site)} since {since}"


class Done:
    """Where finished local work is kept, so that it is not done twice. `Work` is that of one node, (1, 1, ...). This
    one keeps nothing, for runs without a folder."""

    def read(self, round_number: int, node: Node, start: Tensor) -> Work | None:
        """Returns the finished work of a node in a round, from its row at the start, or None."""
        return None

    def write(self, round_number: int, node: Node, start: Tensor, work: Work, seconds: float) -> None:
        """Keeps the work of a node in a round, which took some seconds."""

    def flush(self) -> None:
        """Makes what was kept of this round durable, since another node has failed."""


LongWork = Callable[[Callable[[], Activity | None]], AbstractContextManager[Any]]


class LocalWorker:
    """Calls the training function for every hosted node.

    Args:
        trainer: The function and its settings.
        model: The model, on the run's device and in its dtype.
        nodes: The hosted nodes.
        division: Their rows.
        batches: The batches that fairmesh would use.
    """

    def __init__(
        self, trainer: LocalTrainer, model: FlatModel, nodes: HostedNodes, division: Division, batches: Batches
    ):
        self._trainer, self._model = trainer, model
        self._nodes, self._division, self._batches = nodes, division, batches
        # Surrounds a round: processes that wait and fail together.
        self.together: LongWork = lambda doing: nullcontext()
        self.done = Done()
        # Told when a node begins, and None at the end.
        self.watch: Callable[[Activity | None], None] = lambda activity: None

    def work(self, rows: Tensor, round_index: Tensor, call: int, memory: Tensor, at_work: Tensor | None) -> Work:
        """Returns the work of a round: what was kept of it, or what the functions do now.

        Args:
            rows: The parameters at the start (replicas, nodes, dim + own_dim).
            round_index: The round.
            call: Which of its batches a function gets that asks for one.
            memory: What the functions have kept (replicas, nodes, length).
            at_work: Which nodes work (replicas, nodes); the others keep what they have. None for all.
        """
        models, own = rows.split([self._model.dim, self._model.own_dim], dim=-1)
        after = Work(torch.zeros_like(models[..., :1]), torch.zeros_like(models), own.clone(), memory)
        memories = list(memory.flatten(0, 1))
        activity: Activity | None = None

        def done_by(node: Node) -> list[Tensor]:
            nonlocal activity
            at = (node.replica, node.place)
            start = rows[at].clone()
            work = self.done.read(number, node, start)
            if work is not None:
                return [part[0, 0].to(like.device) for part, like in zip(work, after)]
            activity, began = Activity(number, node.site, time.time()), time.monotonic()
            self.watch(activity)
            count = int(self._division.sizes_in(round_index)[at])  # of the rows that it trains on in this round
            place = node.replica * models.shape[1] + node.place
            context = LocalContext(
                number,
                node.site,
                node.seed,
                models.device,
                unpacked_memory(memory[at]),
                lambda: self._batches.of_node(of_all(), place, count),
            )
            loss, end = self._trained(start, self._data_of(node, count), context)
            work = Work(
                torch.full_like(models[:1, :1, :1], loss),
                (models[at] - end[: models.shape[-1]])[None, None],
                end[models.shape[-1] :][None, None],
                _packed(context)[None, None],
            )
            self.done.write(number, node, start, work, time.monotonic() - began)
            return [part[0, 0] for part in work]

        number = int(round_index)
        of_all = functools.cache(lambda: self._batches.at(round_index, call, 1))  # found once, if a function asks
        try:
            with self.together(lambda: activity):
                for node in self._nodes_at_work(number, at_work):
                    *parts, memories[node.replica * models.shape[1] + node.place] = done_by(node)
                    for whole, part in zip(after, parts):
                        whole[node.replica, node.place] = part
        except BaseException:
            with suppress(FairmeshError):  # of the disk; what failed first is told
                self.done.flush()
            raise
        if activity is not None:
            self.watch(None)
        return after._replace(memory=stacked_memory(memories).unflatten(0, models.shape[:2]))

    def _nodes_at_work(self, number: int, at_work: Tensor | None) -> list[Node]:
        keys = self._nodes.keys("local work", number)  # (replicas, nodes)
        works = torch.ones(self._nodes.shape, dtype=torch.bool) if at_work is None else at_work
        return [
            Node(r, i, self._nodes.numbers[i], self._nodes.site(r, i)[1].name or "", int(keys[r, i]) & 0x7FFFFFFF)
            for r, i in works.nonzero().tolist()
        ]

    def _data_of(self, node: Node, count: int) -> SiteData:
        """Returns the rows that a node trains on, without those that judge it."""
        i, site = self._nodes.site(node.replica, node.place)
        samples = site.train
        if count < len(samples):
            samples = samples.take((~held_out_rows(samples, i, self._nodes.problem.objective)).nonzero().flatten())
        return SiteData(samples, functools.partial(as_floats, dtype=self._nodes.dtype))

    def _trained(self, start: Tensor, data: SiteData, context: LocalContext) -> tuple[float, Tensor]:
        """Returns the loss that the function returned, or NaN for None, and the row afterwards."""
        module = self._model.module_to_train(start)
        with _seeded(context), torch.enable_grad():
            try:
                answer = self._trainer.function(module, data, context)
            except FairmeshError:
                raise
            except (Exception, SystemExit) as error:  # the user's code may raise anything
                raise _failed(context, f"the training function raised {_told(error)}", "mend it") from error
        end = self._row_after(module, context)
        trained = slice(self._model.dim + self._model.local_dim)
        if context.round == 0 and self._trainer.unchanged == "refuse" and torch.equal(start[trained], end[trained]):
            raise _failed(
                context,
                "the training function changed no trained parameter",
                "have it step its optimizer over parameters of the module that it got (a copy, or model = ..., is not "
                'read back); if it is meant to begin like that, use LocalTrainer(function, unchanged="accept")',
            )
        return _loss_of(answer, context), end

    def _row_after(self, module: nn.Module, context: LocalContext) -> Tensor:
        """Returns the row of a module after training. Refuses one that is not a model of this run any more."""
        held, parameters = tensors_of(module), dict(module.named_parameters())
        for name, shape in self._model.shapes.items():
            tensor = held.get(name)
            if tensor is None or tensor.shape != shape or tensor.device.type == "meta":
                now = "gone, or has no values" if tensor is None or tensor.shape == shape else tuple(tensor.shape)
                raise _failed(
                    context,
                    f"the training function changed the model: {name} of the shape {tuple(shape)} is now {now}",
                    "train the module in place and undo what wraps or replaces its layers before returning; layers "
                    "that are added, such as adapters, belong into the model that the Problem gets",
                )
        if added := [name for name in parameters if name not in self._model.shapes]:
            raise _failed(
                context,
                f"the training function added the parameter {added[0]}, which would be lost after the round",
                "give the Problem a model that has it from the beginning",
            )
        changed = self._model.changed_in(held)
        if changed is not None:
            what, way = (
                f"changed the buffer {changed}",
                'keep such numbers in ctx.state; for BatchNorm layers use batch_norm = "local" or "shared", or call '
                ".eval() on them after module.train()",
            )
            if changed in parameters:
                what = f"trained the frozen parameter {changed}"
                way = "leave parameters without requires_grad out of the optimizer, or take it out of parts.frozen; "
                way += "after merge_adapter() of adapters, call unmerge_adapter()"
            raise _failed(context, f"the training function {what}, which must keep its value", way)
        end = self._model.row_of(module).to(self._model.device, self._model.dtype)
        if not bool(torch.isfinite(end).all()):
            name = next(name for name in self._model.shapes if not bool(torch.isfinite(held[name].detach()).all()))
            raise _failed(
                context,
                f"after training, {name} has values that are not finite (NaN or infinite)",
                "lower the learning rate, clip the gradients, or look for such values in the data of this site",
            )
        return end


def _loss_of(answer: Any, context: LocalContext) -> float:
    if answer is None:
        return math.nan
    single = isinstance(answer, Tensor) and answer.numel() == 1
    number = answer.item() if single else answer
    loss = float(number) if isinstance(number, Real) and not isinstance(answer, bool) else math.nan
    if not math.isfinite(loss):
        raise _failed(
            context,
            f"the training function returned the loss {loss} (a {type(answer).__name__})",
            "return the loss at the start as a finite number, or None to have fairmesh measure it",
        )
    return loss


def _failed(context: LocalContext, what: str, advice: str) -> TrainerFailed:
    return TrainerFailed(
        f"{named(context.site)}, round {context.round}: {what}; {advice}. Nothing of this round was sent, and what is "
        "finished is kept: continue the run to go on from here"
    )


def _told(error: BaseException) -> str:
    """Returns an error with the place in the user's code that raised it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    place = f" ({frames[0].filename}, line {frames[0].lineno})" if frames else ""
    return in_a_line(error) + place


@contextmanager
def _seeded(context: LocalContext) -> Iterator[None]:
    """Seeds the process's generators for a call, and sets them back afterwards."""
    before, of_gpu = GeneratorStates.now(), None
    if context.device.type == "cuda":
        of_gpu = torch.cuda.get_rng_state(context.device)
        with torch.cuda.device(context.device):
            torch.cuda.manual_seed(context.seed)
    seed_generators(context.seed)
    try:
        yield
    finally:
        before.restore()
        if of_gpu is not None:
            torch.cuda.set_rng_state(of_gpu, context.device)


# Memory: what a function keeps, as bytes in a tensor ------------------------------------------------------------------


def no_memory(replicas: int, nodes: int) -> Tensor:
    """Returns the memory before the first round (replicas, nodes, length)."""
    return torch.zeros(replicas, nodes, _HEAD, dtype=torch.uint8)


def stacked_memory(rows: list[Tensor]) -> Tensor:
    """Returns memories of any lengths as rows of one tensor. A memory says how long it is, so zeros may follow it."""
    longest = max(len(row) for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])


def unpacked_memory(row: Tensor) -> dict[str, Any]:
    """Returns what a function has kept, from its memory (length,)."""
    length = int.from_bytes(bytes(row[:_HEAD].tolist()), "little")
    if not length:
        return {}
    content = row[_HEAD : _HEAD + length].numpy().tobytes()
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _packed(context: LocalContext) -> Tensor:
    """Returns the memory of what a function keeps."""
    if not isinstance(context.state, dict):
        kind = type(context.state).__name__
        raise _failed(context, f"ctx.state is a {kind}", "put entries into the dictionary instead of replacing it")
    if not context.state:
        return no_memory(1, 1)[0, 0]
    kinds: list[str] = []
    buffer, advice = io.BytesIO(), "keep state_dicts, tensors, numbers, text, and lists and dictionaries of them"
    try:
        torch.save(context.state, buffer)
        kinds = get_unsafe_globals_in_checkpoint(io.BytesIO(buffer.getvalue()))
        if kinds:  # then a checkpoint of it could not be read later
            torch.load(io.BytesIO(buffer.getvalue()), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _failed(context, f"ctx.state cannot be stored: it holds {kinds[0]}", advice) from error
    except Exception as error:  # whatever pickle finds
        raise _failed(context, f"ctx.state cannot be stored: {in_a_line(error)}", advice) from error
    content = buffer.getvalue()
    return torch.frombuffer(bytearray(len(content).to_bytes(_HEAD, "little") + content), dtype=torch.uint8)


# Settings that do not go together -------------------------------------------------------------------------------------


def check_trainer(problem: Any) -> None:
    """Raises BadInput for settings of a problem that have no meaning for updates of a training function."""
    try:
        inspect.signature(problem.trainer.function).bind(None, None, None)
    except ValueError:  # a callable without a signature
        pass
    except TypeError as error:
        raise BadInput(f"trainer: write the function as function(module, data, ctx); as it is, {error}") from error
    refuse_for_updates(problem)
    if problem.augment is not None:
        raise BadInput("augment changes fairmesh's own batches; leave it out, and augment in your training function")
    if problem.objective.subgroups is not None:
        raise BadInput(
            "objective.subgroups weighs single rows, which a training function does not know; leave it out, or train "
            "without a trainer"
        )
