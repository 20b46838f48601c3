"""[parts] Which parameters of a model are shared, which stay at their site, and which are not trained."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from fairmesh.config.ranges import Memory, Positive
from fairmesh.config.tables import checked
from fairmesh.errors import BadInput, nearest


@checked
@dataclass(frozen=True)
class Parts:
    """Which parameters of a model stay at their site and which are not trained. All others are shared.

    Shared parameters are what an algorithm trains, compresses and sends. Local ones are trained at every site on its
    own data, next to the algorithm, and are never sent: a local head is FedPer. After every batch they take a step as
    `torch.optim.Adam` does, with this step and these betas; with `beta1 = beta2 = 0` a step of plain SGD.

    Args:
        local: Patterns of parameter names, such as ("head.*",), where * stands for any text. Default: ().
        frozen: Patterns of the parameters that keep their values. BatchNorm layers among them keep their statistics
            too. Default: ().
        step: The learning rate of the local parameters, > 0. Default: 0.003.
        beta1: Memory of their momentum, in [0, 1), as in Adam; 0 for no momentum. Default: 0.9.
        beta2: Memory of the mean squares that their steps are divided by, in [0, 1), as in Adam; 0 for unscaled steps.
            Default: 0.99.

    Example:
        >>> import fairmesh as fm
        >>> fm.Parts(local=("head.*",), frozen=("stem.*",)).local
        ('head.*',)
    """

    local: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    step: Positive = 0.003
    beta1: Memory = 0.9
    beta2: Memory = 0.99

    def freeze(self, module: nn.Module) -> None:
        """Freezes the parameters of a module that the patterns name.

        Raises:
            BadInput: A pattern names no parameter, or two kinds of patterns name the same one.
        """
        names = dict(module.named_parameters())
        frozen = _matched(names, self.frozen, "frozen")
        twice = [name for name in self.local_names(module) if name in frozen]
        if twice:
            raise BadInput(f"parts: {', '.join(twice[:3])} is both local and frozen; name every parameter once")
        for name in frozen:
            names[name].requires_grad_(False)

    def local_names(self, module: nn.Module) -> set[str]:
        """Returns the names of the local parameters of a module."""
        return _matched({name: p for name, p in module.named_parameters() if p.requires_grad}, self.local, "local")


def _matched(names: dict[str, nn.Parameter], patterns: tuple[str, ...], kind: str) -> set[str]:
    found: set[str] = set()
    for pattern in patterns:
        mine = {name for name in names if fnmatchcase(name, pattern)}
        if not mine:
            layers = {f"{name.rpartition('.')[0]}.*" for name in names if "." in name}
            what = "trained parameter" if kind == "local" else "parameter"
            raise BadInput(f"parts.{kind}: {pattern!r} matches no {what}{nearest(pattern, layers or names)}")
        found |= mine
    return found


ALL_SHARED = Parts()
