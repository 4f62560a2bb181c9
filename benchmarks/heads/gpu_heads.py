"""What forgetting costs a large head on a GPU, how near its update comes to the card's product rate, and its memory.

    python benchmarks/heads/gpu_heads.py

Writes gpu_heads.json. Needs a CUDA device. A block update of n rows takes 6np² operations in three products, in
float64; the rate is compared with that of a plain float64 product of the same size in the same run. Peak memory is in
curvature matrices of 8p² bytes, the batch included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.measure import alternate_on_gpu, ratio, require_cuda, spread, write
from sepsa import RLS

SIZES, ROUNDS = ((4096, 256), (8192, 1024)), 15


def peak(p: int, lam: float, x: Tensor, y: Tensor) -> float:
    """The peak memory of a head during an update after CUDA graphs are captured, in curvature matrices."""
    solver = RLS(forgetting=lam).bind(nn.Linear(p, 10, bias=False, device="cuda"))
    for _ in range(4):
        solver.update(x, y)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    solver.update(x, y)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() / (8 * p * p)  # with the memory pool of the graphs


def main() -> None:
    require_cuda()
    result: dict[str, object] = {"device": torch.cuda.get_device_name()}
    for p, n in SIZES:
        x, y = torch.randn(n, p, device="cuda"), torch.randn(n, 10, device="cuda")
        solvers = {lam: RLS(forgetting=lam).bind(nn.Linear(p, 10, bias=False, device="cuda")) for lam in (1.0, 0.999)}
        calls = {f"forgetting {lam}": partial(solver.update, x, y) for lam, solver in solvers.items()}
        factors = [torch.randn(size, p, dtype=torch.float64, device="cuda") for size in (n, p)]
        contestants: dict[str, Callable[[], object]] = {**calls, "product": partial(torch.mm, *factors)}
        times = alternate_on_gpu(contestants, ROUNDS, warm_up=2)
        del contestants, factors, calls, solvers
        share = [3 * t / s for t, s in zip(times["product"], times["forgetting 1.0"], strict=True)]
        peaks = {}
        for name, lam in (("forgetting 1.0", 1.0), ("forgetting 0.999", 0.999)):
            peaks[name] = peak(p, lam, x, y)
            print(f"p {p}, n {n}, {name}: peak {peaks[name]:.2f} curvatures")
        row = {
            "seconds": {name: spread(values) for name, values in times.items()},
            "forgetting 0.999 / 1": ratio(times, "forgetting 0.999", "forgetting 1.0"),
            "share of the product rate": spread(share),
            "peak in curvatures": peaks,
        }
        result[f"p {p}, n {n}"] = row
        r, s = row["forgetting 0.999 / 1"], row["share of the product rate"]
        print(f"p {p}, n {n}: {row['seconds']['forgetting 1.0']['median'] * 1e3:.2f} ms, forgetting {r['median']:.3f}")  # type: ignore[index]
        print(f"p {p}, n {n}: {s['median']:.0%} of the product rate")  # type: ignore[index]
    write(__file__, result)


if __name__ == "__main__":
    main()
