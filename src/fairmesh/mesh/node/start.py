"""The model that all sites start from. The first site makes it, and it travels down the tree of the sums.

Machines make slightly different models from the same seed: the vectorised random numbers of torch, and everything that
is computed from them, depend on the kind of CPU. So all take over the first site's, buffers and frozen parameters
included. Each site compares it with the model that it makes itself: a first site, or one on the way, cannot give the
others another model than the experiment's. The frozen base of a model with adapters may be large, and sites load it
from equal files. So only its digests travel, and must be the same everywhere."""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from fairmesh.compression import DecodeError
from fairmesh.errors import BadInput
from fairmesh.mesh.node.claims import PUT_BACK
from fairmesh.mesh.node.reduction import Branch
from fairmesh.mesh.node.store import START
from fairmesh.mesh.wire.journal import Journal, storing
from fairmesh.mesh.wire.mailroom import Mailroom
from fairmesh.networks.bounds import norm_of
from fairmesh.problems.lora import base_of_adapters
from fairmesh.storage.files import read_bytes, write_atomically

_STEP = 0  # before the first round
_DIGEST = 32  # bytes of SHA-256
_MACHINE = 256  # bytes for the sender's machine in words
_HEADER = 1 << 16  # bytes by which two files of the same tensors may differ
_SHA256 = "sha256 "  # before the name of a tensor whose digest travels in its place
_APART = 1e-3  # share of a tensor's norm by which machines may differ; they do by about 1e-7


class Start:
    """The start of a run at one node.

    Args:
        state: The state folder, where the model is kept for restarts.
        own: The model as this site makes it.
        machine: This machine in words, for others.
        report: Called as `report(position, machine)` for each neighbour with another machine.
    """

    def __init__(self, state: Path, own: nn.Module, machine: str, report: Callable[[int, str], None]):
        self._path, self._own, self._machine, self._report = state / START, own, machine, report

    @staticmethod
    def known(state: Path) -> bool:
        """Returns whether the model is on disk."""
        return (state / START).exists()

    @staticmethod
    def lost_messages(state: Path, journal: Journal, neighbours: Sequence[int]) -> bool:
        """Returns whether the disk has damaged the journal's record of the messages with which sites agreed on the
        model, though this node has done so, and the model on disk is the one that it told its neighbours."""
        begun = Start.known(state) and any(step > _STEP for step in journal.steps_sent())
        if not begun or all(journal.received(position, _STEP) is not None for position in neighbours):
            return False
        digest = hashlib.sha256(read_bytes(state / START)).digest()
        return all(told[:_DIGEST] == digest for told in journal.sent(_STEP).values())

    def largest(self) -> int:
        """Returns a bound on the bytes of a message with the model."""
        size = sum(tensor.nbytes + len(name) + 128 for name, tensor in self._travelling.items())
        return _DIGEST + _MACHINE + _HEADER + size

    @cached_property
    def _travelling(self) -> dict[str, Tensor]:
        """Copies of all parameters and buffers by name; digests in place of a frozen base."""
        base = base_of_adapters(self._own)
        found = {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(self._own).items()}
        sent = {name: tensor.clone() for name, tensor in found.items() if name not in base}
        return sent | {_SHA256 + name: _digest(found[name]) for name in sorted(base)}

    def agree(self, mailroom: Mailroom, branch: Branch, neighbours: Sequence[int], positions: Sequence[int]) -> None:
        """Takes the model from the parent in the tree, passes it on, and compares its digest with all neighbours. If
        that was done before a restart and the journal has lost it, only says again what this node had said.

        Args:
            mailroom: Carries the messages.
            branch: This node's place in the tree.
            neighbours: Positions of the neighbours.
            positions: Those of the tree's nodes.
        """
        parent = None if branch.parent is None else positions[branch.parent]
        agreed = mailroom.first > _STEP
        if agreed:
            content = self.content()
        elif parent is None:
            content = read_bytes(self._path) if self._path.exists() else save(self._travelling)
        else:
            content = mailroom.take(_STEP, [parent], self._received)[parent]
        if not agreed:
            self.keep(content)
        head = hashlib.sha256(content).digest() + self._machine.encode()[:_MACHINE].ljust(_MACHINE)
        below = {positions[child] for child in branch.children}
        going = {p: head + content if p in below else head for p in neighbours}
        mailroom.post(_STEP, mailroom.as_sent(_STEP, going))  # before a restart, the machine may have been another

        def same(position: int, theirs: bytes) -> None:
            self._machine_in(position, theirs)
            if theirs[:_DIGEST] != head[:_DIGEST]:
                raise DecodeError("it starts from another model than the one that all sites take over from the first")

        if not agreed:
            mailroom.take(_STEP, [p for p in neighbours if p != parent], same)

    def _received(self, position: int, message: bytes) -> bytes:
        there, content = self._machine_in(position, message), message[_DIGEST + _MACHINE :]
        if hashlib.sha256(content).digest() != message[:_DIGEST]:
            raise DecodeError("the model to start from does not have the digest that came with it")
        self.refuse_other(content, there)
        return content

    def refuse_other(self, content: bytes, there: str) -> None:
        """Refuses a model that is not the one that this site makes, but for what machines differ by. `there` names the
        other machine or site."""
        try:
            tensors = load(content)
        except (SafetensorError, ValueError, KeyError) as error:
            raise DecodeError("the model to start from cannot be read") from error
        reason = _unlike(tensors, self._travelling)
        if reason:
            raise DecodeError(
                f"the model to start from is not the one that this site makes from the same files: {reason}. There: "
                f"{there}. Here: {self._machine}. Install the same versions at both sites, and compare the files that "
                "the model reads"
            )

    def keep(self, content: bytes) -> None:
        """Writes the model to disk."""
        with storing(self._path.parent):
            write_atomically(self._path, content)

    def content(self) -> bytes:
        """Returns the model on disk as it travels."""
        return read_bytes(self._path)

    def _machine_in(self, position: int, message: bytes) -> str:
        said = message[_DIGEST : _DIGEST + _MACHINE].decode(errors="replace").strip()
        shown = "".join(c for c in said if c.isprintable())
        if shown != self._machine:
            self._report(position, shown)
        return shown

    def model(self) -> nn.Module:
        """Returns the model on disk."""
        module = copy.deepcopy(self._own)
        try:
            tensors = load(read_bytes(self._path))
        except (SafetensorError, ValueError) as error:
            raise BadInput(f"{self._path} is damaged ({error}); {PUT_BACK}") from error
        if tensors.keys() != self._travelling.keys():
            raise BadInput(f"{self._path} is damaged (it has other tensors than the model); {PUT_BACK}")
        for name, tensor in _tensors(module).items():
            if name in tensors:
                if tensors[name].shape != tensor.shape:
                    raise BadInput(
                        f"{self._path} has {name} of shape {tuple(tensors[name].shape)}, but this run's model "
                        f"{tuple(tensor.shape)}; are the experiment's files those that the run began with?"
                    )
                tensor.data.copy_(tensors[name])
            elif not torch.equal(tensors[_SHA256 + name], self._travelling[_SHA256 + name]):
                raise BadInput(
                    f"the frozen base model of this site has changed since the run began: {name} has other values; put "
                    "back the file that the model is loaded from"
                )
        return module


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns all parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _digest(tensor: Tensor) -> Tensor:
    """Returns the SHA-256 of a tensor's bytes, as bytes."""
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def _unlike(theirs: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> str:
    """Returns in which tensor two models differ by more than machines do, in words, or nothing."""
    if theirs.keys() != mine.keys():
        name = min(theirs.keys() ^ mine.keys())
        return f"only one of them has {''.join(c for c in name if c.isprintable())[:100]}"
    for name, tensor in mine.items():
        other = theirs[name]
        if other.shape != tensor.shape or other.dtype != tensor.dtype:
            return f"{name} is {tuple(other.shape)} {other.dtype} there and {tuple(tensor.shape)} {tensor.dtype} here"
        if name.startswith(_SHA256) and not torch.equal(other, tensor):
            shown, there, here = name.removeprefix(_SHA256), *(bytes(t.tolist()).hex()[:12] for t in (other, tensor))
            return (
                f"another frozen base model, whose {shown} has the SHA-256 {there} there and {here} here; have both "
                "sites load the same file (machines draw different numbers from a seed)"
            )
        if not torch.is_floating_point(tensor):
            if not torch.equal(other, tensor):
                return f"{name} differs"
            continue
        apart, norm = norm_of(other.double() - tensor.double()), norm_of(tensor.double())
        if not apart <= _APART * norm:
            return f"{name} differs by {apart:.3g}, and its norm is {norm:.3g}"
    return ""
