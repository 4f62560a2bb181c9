"""What variance reduction of the body does: STORM beside SGD under SepSA, by the same samples.

    SEPSA_DATA=... python benchmarks/variance_reduction.py

Writes variance_reduction.json and, from it, variance_reduction.png. First the synthetic problem of
src/sepsa/paper/convergence.py, one sample a step, the body's learning rate d/(50 + k) with d = 16, as there, and 8, the
mixing 3/k: the objective above its minimum, and its slope in log–log with the 95 % interval over the seeds. Beside it
stands (noise²/2)(p + q)/k, the Cramér–Rao bound for unbiased estimates from k samples: variance reduction cannot make
the noise of the samples go away, only what the method adds to it.
Then Energy, batches of 32, 50 epochs, the whole batch to the head: train and test error of SGD, STORM with mixing 0.1
and Adam at three learning rates each, for two heads. STORM evaluates the model twice a step, the others once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from measure import write
from torch.nn.functional import mse_loss

from sepsa import RLS, STORM, SepSA
from sepsa.paper import convergence
from sepsa.paper.convergence import APART, BUMPS, NOISE, OVERLAPPING, half_square, marks, slope
from sepsa.paper.data import Dataset, load
from sepsa.paper.networks import for_dataset

STEPS, SEEDS = 4_000, 8
DECAYS = (16.0, 8.0)
EPOCHS, BATCH, ENERGY_SEEDS = 50, 32, 5
LEARNING_RATES: dict[str, tuple[float, ...]] = {
    "SGD": (1e-4, 1e-3, 1e-2),
    "STORM": (1e-4, 1e-3, 1e-2),
    "Adam": (1e-3, 1e-2, 1e-1),
}
HEADS = {"ridge 1, forgetting 1": (1.0, 1.0), "ridge 0.1, forgetting 0.8": (0.1, 0.8)}
STYLES = {"SGD": ("#000000", ":"), "STORM": ("#D55E00", "-"), "Adam": ("#0072B2", "--")}


def follow(spacing: float, base: Any, d: float, seed: int) -> list[float]:
    """The objective above its minimum at each of the marks."""
    x, model, clean, drawn, noise = convergence.away_from_optimum(spacing, seed, STEPS)
    optimizer = SepSA(model, base, solver=RLS(bias_ridge="ridge"), lr=1.0)
    looked_at, gaps = set(marks(STEPS)), []
    for k in range(1, STEPS + 1):
        row = drawn[k - 1 : k]
        optimizer.param_groups[0]["lr"] = d / (convergence.K0 + k)
        if base is STORM:
            optimizer.param_groups[0]["mixing"] = min(1.0, 3 / k)
        optimizer.learn(x[row], clean[row] + noise[k - 1], half_square)
        if k in looked_at:
            gaps.append(half_square(model(x), clean).item())
    return gaps


def energy(data: Dataset, method: str, lr: float, head: tuple[float, float], seed: int) -> dict[str, list[float]]:
    """Train and test error after each epoch; NaN from where it diverged."""
    torch.manual_seed(seed)
    model = for_dataset(data)
    base = {"SGD": torch.optim.SGD, "STORM": STORM, "Adam": torch.optim.Adam}[method]
    optimizer = SepSA(model, base, solver=RLS(ridge=head[0], forgetting=head[1], bias_ridge="ridge"), lr=lr)
    train, test = [float("nan")] * EPOCHS, [float("nan")] * EPOCHS
    for epoch in range(EPOCHS):
        try:
            for rows in torch.randperm(len(data.train_inputs)).split(BATCH):
                optimizer.learn(data.train_inputs[rows], data.train_targets[rows], mse_loss)
        except ValueError:  # the body diverged, and the head refuses its features
            break
        with torch.no_grad():
            train[epoch] = mse_loss(model(data.train_inputs), data.train_targets).item()
            test[epoch] = mse_loss(model(data.test_inputs), data.test_targets).item()
    return {"train": train, "test": test}


def synthetic() -> dict[str, Any]:
    found: dict[str, Any] = {"k": marks(STEPS)}
    for name, spacing in (("apart", APART), ("overlapping", OVERLAPPING)):
        for d in DECAYS:
            runs = {m: np.array([follow(spacing, b, d, s) for s in range(SEEDS)]) for m, b in METHODS.items()}
            ratio = np.exp(np.log(runs["STORM"][:, -1] / runs["SGD"][:, -1]).mean())
            case = {
                method: {"mean": values.mean(0).tolist(), "slope": slope(np.array(marks(STEPS), float), values)}
                for method, values in runs.items()
            }
            found[f"{name}, d = {d:g}"] = case | {"ratio at the end": float(ratio)}
            ends = ", ".join(
                f"{m} {case[m]['mean'][-1]:.2e} (slope {case[m]['slope'][0]:.2f}, "
                f"{case[m]['slope'][1]:.2f} to {case[m]['slope'][2]:.2f})"
                for m in METHODS
            )
            print(
                f"bumps {name}, d = {d:g}: {ends}; STORM/SGD in the geometric mean over seeds {ratio:.2f}", flush=True
            )
    return found


METHODS = {"SGD": torch.optim.SGD, "STORM": STORM}


def energies() -> dict[str, Any]:
    data, found = load("energy"), {}
    for head, settings in HEADS.items():
        for method, rates in LEARNING_RATES.items():
            for lr in rates:
                runs = [energy(data, method, lr, settings, seed) for seed in range(ENERGY_SEEDS)]
                curves = {part: np.array([run[part] for run in runs]) for part in ("train", "test")}
                found[f"{head}; {method} {lr:g}"] = {
                    "seeds": {part: numbers(values[:, -1]) for part, values in curves.items()},
                    "mean": {part: numbers(values.mean(0)) for part, values in curves.items()},
                }
                ends = ", ".join(f"{part} {values[:, -1].mean():.3f}" for part, values in curves.items())
                print(f"Energy, {head}, {method} at {lr:g}: {ends}", flush=True)
    return found


def numbers(values: Any) -> list[float | None]:
    """As JSON has them: NaN is null."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]


def draw(result: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    axes = figure.subplots(1, 3)
    k = np.array(result["synthetic"]["k"])
    for axis, name in zip(axes, ("apart", "overlapping"), strict=False):
        for method in METHODS:
            colour, style = STYLES[method]
            for d, width in zip(DECAYS, (2.0, 1.0), strict=True):
                values = result["synthetic"][f"{name}, d = {d:g}"][method]["mean"]
                axis.loglog(k, values, color=colour, linestyle=style, linewidth=width, label=f"{method}, d = {d:g}")
        axis.loglog(k, NOISE**2 / 2 * (2 * BUMPS + 1) / k, color="#707070", linewidth=0.8, label="Cramér–Rao bound")
        axis.set(title=f"Bumps {name}", xlabel="samples k", ylabel="objective above its minimum", ylim=(1e-5, 10))
        axis.legend(fontsize=7)
    for method in LEARNING_RATES:
        colour, style = STYLES[method]
        for head, width in zip(HEADS, (1.0, 2.0), strict=True):
            cases = [result["energy"][f"{head}; {method} {lr:g}"]["mean"] for lr in LEARNING_RATES[method]]
            best = min(cases, key=lambda case: np.inf if case["train"][-1] is None else case["train"][-1])
            label = f"{method}, forgetting {HEADS[head][1]:g}"
            axes[2].semilogy(best["test"], color=colour, linestyle=style, linewidth=width, label=label)
    axes[2].set(title="Energy, best of three learning rates", xlabel="epoch", ylabel="test error")
    axes[2].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    print(f"drawn in {path}")


def main() -> None:
    torch.set_num_threads(1)
    settings = {"steps": STEPS, "seeds": SEEDS, "epochs": EPOCHS, "batch": BATCH, "energy_seeds": ENERGY_SEEDS}
    write(__file__, {"settings": settings, "energy": energies(), "synthetic": synthetic()})
    path = Path(__file__)
    draw(json.loads(path.with_suffix(".json").read_text()), path.with_suffix(".png"))


if __name__ == "__main__":
    main()
