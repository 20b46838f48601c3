"""How good the model of a site alone is, next to ridge regression with the penalty that leaving out single rows finds,
or to logistic regression with a validated L2 penalty: `python -m reproduction.alone`."""

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairmesh.comparisons.alone import FOLDS, regularised
from fairmesh.personalization.cross_fit import CrossFit
from fairmesh.problems.prepared import Prepared
from fairmesh.problems.problem import prepare
from reproduction.decay import Planted, in_lines

FILE = Path(__file__).parent / "results" / "alone.json"
ROUNDS = 600
# The sites train alone, so it does not matter that they share a rule.
PROBLEMS = {
    "few rows, many columns": Planted(30, 60, sites=20),
    "few rows": Planted(30, 10, sites=20),
    "correlated columns": Planted(40, 30, correlated=0.9, sites=20),
    "many rows": Planted(400, 20, sites=10),
    "much noise": Planted(50, 20, noise=3.0, sites=20),
    "little noise": Planted(30, 10, noise=0.2, sites=20),
    "labels, few rows": Planted(40, 30, noise=0.4, labels=True, sites=20),
    "labels, many rows": Planted(200, 10, noise=0.4, labels=True, sites=10),
    "labels, correlated columns": Planted(40, 30, noise=0.4, correlated=0.9, labels=True, sites=20),
    "network": Planted(60, 8, noise=0.3, hidden=32, sites=10),
    "labels, network": Planted(60, 8, noise=0.3, hidden=32, labels=True, sites=10),
}


def fitted(problem: Prepared, rounds: int = ROUNDS) -> Tensor:
    """Returns the model of every site alone (sites, dim)."""
    fit = CrossFit(problem, range(problem.n), FOLDS, 0, torch.device("cpu"), torch.float32)
    start = problem.initial_row(0).float().expand(problem.n, -1)
    return regularised(fit, start, rounds).models[:, -1]


def error_of(problem: Prepared, i: int, outputs: Tensor) -> float:
    """Returns the share of wrong labels, or the mean squared error in units of the targets' variance, on a site's test
    rows."""
    targets = problem.sites[i].test.targets
    if problem.classes is not None:
        return 1.0 - float(problem.right(outputs, targets).double().mean())
    return float((outputs - targets).square().mean() / targets.var())


def ridge_outputs(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Returns what ridge regression predicts, with the penalty whose squared error on left-out rows is the least."""
    mean, rows = x.mean(axis=0), len(x)
    left, singular, right = np.linalg.svd(x - mean, full_matrices=False)
    best, chosen = np.inf, np.zeros(x.shape[1])
    for penalty in np.logspace(-2, 4, 13):
        shrunk = singular**2 / (singular**2 + penalty)
        hat = (left * shrunk) @ left.T
        residuals = (y - y.mean() - hat @ (y - y.mean())) / (1 - np.diag(hat) - 1 / rows)
        if (residuals**2).mean() < best:
            best = (residuals**2).mean()
            chosen = right.T @ ((left.T @ (y - y.mean())) * singular / (singular**2 + penalty))
    return (test - mean) @ chosen + y.mean()


def logistic_outputs(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Returns the probabilities of logistic regression, with the L2 penalty that is most often right in five folds."""
    from sklearn.linear_model import LogisticRegressionCV

    return LogisticRegressionCV(Cs=list(np.logspace(-4, 2, 7)), cv=5, max_iter=1000).fit(x, y).predict_proba(test)  # type: ignore[arg-type]


def compared(name: str) -> dict[str, float]:
    """Returns the mean error over sites of the sites' models and, for a linear model, of its rival."""
    planted = PROBLEMS[name]
    problem = prepare(planted.problem(0))
    rows = fitted(problem)
    errors: dict[str, list[float]] = {"alone": [], "rival": []}
    for i, site in enumerate(problem.sites):
        errors["alone"].append(error_of(problem, i, problem.flat_model(rows[i], site.test.inputs)))
        if planted.hidden:
            continue
        x, test = site.train.inputs.double().numpy(), site.test.inputs.double().numpy()
        y = site.train.targets.numpy()
        if planted.labels:
            outputs = torch.tensor(logistic_outputs(x, y, test))
        else:
            outputs = torch.tensor(ridge_outputs(x, y[:, 0].astype(float), test))[:, None]
        errors["rival"].append(error_of(problem, i, outputs))
    return {key: round(float(np.mean(values)), 4) for key, values in errors.items() if values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the recorded table")
    parser.add_argument("--file", type=Path, default=FILE)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    table: dict[str, Any] = json.loads(given.file.read_text()) if given.file.is_file() else {}
    for name in () if given.show else PROBLEMS:
        table[name] = table.get(name, {}) | compared(name)  # "before" stays: it is of the rule that stopped early
        print(name, table[name], flush=True)
        given.file.write_text(in_lines(table))
    print(f"{'problem':28} {'before':>8} {'alone':>8} {'ridge or logistic':>18}")
    for name, row in table.items():
        cells = [f"{row[key]:.4f}" if key in row else "" for key in ("before", "alone", "rival")]
        print(f"{name:28} {cells[0]:>8} {cells[1]:>8} {cells[2]:>18}")


if __name__ == "__main__":
    main()
