"""How near SoftmaxNewton and Adam come to the optimum of a regularized multinomial logistic regression in three passes.

    python benchmarks/softmax_newton.py
    python benchmarks/softmax_newton.py --blocks      # softmax_blocks.json: a large block by sums and by the root

MNIST's pixels reduced to 100 principal components, batches of 64, one head for all ten classes, zero at the start. The
optimum of mean cross-entropy + |W|²/2n is scikit-learn's; the excess over it is taken on all training images ten times
a pass. Adam minimizes the same sum with five learning rates. Writes softmax_newton.json and softmax_newton.svg. Needs
the extra `reproduction` and MNIST where `python -m reproduction run` looks for it. Result: the excess of SoftmaxNewton
is a third of that of the best Adam; with curvature that fades otherwise, and with Böhning's bound, it is in the table
too.
"""

from __future__ import annotations

import itertools
import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measure import alternate, ratio, spread, write
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from reproduction.data import load
from sepsa import SoftmaxNewton
from sepsa.heads.math import cross_entropy as softmax_newton

RIDGE, BATCH, PASSES, POINTS, SEEDS = 1.0, 64, 3, 10, (0, 1, 2)
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
FADES = (1.0, 3.0, 7.0, 15.0)


def components() -> tuple[Tensor, Tensor]:
    data = load("mnist")
    X = data.train_inputs.flatten(1).double()
    X = X - X.mean(0)
    _, vectors = torch.linalg.eigh(X.T @ X)
    return X @ vectors[:, -100:], data.train_targets.argmax(1)


def optimum(X: Tensor, y: Tensor) -> Tensor:
    from sklearn.linear_model import LogisticRegression

    ones = torch.cat([X, torch.ones(len(X), 1)], 1)  # the bias is regularized like all else
    fit = LogisticRegression(C=1 / RIDGE, fit_intercept=False, tol=1e-8, max_iter=2000).fit(ones.numpy(), y.numpy())
    return torch.from_numpy(fit.coef_)


def objective(W: Tensor, X: Tensor, y: Tensor) -> float:
    logits = X @ W[:, :-1].T + W[:, -1]
    return float(cross_entropy(logits, y) + RIDGE / 2 / len(X) * W.square().sum())


def weights(linear: nn.Linear) -> Tensor:
    return torch.cat([linear.weight, linear.bias[:, None]], 1).detach()


class Boehning:
    """The same head by the bound of Böhning (1992): (I - 11ᵀ/K)/2 above every diag P - PPᵀ, so A = ΦᵀΦ/2."""

    def __init__(self, linear: nn.Linear) -> None:
        self.linear = linear
        self.A = RIDGE * torch.eye(linear.in_features + 1, dtype=torch.float64)

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor) -> None:
        Phi = torch.cat([x, torch.ones(len(x), 1)], 1)
        self.A += Phi.T @ Phi / 2
        gradient = (self.linear(x).softmax(1) - nn.functional.one_hot(y, 10)).T @ Phi
        step = torch.linalg.solve(self.A, gradient.T).T
        self.linear.weight -= step[:, :-1]
        self.linear.bias -= step[:, -1]


class Adam:
    def __init__(self, linear: nn.Linear, lr: float, n: int) -> None:
        self.linear = linear
        self.optimizer = torch.optim.Adam(linear.parameters(), lr=lr, weight_decay=RIDGE / n)

    def update(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.linear(x), y).backward()
        self.optimizer.step()


def curve(name: str, setting: float, X: Tensor, y: Tensor, least: float, seed: int) -> list[float]:
    """The excess ten times a pass."""
    linear = nn.Linear(X.shape[1], 10, dtype=torch.float64)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    softmax_newton.FADE = setting if name == "SoftmaxNewton" else softmax_newton.FADE
    learner: Adam | Boehning | SoftmaxNewton
    if name == "Adam":
        learner = Adam(linear, setting, len(X))
    else:
        learner = Boehning(linear) if name == "Böhning" else SoftmaxNewton(ridge=RIDGE, bias_ridge="ridge").bind(linear)
    generator = torch.Generator().manual_seed(seed)
    batches = [rows for _ in range(PASSES) for rows in torch.randperm(len(X), generator=generator).split(BATCH)]
    marks = {round(i * len(batches) / PASSES / POINTS) for i in range(1, PASSES * POINTS + 1)}
    excess = []
    for i, rows in enumerate(batches, 1):
        learner.update(X[rows], y[rows])
        if i in marks:
            excess.append(objective(weights(linear), X, y) - least)
    return excess


def draw(curves: dict[str, list[float]], file: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, values in curves.items():
        axes.semilogy(np.arange(1, len(values) + 1) / POINTS, values, label=name, lw=2 if "Newton" in name else 1)
    axes.set(xlabel="passes", ylabel="excess over the optimal loss", xlim=(0, PASSES))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def time_blocks() -> None:
    """Milliseconds of an update of n samples, 10 classes, with A and with T as the state, in turns."""
    torch.set_num_threads(1)
    result, limit = {}, softmax_newton.SMALL
    for p, share in itertools.product((65, 129, 385, 769), (1 / 3, 1, 4)):
        n = math.ceil(share * p)
        x, y, updates = torch.randn(n, p - 1), torch.randint(10, (n,)), {}
        for name, small in (("sums", limit), ("root", p)):  # a head of up to `small` columns has T
            solver = SoftmaxNewton().bind(nn.Linear(p - 1, 10))
            updates[name] = partial(update_with, small, solver, x, y)
        times = alternate(updates, rounds=15)
        result[f"p {p}, n {n}"] = {name: 1e3 * spread(times[name])["median"] for name in updates}
        result[f"p {p}, n {n}"]["sums_of_root"] = ratio(times, "sums", "root")
        print(p, n, result[f"p {p}, n {n}"], flush=True)
    softmax_newton.SMALL = limit
    write("softmax_blocks", result)


def update_with(small: int, solver: SoftmaxNewton, x: Tensor, y: Tensor) -> None:
    softmax_newton.SMALL = small
    solver.update(x, y)


def main() -> None:
    if "--blocks" in sys.argv[1:]:
        time_blocks()
        return
    X, y = components()
    best = optimum(X, y)
    least = objective(best, X, y)
    kinds = [("SoftmaxNewton", fade) for fade in FADES] + [("Adam", lr) for lr in LEARNING_RATES] + [("Böhning", 0.0)]
    default = softmax_newton.FADE
    rows = []
    for name, setting in kinds:
        curves = [curve(name, setting, X, y, least, seed) for seed in SEEDS]
        rows.append({"method": name, "setting": setting, "excess": np.mean(curves, 0).tolist()})
        rows[-1]["final"] = [values[-1] for values in curves]
        print(f"{name:14} {setting:<6g} excess after {PASSES} passes {np.mean(rows[-1]['final']):.4f}", flush=True)
    softmax_newton.FADE = default

    def final(row: dict[str, object]) -> float:
        return float(np.mean(row["final"]))

    newton = next(row for row in rows if row["setting"] == default and row["method"] == "SoftmaxNewton")
    adam = min((row for row in rows if row["method"] == "Adam"), key=final)
    ratio = final(newton) / final(adam)
    print(f"SoftmaxNewton {final(newton):.4f}, best Adam {final(adam):.4f} at {adam['setting']:g}: ratio {ratio:.3f}")
    write(__file__, {"optimal_loss": least, "ratio": ratio, "adam_lr": adam["setting"], "seeds": SEEDS, "rows": rows})
    names = {"SoftmaxNewton": newton, f"Adam, lr {adam['setting']:g} (best of five)": adam, "Böhning's bound": rows[-1]}
    draw({name: row["excess"] for name, row in names.items()}, Path(__file__).with_suffix(".svg"))


if __name__ == "__main__":
    main()
