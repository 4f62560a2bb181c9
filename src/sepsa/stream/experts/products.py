"""Squares and products of two inputs as features of a recursive-least-squares head."""

from __future__ import annotations

from sepsa.stream.engine.kernels.compilation import called, kernel
from sepsa.stream.engine.kernels.head import rank_one
from sepsa.stream.engine.kernels.views import Group, Views
from sepsa.stream.experts.expert import Expert, row

PAIRED = 10  # inputs of which products are taken
RIDGE = 10.0
FARTHEST = 1e6  # deviations of the targets, to which an answer is clipped


def features(inputs: int, outputs: int) -> int:
    """The number of features."""
    paired = min(inputs, PAIRED)
    return 1 + paired * (paired + 3) // 2


PARTS = {
    "W": (float, ("outputs", "products")),
    "U": (float, ("product_triangle",)),
    "D": (float, ("products",)),
}
WORK = {"PHI": (float, ("products",)), "B": (float, ("products",)), "GAIN": (float, (1,))}
SIZES = {"products": features, "product_triangle": lambda d, m: features(d, m) * (features(d, m) - 1) // 2}
GROUP = Group("products", PARTS, WORK, SIZES)
parts, work = Views(GROUP, "state", PARTS), Views(GROUP, "workspace", WORK)


@called
def expand(z, phi):
    """φ = [1, z_0, z_0², z_1, z_1 z_0, z_1², …] of the first inputs; a further input adds features at the end."""
    phi[0] = 1.0
    at, j = 1, 0
    while at < phi.size:
        phi[at] = z[j]
        for i in range(j + 1):
            phi[at + 1 + i] = z[j] * z[i]
        at += j + 2
        j += 1


@kernel(cost=0.6)
def answer(model, e):
    W, phi, out = parts.W(model), work.PHI(model), row.ANSWERS(model)[e]
    expand(row.Z(model), phi)
    for k in range(out.size):
        total, weights = 0.0, W[k]
        for j in range(phi.size):
            total += weights[j] * phi[j]
        out[k] = min(max(total, -FARTHEST), FARTHEST)
    return 0


@kernel(cost=1.2)
def learn(model, e):
    W, phi, b, trust = parts.W(model), work.PHI(model), work.B(model), row.TRUST(model)[0]
    expand(row.Z(model), phi)  # an input that was constant so far may have got its scale since the answer
    g = rank_one(parts.U(model), parts.D(model), phi, 0, trust, b)
    work.GAIN(model)[0] = g
    y, told = row.Y(model), row.ANSWERS(model)[e]
    for k in range(y.size):
        weights, step = W[k], trust * (y[k] - told[k]) / g
        for j in range(phi.size):
            weights[j] += step * b[j]
    return 0


def start(part, inputs, outputs):
    part("D")[features(inputs, outputs) if inputs else 0 :] = 1 / RIDGE


EXPERT = Expert(GROUP, answer, learn, start)
