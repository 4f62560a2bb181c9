"""What one step costs with each head solver, beside RLS and plain Adam, alternating in one process.

    python benchmarks/solver_cost.py

Writes solver_cost.json. The paper's network for the regressions, 8-50-2, online and in batches of 32, a whole SepSA
step with Adam for the body; then the head alone, 128 features and a bias, 10 outputs, batches of 64. Ratios are to
Adam's step on the same network, or to the update of RLS. The classifying heads get classes for targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from measure import alternate, ratio, spread, write
from step_cost import adam_step, network
from torch import Tensor, nn

from sepsa import RLS, OnlineLBFGS, SepSA
from sepsa.heads.softmax import SoftmaxNewton
from sepsa.paper.networks import fnn
from sepsa.paper.slimtik import SlimTik

SOLVERS: dict[str, Callable[[], Any]] = {
    "RLS": RLS,
    "RLS, forgetting 0.99": lambda: RLS(forgetting=0.99),
    "RLS, self-tuning": lambda: RLS(forgetting="auto", ridge="auto"),
    "SlimTik": SlimTik,
    "SoftmaxNewton": SoftmaxNewton,
    "OnlineLBFGS": OnlineLBFGS,
    "OnlineLBFGS, cross-entropy": lambda: OnlineLBFGS(loss="cross-entropy"),
}


def targets_for(name: str, n: int, m: int) -> Tensor:
    classify = name in ("SoftmaxNewton", "OnlineLBFGS, cross-entropy")
    return torch.eye(m)[torch.randint(m, (n,))] if classify else torch.randn(n, m)


def new_samples(step: Callable[[Tensor, Tensor], object], name: str, n: int, k: int, m: int) -> Callable[[], object]:
    """The step on one of 64 batches in turn: solvers that know a sample again should not know all of them."""
    batches = [(torch.randn(n, k), targets_for(name, n, m)) for _ in range(64)]
    turn = 0

    def run() -> object:
        nonlocal turn
        turn = (turn + 1) % len(batches)
        return step(*batches[turn])

    return run


def main() -> None:
    torch.manual_seed(0)
    result: dict[str, Any] = {}
    for case, n in (("online FNN, 8-50-2, batch 1", 1), ("mini-batch FNN, 8-50-2, batch 32", 32)):
        contestants = {"Adam": adam_step(network(lambda: fnn(8, 2)), torch.randn(n, 8), torch.randn(n, 2))}
        for name, make in SOLVERS.items():
            optimizer = SepSA(network(lambda: fnn(8, 2)), torch.optim.Adam, solver=make(), lr=1e-3, weight_decay=1e-5)
            contestants[name] = new_samples(optimizer.learn, name, n, 8, 2)
        result[case] = compare(contestants, "Adam")
    contestants = {}
    for name, make in SOLVERS.items():
        contestants[name] = new_samples(make().bind(nn.Linear(128, 10)).update, name, 64, 128, 10)
    result["head alone, p = 129, 10 outputs, batch 64"] = compare(contestants, "RLS")
    for case, rows in result.items():
        print(case)
        for name, row in rows.items():
            print(
                f"  {name:27s} {row['seconds']['median'] * 1e6:8.0f} µs, "
                f"ratio {row['ratio']['median']:.2f} [{row['ratio']['q25']:.2f}, {row['ratio']['q75']:.2f}]"
            )
    write(__file__, {"cases": result})


def compare(contestants: dict[str, Callable[[], object]], to: str) -> dict[str, Any]:
    times = alternate(contestants, 51)
    return {name: {"seconds": spread(times[name]), "ratio": ratio(times, name, to)} for name in contestants}


if __name__ == "__main__":
    main()
