"""How a check fails, and the comparisons that checks are made of."""

import math
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import tomli_w
import torch
from torch import Tensor

from fairmesh.config.tables import check_configurable, from_table, to_table
from fairmesh.errors import BadInput, in_a_line
from fairmesh.storage.state_tree import flatten_state

T = TypeVar("T")


class ContractViolation(AssertionError):
    """An object breaks the contract of its role.

    It is an AssertionError, so test frameworks count it as a failed test. The message says what was violated, with
    numbers.
    """


def require(condition: Any, message: str) -> None:
    """Raises a ContractViolation with this message unless the condition holds."""
    if not bool(condition):
        raise ContractViolation(message)


@contextmanager
def running(what: str, advice: str = "") -> Iterator[None]:
    """Turns any error inside into a ContractViolation that says where it was raised."""
    try:
        yield
    except ContractViolation:
        raise
    except Exception as error:  # a third party's code may raise anything
        raise ContractViolation(f"{what} raised {in_a_line(error)}{advice and '; ' + advice}") from error


def bits_of(state: Any) -> dict[str, Tensor]:
    """Returns copies of a state's tensors by their paths."""
    return {name: tensor.clone() for name, tensor in flatten_state(state).items()}


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference of two tensors of one shape; infinite if an entry is NaN in only one of them."""
    if one.numel() == 0:
        return 0.0
    both_nan = one.isnan() & other.isnan() if one.is_floating_point() else torch.zeros(())
    apart = torch.where(both_nan.bool(), 0.0, (one.double() - other.double()).abs()).max()
    return math.inf if bool(apart.isnan()) else float(apart)


def require_equal_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor], what: str) -> None:
    """Requires two sets of tensors to agree in every bit."""
    require(one.keys() == other.keys(), f"{what}: one has {sorted(one)}, the other {sorted(other)}")
    for name, tensor in one.items():
        twin = other[name]
        alike = tensor.shape == twin.shape and tensor.dtype == twin.dtype
        require(alike, f"{what}: {name} is {_form(tensor)} in one, {_form(twin)} in the other")
        require(torch.equal(tensor, twin), f"{what}: {name} differs by up to {largest_difference(tensor, twin):.3g}")


def require_close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Requires two tensors to have one shape and to differ by at most the tolerance."""
    require(found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)} where {tuple(wanted.shape)} is expected")
    apart = largest_difference(found, wanted)
    require(apart <= tolerance, f"{what}: differs by up to {apart:.3g}, more than {tolerance:.0e}")


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def checked_settings(thing: T, role: type) -> T:
    """Checks that an object of a role is a frozen dataclass that survives being written to TOML and read again.

    Returns:
        The object with every field as its type says, as an experiment has it: a Schedule where a number stood for one.
    """
    name = type(thing).__name__
    require(isinstance(thing, role), f"{name} is not a subclass of {role.__name__}")
    try:
        check_configurable(type(thing), role)
        thing = from_table(role, thing, name)
        written = tomli_w.dumps({"it": to_table(thing)})
        again = from_table(role, tomllib.loads(written)["it"], "it")
    except BadInput as error:
        raise ContractViolation(f"{name} cannot be written to an experiment file and read again: {error}") from error
    require(type(again) is type(thing), f"{name} is a {type(again).__name__} after it was written to TOML and read")
    require(again == thing, f"{thing} is {again} after it was written to TOML and read")
    return thing
