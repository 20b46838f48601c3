"""The life of a node: its states, by the names that `fairmesh status` shows, and which of them may follow which.

A node is in one of `STATES`. What it does there is one function, which takes the node and returns the name of the state
that follows, or "" when the node has ended. To add a phase, write its function in a file of this folder, and add one
entry here. Some states have no function: they are entered for a while by the function of another one."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from fairmesh.mesh.node.node import Node

_CHARACTERS = 200  # of an activity at most; a longer one would be refused as an announcement


class State(NamedTuple):
    """A state of a node.

    Args:
        follow: The names of the states that may follow, besides those of `ANY_TIME`.
        act: "module:function" in this folder. It is imported when a node enters the state, since `fairmesh status`
            must not import torch. Default: none.
        means: What it means, if the name does not say it. Default: nothing.
        may_take_long: Whether sites that wait for this one are told that it is in this state. Default: False.
    """

    follow: tuple[str, ...]
    act: str = ""
    means: str = ""
    may_take_long: bool = False


STARTING, ON_DATA, ON_START = "starting", "agreeing on the data", "agreeing on the model to start from"
REFERENCES, TRAINING, LOCAL_TRAINING = "finding reference losses", "training", "local training"
DECAY = "finding the decay of models"
COLLECTING, SUMMING, CONFIRMING = "waiting for the metrics of all", "summing up", "waiting for the results of all"
COMPARING, COMPARED = "comparing with this site alone", "waiting for the comparisons of all"
CHOOSING, ENDING, FINISHED = "choosing the site's own model", "waiting until all have the result", "finished"
VOTING, DECIDING = "waiting for votes", "deciding"
LOST, RESTORING = "waiting for votes to restore this site", "waiting for what the neighbours know of this site"
DIVERGED, STOPPED, NOT_RUNNING, SLOW_DISK = "diverged", "stopped", "not running", "waiting for its disk"

AT_WORK = (TRAINING, LOCAL_TRAINING)  # rounds are done
ANY_TIME = (VOTING, DECIDING, DIVERGED, STOPPED)  # may follow every state

STATES = {
    STARTING: State((ON_DATA, LOST), "running:start", "it imports, and reads its files and data"),
    # A generation of the mesh
    ON_DATA: State((ON_START, TRAINING, RESTORING), "generation:agree_on_data"),
    ON_START: State((TRAINING,), "generation:agree_on_start"),
    TRAINING: State((REFERENCES, DECAY, LOCAL_TRAINING, COLLECTING, ENDING), "generation:train"),
    REFERENCES: State((TRAINING,), may_take_long=True),
    DECAY: State((TRAINING,), may_take_long=True),
    LOCAL_TRAINING: State((TRAINING,), may_take_long=True),
    # Its end
    COLLECTING: State((SUMMING,), "ending:collect"),
    SUMMING: State((CONFIRMING,), "ending:sum_up"),
    CONFIRMING: State((COMPARING,), "ending:confirm"),
    COMPARING: State((COMPARED,), "ending:compare", may_take_long=True),
    COMPARED: State((ENDING,), "ending:add_comparisons"),
    ENDING: State((CHOOSING, FINISHED), "ending:wait_for_all"),
    CHOOSING: State((ENDING,), may_take_long=True),
    FINISHED: State((), "ending:part"),
    # Decisions of the sites, which end a generation
    VOTING: State((ON_DATA, LOST)),
    DECIDING: State((ON_DATA, LOST, RESTORING, REFERENCES, DECAY, LOCAL_TRAINING), "deciding:decide"),
    LOST: State((), "deciding:await_restoring"),
    RESTORING: State((ON_DATA,)),
    # What ends a node early
    DIVERGED: State((), means="it tells the others"),
    STOPPED: State(()),
    # Seen from outside, whatever the node itself says
    NOT_RUNNING: State((), means="it was killed, or has failed"),
    SLOW_DISK: State(()),
}


def described(name: str, detail: str = "") -> str:
    """Returns a state as it is shown: its name, with a detail or with what it means."""
    more = detail or STATES[name].means
    if not more or more.startswith(name):  # a detail may say the state itself, so that it reads as one sentence
        return more or name
    return f"{name}: {more}"


def state_in(activity: str) -> str:
    """Returns the name of the state that a shown or announced activity begins with, "" if there is none."""
    return max((name for name in STATES if activity.startswith(name)), key=len, default="")


class Life:
    """The state that a node is in, with a detail of it, such as its progress."""

    def __init__(self):
        self.state, self.detail = STARTING, ""
        self._before: dict[str, str] = {}  # states to go back to, by the one that interrupts them

    @property
    def activity(self) -> str:
        """Returns what the node does, as it is shown and announced."""
        return described(self.state, self.detail)[:_CHARACTERS]

    def enter(self, state: str, detail: str = "") -> None:
        """Goes to another state, or to another detail of this one."""
        if state not in (self.state, *STATES[self.state].follow, *ANY_TIME):
            raise RuntimeError(f'a node cannot go from "{self.state}" to "{state}"')
        self.state, self.detail = state, detail

    def interrupt(self, state: str, detail: str = "") -> None:
        """Goes to a state for a while, or to another detail of it; `resume` goes back."""
        if state != self.state:
            self._before[state] = self.state
        self.enter(state, detail)

    def resume(self) -> None:
        """Goes back to the state that this one has interrupted, if it has."""
        self.enter(self._before.pop(self.state, self.state))

    def act(self, node: "Node") -> str:
        """Does what a node does in its state. Returns the state that follows, or "" at the end."""
        module, _, name = STATES[self.state].act.partition(":")
        function: Callable[[Any], str] = getattr(importlib.import_module(f"fairmesh.mesh.node.{module}"), name)
        return function(node)
