"""What each Triton kernel of the head solvers gains over plain torch inside the same CUDA graph.

    PYTHONPATH=src python benchmarks/kernels.py [--rounds 15]

Needs a CUDA device and Triton. For each file and size: the captured update of a head as one CUDA graph of 64 updates,
recorded once with the kernels and once with torch's operators, replayed in turn. `ratio` is the time with the kernels
over that with torch: a file whose ratios are above 0.9 does not earn its lines. For `finish`, the update of T after a
block, both contestants have the kernels before it. `linalg` and `ridge` are parts of the others and have no figure of
their own. Where the kernels cannot compute a size, both contestants are torch, and "kernels" says false.
Writes kernels.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from measure import alternate_on_gpu, machine, ratio, require_cuda, spread, write
from torch import Tensor, nn

from sepsa import RLS, SelfTuning, SoftmaxNewton
from sepsa.heads.backends import choose
from sepsa.heads.backends.choose import UpdateSize, force
from sepsa.heads.math.least_squares import andrews

SIZES = ((129, 64), (51, 1), (769, 512))  # p with the bias, and the batch
CLASSES, UPDATES = 10, 64
FINISH = "triton/finish.py"
SOLVERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "triton/least_squares.py": ("captured least squares", RLS),
    "triton/least_squares.py, forgetting 0.999": ("captured least squares", lambda: RLS(forgetting=0.999)),
    FINISH: ("captured least squares", RLS),
    "triton/cross_entropy.py": ("captured cross-entropy", SoftmaxNewton),
    "SelfTuning, members on streams": ("captured least squares", SelfTuning),
}


def batch(name: str, p: int, n: int) -> tuple[Tensor, Tensor]:
    """Features and targets as a head in training sees them, of unit size."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, p - 1, generator=generator)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    return x.cuda(), (labels if "entropy" in name else nn.functional.one_hot(labels, CLASSES).float()).cuda()


def finish_in_torch(T: Tensor, products: Tensor, fading: Tensor, finite: Tensor, fades: bool, buffers: Any) -> None:
    """`triton.finish.finish` by torch's operators, at forgetting 1."""
    n, p = len(products), len(T)
    C, U, F = products[:, :n], products[:, n : n + p], products[:, n + p :].T
    T.copy_(andrews(T, F, U, torch.linalg.cholesky_ex(C).L))


def recorded(name: str, make: Callable[[], Any], p: int, n: int, backend: str | None) -> Any:
    """A graph of `UPDATES` captured updates."""
    x, y = batch(name, p, n)
    torch.manual_seed(0)
    solver = make().bind(nn.Linear(p - 1, CLASSES, device="cuda"))
    rows = (torch.arange(n, device="cuda"),) if isinstance(solver, SelfTuning) else ()
    solver.prepare_capture(*((x, y) if rows else ()))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def step() -> None:
        solver.update_captured(x, y, *rows)
        solver.finish_captured()

    patched = mock.patch("sepsa.heads.backends.triton.least_squares.finish", finish_in_torch)
    in_torch = backend == "torch" and name == FINISH
    with patched if in_torch else force(backend):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(UPDATES):
                step()
    return graph, solver  # whose memory the graph writes to


def measured(name: str, table: str, make: Callable[[], Any], p: int, n: int, rounds: int) -> dict[str, Any]:
    """Times of an update with the kernels and without."""
    solver = make()
    restored = n if "entropy" in name else int(getattr(solver, "forgetting", 1.0) < 1.0)
    case = UpdateSize("cuda", torch.float64, p, CLASSES, n, restored)
    graphs = {"kernels": recorded(name, make, p, n, None), "torch": recorded(name, make, p, n, "torch")}
    times = alternate_on_gpu({key: graph.replay for key, (graph, _) in graphs.items()}, rounds)
    each = {key: [second / UPDATES for second in values] for key, values in times.items()}
    return {
        "kernels": choose.choose(table, case).backend == "triton",
        "seconds": {key: spread(values) for key, values in each.items()},
        "ratio": ratio(each, "kernels", "torch"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    require_cuda()
    result: dict[str, Any] = {}
    for name, (table, make) in SOLVERS.items():
        for p, n in SIZES:
            row = measured(name, table, make, p, n, arguments.rounds)
            result[f"{name}; p {p}, batch {n}"] = row
            r = row["ratio"]
            print(f"{name}; p {p}, batch {n}: kernels / torch {r['median']:.3f} [{r['q25']:.3f}, {r['q75']:.3f}]")
    write(__file__, machine() | {"updates": UPDATES, "classes": CLASSES, "kernels": result})


if __name__ == "__main__":
    main()
