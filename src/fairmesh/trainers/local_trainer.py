"""A training function of the user's own, and what it gets: the site's data and a seeded context."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fairmesh.config.tables import checked
from fairmesh.data.samples import Samples
from fairmesh.errors import BadInput
from fairmesh.numerics import trees
from fairmesh.numerics.trees import Tree


class SiteData(Dataset):
    """The training samples of one site, as a torch Dataset of pairs (inputs, targets).

    `torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)` works as usual, also with workers. Samples in
    memory are at hand as whole tensors too. All tensors are copies, so code that changes them in place does not change
    what later rounds see.

    Args:
        samples: The samples.
        as_seen: Turns tensors into what models get: bytes into floats in [0, 1], floats into the run's dtype. None for
            the tensors as they are. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> samples = fm.data.Samples.of((torch.zeros(5, 3), torch.arange(5)), "my samples")
        >>> data = fm.trainers.SiteData(samples)
        >>> len(data), data[3][1].item(), data.inputs.shape
        (5, 3, torch.Size([5, 3]))
    """

    def __init__(self, samples: Samples, as_seen: Callable[[Tree], Tree] | None = None):
        self._samples, self._as_seen = samples, as_seen or (lambda tree: tree)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, k: int) -> tuple[Tree, Tree]:
        """Returns the inputs and the targets of a sample. Random transforms of a streamed Dataset are drawn again each
        time, from a seed that torch's generator gives."""
        if not -len(self) <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")  # ends iteration
        stream = self._samples.stream
        if stream is None:
            inputs, targets, at = self._samples.inputs, self._samples.targets, k
        else:
            (inputs, targets), at = stream.read_here([k % len(self)], [int(torch.randint(1 << 32, ()))]), 0
        return self._copied(trees.at(inputs, at)), self._copied(trees.at(targets, at))

    def _copied(self, tree: Tree) -> Tree:
        return self._as_seen(trees.mapped(torch.clone, tree))

    @cached_property
    def inputs(self) -> Tree:
        """All inputs (samples, ...): a tensor, or a tuple or a dictionary of tensors."""
        self._refuse_stream()
        return self._copied(self._samples.inputs)

    @cached_property
    def targets(self) -> Tree:
        """The targets of all samples (samples, ...), in the same form."""
        self._refuse_stream()
        return self._copied(self._samples.targets)

    def _refuse_stream(self) -> None:
        if self._samples.stream:
            raise BadInput("these samples are streamed, so they are not in memory; read them with a DataLoader")


class LocalContext:
    """What a training function knows about the local work that it does. fairmesh makes it.

    Args:
        round: The number of the round, from 0.
        site: The name of the site.
        seed: A number that depends on the run's seed, the round and the node. The generators of torch, Python and numpy
            are seeded with it while the function runs, and are as before afterwards.
        device: Where the module is.
        state: What the site keeps from round to round: a dictionary of whatever the function puts there, such as
            `optimizer.state_dict()`. Tensors, numbers, text, and lists and dictionaries of them. It is never sent, and
            it is in the site's checkpoint. None for an empty one. Default: None.
        batch: What `batch()` returns; None for nothing. Default: None.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> ctx = fm.trainers.LocalContext(0, "clinic-a", 7, torch.device("cpu"))
        >>> ctx.generator().initial_seed(), ctx.state
        (7, {})
    """

    def __init__(
        self,
        round: int,
        site: str,
        seed: int,
        device: torch.device,
        state: dict[str, Any] | None = None,
        batch: Callable[[], tuple[Tree, Tree]] | None = None,
    ):
        self.round, self.site, self.seed, self.device = round, site, seed, device
        self.state: dict[str, Any] = {} if state is None else state
        self._batch = batch

    def batch(self) -> tuple[Tree, Tree]:
        """Returns the pair (inputs, targets) that fairmesh itself would use in this round, as `Sampling` says; the
        first one, if there are several per step."""
        if self._batch is None:
            raise BadInput("this context was made without a batch; give one: LocalContext(..., batch=function)")
        return self._batch()

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """Returns a generator of torch with the seed of this round and node.

        Args:
            device: Where it draws. Default: "cpu".
        """
        return torch.Generator(device).manual_seed(self.seed)


TrainingFunction = Callable[[nn.Module, SiteData, LocalContext], float | Tensor | None]


@checked
@dataclass(frozen=True)
class LocalTrainer:
    """Your own training code as the local work of a site: `fm.Problem(..., trainer=LocalTrainer(function))`.

    In every round the function gets the module with the site's current weights, the site's training data and a context.
    It trains the module in place, as long as it likes and with whatever it likes. The difference between the weights
    before and after is the *update*. It takes the place of the gradient: algorithms weigh, track, compress and exchange
    it. `primal_step = 1` applies it whole; AD-GDA multiplies it by lambda_i, about 1 / n, so there it is n.

    The module is in the modes in which you gave it, on the run's device. Frozen parameters and buffers must keep their
    values. Local parameters and the statistics of BatchNorm layers stay at the site as the function leaves them.

    Args:
        function: (module, data, ctx) -> the loss at the start as a number, which robust weights follow; or None, and
            fairmesh measures it on the batch that `Sampling` gives. `data` is a `fm.trainers.SiteData`, `ctx` a
            `fm.trainers.LocalContext`.
        unchanged: What happens if the function changes no trained parameter in round 0: "refuse" or "accept", for
            schedules that begin at zero. Later rounds may change nothing. Default: "refuse".

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> def train(module, data, ctx):
        ...     optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        ...     if ctx.state:
        ...         optimizer.load_state_dict(ctx.state["optimizer"])
        ...     for inputs, targets in torch.utils.data.DataLoader(data, batch_size=10, shuffle=True):
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.cross_entropy(module(inputs), targets).backward()
        ...         optimizer.step()
        ...     ctx.state["optimizer"] = optimizer.state_dict()
        >>> labels = torch.arange(40) % 2
        >>> sites = [fm.Site((torch.randn(40, 3) + 2 * labels[:, None], labels)) for _ in range(3)]
        >>> trainer = fm.trainers.LocalTrainer(train)
        >>> problem = fm.Problem(torch.nn.Linear(3, 2), sites, test=sites[0].train, trainer=trainer)
        >>> fm.train(problem, fm.Ring(), fm.ChocoSGD(primal_step=1.0), rounds=5).rounds
        5
    """

    function: TrainingFunction
    unchanged: Literal["refuse", "accept"] = "refuse"
