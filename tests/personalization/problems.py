"""Problems over sites whose best models are known."""

import torch

import fairmesh as fm

FEATURES, CLASSES, TEST_ROWS = 6, 3, 500
SIZES = {"alike 0": 20, "alike 1": 20, "alike 2": 150, "alike 3": 150, "other": 150, "between": 60, "tiny": 8}
SHIFTS = {"other": 3.0, "between": 0.4}  # how far a site's truth is from the common one


def sites(seed: int = 0, numbers: bool = False) -> list[fm.Site]:
    """Four sites share a truth, two of them with few rows; "other" has another truth, "between" a similar one."""
    generator = torch.Generator().manual_seed(seed)
    outputs = 1 if numbers else CLASSES
    common = torch.randn(FEATURES, outputs, generator=generator)
    made = []
    for name, size in SIZES.items():
        shift = SHIFTS.get(name, 0.0)
        own = torch.randn(FEATURES, outputs, generator=generator)
        truth = (0.5 if numbers else 2.0) * (common + shift * own) / (1 + shift**2) ** 0.5
        inputs = torch.randn(size + TEST_ROWS, FEATURES, generator=generator)
        uniform = torch.rand(size + TEST_ROWS, outputs, generator=generator)
        if numbers:
            targets = inputs @ truth + torch.randn(size + TEST_ROWS, 1, generator=generator)
        else:
            targets = (inputs @ truth - torch.log(-torch.log(uniform))).argmax(dim=-1)  # drawn from the softmax
        made.append(fm.Site((inputs[:size], targets[:size]), test=(inputs[size:], targets[size:]), name=name))
    return made


def linear(outputs: int) -> torch.nn.Module:
    model = torch.nn.Linear(FEATURES, outputs)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def problem(seed: int = 0, numbers: bool = False, hidden: int = 0, **fields) -> fm.Problem:
    outputs = 1 if numbers else CLASSES
    if numbers:
        fields["loss"] = torch.nn.functional.mse_loss

    def network() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(FEATURES, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outputs))

    model = network if hidden else linear(outputs)
    return fm.Problem(model, fm.data.reserve(sites(seed, numbers)), **fields)
