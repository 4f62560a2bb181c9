"""A low-rank matrix with most entries missing, factorized entry by entry: each factor is linear given the other.

    python examples/matrix_factorization.py --figure matrix_factorization.png

M_ij ≈ u_i · v_j. With v_j fixed, u_i is the weight of a linear head with features v_j, and vice versa; so each row and
each column has its own head, and two heads learn from an entry. They forget, because their features change.
"""

from __future__ import annotations

import argparse

import torch
from matplotlib import pyplot as plt
from torch import Tensor, nn

from sepsa import RLS

ROWS, COLUMNS, RANK, PASSES = 60, 50, 3, 6


def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Return the matrix, and the entries to learn and those to test on, each (n, 2)."""
    torch.manual_seed(0)
    M = torch.randn(ROWS, RANK) @ torch.randn(COLUMNS, RANK).T + 0.05 * torch.randn(ROWS, COLUMNS)
    entries = torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLUMNS))[torch.randperm(ROWS * COLUMNS)]
    return M, entries[:900], entries[900:]


def by_heads(M: Tensor, seen: Tensor, unseen: Tensor) -> list[float]:
    def heads(count: int) -> list[RLS]:
        return [RLS(ridge=0.1, forgetting=0.9).bind(nn.Linear(RANK, 1, bias=False)) for _ in range(count)]

    def weight(head: RLS) -> Tensor:
        assert head.linear is not None
        return head.linear.weight.detach()

    u, v = heads(ROWS), heads(COLUMNS)
    errors = []
    for _ in range(PASSES):
        for i, j in seen[torch.randperm(len(seen))].tolist():
            entry = M[i, j].view(1, 1)
            u[i].update(weight(v[j]), entry)
            v[j].update(weight(u[i]), entry)
        U, V = (torch.cat([weight(head) for head in factor]) for factor in (u, v))
        errors.append(rmse(M, U, V, unseen))
    return errors


def by_adam(M: Tensor, seen: Tensor, unseen: Tensor) -> list[float]:
    U, V = nn.Parameter(0.5 * torch.randn(ROWS, RANK)), nn.Parameter(0.5 * torch.randn(COLUMNS, RANK))
    optimizer = torch.optim.Adam([U, V], lr=1e-2)
    errors = []
    for _ in range(PASSES):
        for i, j in seen[torch.randperm(len(seen))].tolist():
            (M[i, j] - U[i] @ V[j]).square().backward()
            optimizer.step()
            optimizer.zero_grad()
        errors.append(rmse(M, U.detach(), V.detach(), unseen))
    return errors


def rmse(M: Tensor, U: Tensor, V: Tensor, entries: Tensor) -> float:
    i, j = entries.T
    return float((M - U @ V.T)[i, j].square().mean().sqrt())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--figure", default="matrix_factorization.png")
    path = parser.parse_args().figure
    fig, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, method in (("two heads an entry", by_heads), ("Adam on both factors", by_adam)):
        errors = method(*problem())
        print(f"{name}: error on entries never seen {errors[0]:.3f} after one pass, {errors[-1]:.3f} after {PASSES}")
        ax.plot(range(1, PASSES + 1), errors, "o-", label=name)
    ax.axhline(0.05, color="k", lw=0.8, ls=":", label="noise")
    ax.set(xlabel="passes over 900 of 3,000 entries", ylabel="error on entries never seen", yscale="log")
    ax.legend()
    fig.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
