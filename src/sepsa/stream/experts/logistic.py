"""Logistic regression for classes whose logits are linear in the inputs, by one Newton step for each row."""

from __future__ import annotations

import math

from sepsa.stream.engine.kernels.compilation import called, kernel
from sepsa.stream.engine.kernels.head import rank_one
from sepsa.stream.engine.kernels.views import Group, Views
from sepsa.stream.experts.expert import Expert, row

RIDGE = 1.0
LEAST_CURVATURE = 1e-3

PARTS = {
    "LOGIT_W": (float, ("outputs", "logits")),
    "LOGIT_U": (float, ("logit_triangle",)),
    "LOGIT_D": (float, ("logits",)),
}
WORK = {"PHI": (float, ("logits",)), "B": (float, ("logits",))}
GROUP = Group("logistic", PARTS, WORK, {"logits": lambda d, m: d + 1, "logit_triangle": lambda d, m: d * (d + 1) // 2})
parts, work = Views(GROUP, "state", PARTS), Views(GROUP, "workspace", WORK)


@called
def softmax(out):
    """out <- softmax(out), in place."""
    top, total = -math.inf, 0.0
    for k in range(out.size):
        top = max(top, out[k])
    for k in range(out.size):
        out[k] = math.exp(out[k] - top)
        total += out[k]
    for k in range(out.size):
        out[k] /= total


@called
def probabilities(W, phi, out):
    """out (m,) = softmax(Wφ)."""
    for k in range(out.size):
        row, logit = W[k], 0.0
        for j in range(phi.size):
            logit += row[j] * phi[j]
        out[k] = logit
    softmax(out)


@called
def learn_logistic(U, D, W, phi, p, y, omega, b):
    """W <- W + ω (y - p) φᵀB with B⁻¹ <- B⁻¹ + ωhφφᵀ, from the probabilities p (m,) told before and the indicators y.

    h = max 2p_k(1 - p_k) bounds the curvature in every direction of the logits (Gershgorin). Where a class that was
    told to be improbable came, the curvature on the way is larger: at least half of |y_k - p_k|.
    """
    h = LEAST_CURVATURE
    for k in range(p.size):
        h = max(h, 2.0 * p[k] * (1.0 - p[k]), 0.5 * abs(y[k] - p[k]))
    g = rank_one(U, D, phi, 0, omega * h, b)
    for k in range(p.size):
        row, step = W[k], omega * (y[k] - p[k]) / g
        for j in range(phi.size):
            row[j] += step * b[j]


@called
def features(z, phi):
    """φ = [1, z]."""
    phi[0] = 1.0
    for j in range(z.size):
        phi[j + 1] = z[j]


@kernel(cost=0.8)
def answer(model, e):
    features(row.Z(model), work.PHI(model))
    probabilities(parts.LOGIT_W(model), work.PHI(model), row.ANSWERS(model)[e])
    return 0


@kernel(cost=1.2)
def learn(model, e):
    learn_logistic(
        parts.LOGIT_U(model), parts.LOGIT_D(model), parts.LOGIT_W(model), work.PHI(model), row.ANSWERS(model)[e],
        row.Y(model), row.TRUST(model)[0], work.B(model),
    )  # fmt: skip
    return 0


def start(part, inputs, outputs):
    part("LOGIT_D")[inputs + 1 if inputs else 0 :] = 1 / RIDGE


EXPERT = Expert(GROUP, answer, learn, start, for_classes=True)
