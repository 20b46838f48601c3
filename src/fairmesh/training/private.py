"""Private runs: what they refuse, how they stop at the budget, and what their folder keeps to continue them."""

from collections.abc import Sequence

from fairmesh.algorithms.base import Algorithm, unmeasured
from fairmesh.errors import BadInput
from fairmesh.personalization.base import Personalization
from fairmesh.problems.objective import Objective
from fairmesh.problems.prepared import Prepared
from fairmesh.training.options import Options


def refuse_with_privacy(
    problem: Prepared, algorithms: Sequence[Algorithm], options: Options, personalization: Personalization | None
) -> None:
    """Raises BadInput for settings that read training rows in another way than the mechanism does."""
    rows, named = "reads training rows without noise", [name for a in algorithms for name in unmeasured(a)]
    objective, plain = problem.objective, Objective()
    reasons = {
        f"sampling.order = {problem.sampling.order!r}": problem.sampling.order != "random"
        and "is no Poisson sampling of units, which the accounting needs; leave it out",
        "sampling.batches_per_step": problem.sampling.batches_per_step > 1
        and "takes several draws for one gradient; use a larger batch",
        f"objective.judged_on = {objective.judged_on!r}": objective.judged_on != plain.judged_on and rows,
        f"objective.against = {objective.against!r}": objective.against is not None and rows,
        "objective.discount_noise": objective.discount_noise and rows,
        "objective.validated_decay": bool(objective.validated_decay) and rows + "; name a weight_decay",
        "objective.subgroups": objective.subgroups is not None and rows,
        "trainer": problem.trainer is not None and "is code of your own, whose steps nobody accounts for",
        "parts": problem.flat_model.own_dim > 0 and "keeps parts at a site, which are trained without noise",
        "batch_norm": len(problem.flat_model.momenta) > 0
        and 'has statistics over a batch, which mix units; use "frozen" or "convert"',
        "personalization": personalization is not None
        and "tells other sites sums over training rows; adapt the common model inside your site instead",
        "options.compare_weights": bool(options.compare_weights) and "trains twice on the same rows",
        "options.choose_weights": bool(options.choose_weights) and "trains several times on the same rows",
        "augment": problem.augmenter is not None
        and not problem.augmenter.with_model
        and "sees several units at once; use a function (inputs, draw) -> inputs",
        f"algorithm.{' and '.join(dict.fromkeys(named))}": bool(named)
        and "would be measured on training rows before round 0; name a number",
        "options.precision": options.precision != "float32" and "computes norms too coarsely; leave it out",
        "streamed data": any(samples.stream for samples in problem.train_sets)
        and "is not read by units; a private run needs samples in memory",
        "this model": bool(problem.why_not_stacked)
        and f"has no gradients of single units, since torch.vmap cannot run it: {problem.why_not_stacked}",
    }
    for what, why in reasons.items():
        if why:
            raise BadInput(f"privacy: {what} {why} (docs/concepts/privacy.md lists what goes with privacy)")
