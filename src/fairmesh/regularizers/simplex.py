"""Weights on the simplex, with or without caps: projections, and the thresholds of inner maxima."""

from collections.abc import Callable

import torch
from torch import Tensor

from fairmesh.numerics.tracing import values_readable

_SORTED_UP_TO = 512  # entries of a row; longer rows are not sorted but read a few times
_NEWTON_STEPS = 12  # at most; most rows need two to seven
_HALVINGS = {torch.float32: 26, torch.float64: 55}  # the interval ends below the rounding of a threshold in [-1, 0]
_IN_CACHE = 1 << 16  # entries of long rows that are read together


def project_onto_simplex(rows: Tensor) -> Tensor:
    """Returns the Euclidean projection of each row onto the probability simplex.

    It is max(x - tau, 0), with tau such that each row sums to one, and exact for entries of any magnitude.

    Args:
        rows: Points (..., n), float32 or float64.

    Returns:
        The nearest points (..., n) with entries >= 0 that sum to one.

    Example:
        >>> import torch
        >>> import fairmesh as fm
        >>> fm.regularizers.project_onto_simplex(torch.tensor([0.5, 1.0, -2.0]))
        tensor([0.2500, 0.7500, 0.0000])
    """
    n = rows.shape[-1]
    if n <= _SORTED_UP_TO:
        return _above(rows, _by_sorting)
    if not values_readable(rows):
        return _above(rows, _by_halving)
    projected = torch.empty_like(rows, memory_format=torch.contiguous_format)
    at_once = max(1, _IN_CACHE // n)
    for block, into in zip(rows.reshape(-1, n).split(at_once), projected.view(-1, n).split(at_once)):
        into.copy_(_above(block, _by_newton))
    return projected


def _above(rows: Tensor, threshold_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns max(x - tau, 0) for each row, with its threshold tau."""
    # The threshold is at least max - 1, so smaller entries do not matter. Clamping them keeps the sum accurate.
    rows = (rows - rows.amax(dim=-1, keepdim=True)).clamp_(min=-1.0)
    return (rows - threshold_of(rows)).clamp_(min=0.0)


def normalized(weights: Tensor) -> Tensor:
    """Returns each row of weights (..., n) scaled to sum to one; a row of zeros stays zero."""
    return weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _by_sorting(rows: Tensor) -> Tensor:
    """Returns tau with sum max(x - tau, 0) = 1 for each row: (..., 1), the largest (sum of the k largest - 1) / k."""
    descending = rows.sort(dim=-1, descending=True).values
    counts = torch.arange(1, rows.shape[-1] + 1, dtype=rows.dtype, device=rows.device)
    return descending.cumsum(dim=-1).sub_(1.0).div_(counts).amax(dim=-1, keepdim=True)


def _by_newton(rows: Tensor) -> Tensor:
    """Returns the same for long rows with entries in [-1, 0], without sorting them.

    The sum is convex and decreasing in tau. So its tangent at any point reaches 1 at or below tau, and exactly at tau
    once no entry lies between the point and tau. A row that has arrived there stays, however long others take."""
    low = torch.full_like(rows[..., :1], -1.0)
    for _ in range(_NEWTON_STEPS):
        above = (rows - low).clamp_(min=0.0)
        count = above.count_nonzero(dim=-1).unsqueeze(-1).clamp_(min=1)
        higher = low + (above.sum(dim=-1, keepdim=True) - 1.0) / count
        if not (higher > low).any():
            return low
        low = torch.maximum(low, higher)
    return _by_halving(rows)


def _by_halving(rows: Tensor) -> Tensor:
    """Returns the same, up to rounding, by as many operations for all rows: tangents at points that halve an interval.
    No decision depends on a value, so it can be recorded and replayed."""
    low, high = torch.full_like(rows[..., :1], -1.0), torch.zeros_like(rows[..., :1])
    for _ in range(_HALVINGS[rows.dtype]):
        middle = (low + high) / 2
        above = (rows - middle).clamp_(min=0.0)
        count = (above > 0).sum(dim=-1, keepdim=True).clamp_(min=1)
        surplus = above.sum(dim=-1, keepdim=True) - 1.0  # at the middle; the tangent has the slope -count
        low = torch.maximum(low, middle + surplus / count)
        high = torch.where(surplus < 0, torch.minimum(high, middle), high)
        low = torch.minimum(low, high)  # always true except for rounding
    return low


def weighted_threshold(scores: Tensor, prior: Tensor) -> Tensor:
    """Returns prior * max(scores - tau, 0), with tau such that each row sums to one."""
    # tau is at least max - 1 / p of the largest, so nothing below max - 1 / min p matters (as in the projection).
    scores = torch.maximum(scores - scores.amax(dim=-1, keepdim=True), -1.0 / prior.amin(dim=-1, keepdim=True))
    scores, order = scores.sort(dim=-1, descending=True)
    sorted_prior = prior.expand_as(scores).gather(-1, order)
    mass = sorted_prior.cumsum(dim=-1)
    thresholds = ((sorted_prior * scores).cumsum(dim=-1) - 1.0) / mass
    support = (scores > thresholds).sum(dim=-1, keepdim=True).clamp_(min=1)
    weights = sorted_prior * (scores - thresholds.gather(-1, support - 1)).clamp(min=0.0)
    return torch.zeros_like(weights).scatter(-1, order, weights)


def capped_threshold(scores: Tensor, weights: Tensor, caps: Tensor) -> Tensor:
    """Returns clip(weights * (scores - tau), 0, caps), with tau such that each row sums to one.

    The caps must sum to at least one. With weights of one it is the Euclidean projection onto the capped simplex, exact
    for entries of any magnitude."""
    kind, caps = scores.dtype, caps.clamp(max=1.0).double()
    shape = torch.broadcast_shapes(scores.shape, weights.shape, caps.shape)
    scores, order = scores.double().expand(shape).sort(dim=-1, descending=True)
    weights, caps = (t.double().expand(shape).gather(-1, order) for t in (weights, caps))
    ramps = caps / weights  # how far above tau a score reaches its cap
    # A gap wider than the widest ramp does not matter. Narrowing it to that keeps the sums accurate.
    gaps = (scores[..., :-1] - scores[..., 1:]).minimum(ramps.amax(dim=-1, keepdim=True))
    scores = torch.cat([torch.zeros_like(ramps[..., :1]), -gaps.cumsum(dim=-1)], dim=-1)
    # As tau falls, the sum grows with a slope that changes where an entry leaves zero and where it reaches its cap.
    points, turns = torch.cat([scores, scores - ramps], dim=-1).sort(dim=-1, descending=True)
    slopes = torch.cat([weights, -weights], dim=-1).gather(-1, turns).cumsum(dim=-1)[..., :-1].clamp_(min=0.0)
    sums = torch.cat([torch.zeros_like(ramps[..., :1]), (slopes * -points.diff(dim=-1)).cumsum(dim=-1)], dim=-1)
    # The first point where the sum is at least one.
    at = (sums < 1.0).sum(dim=-1, keepdim=True).clamp_(max=points.shape[-1] - 1)
    above = points.gather(-1, at - 1)
    rest = (1.0 - sums.gather(-1, at - 1)) / slopes.gather(-1, at - 1)
    tau = torch.maximum(above - rest, points.gather(-1, at))
    found = torch.minimum((weights * (scores - tau)).clamp(min=0.0), caps)
    return torch.zeros_like(found).scatter(-1, order, found).to(kind)


def cvar_weights(losses: Tensor, caps: Tensor) -> Tensor:
    """Returns the weights that maximise the mean loss: caps filled from the largest loss down, until the sum is one."""
    caps, order = caps.expand_as(losses), losses.argsort(dim=-1, descending=True, stable=True)
    sorted_caps = caps.gather(-1, order).double()
    before = sorted_caps.cumsum(dim=-1) - sorted_caps
    filled = torch.minimum((1.0 - before).clamp(min=0.0), sorted_caps).to(losses.dtype)
    return torch.zeros_like(losses).scatter(-1, order, filled)


def capped_softmax(scores: Tensor, prior: Tensor, caps: Tensor) -> Tensor:
    """Returns min(prior * exp(scores - tau), caps), with tau such that each row sums to one.

    The caps must be a multiple of the prior."""
    kind, shape = scores.dtype, torch.broadcast_shapes(scores.shape, caps.shape)
    scores, order = scores.double().expand(shape).sort(dim=-1, descending=True)
    prior, caps = (t.double().expand(shape).gather(-1, order) for t in (prior, caps))
    logits = prior.log() + scores
    rest = 1.0 - (caps.cumsum(dim=-1) - caps)  # what remains if all before are at their caps
    tails = logits.flip(-1).logcumsumexp(dim=-1).flip(-1)
    full = rest.clamp(min=0.0).log() + logits - tails > caps.log()  # an entry is at its cap only if all before it are
    left = 1.0 - (caps * full).sum(dim=-1, keepdim=True)
    found = torch.where(full, caps, left * logits.masked_fill(full, -torch.inf).softmax(dim=-1))
    return torch.zeros_like(found).scatter(-1, order, found).to(kind)
