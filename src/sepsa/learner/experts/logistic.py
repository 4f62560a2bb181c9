"""Logistic regression for classes whose logits are linear in the inputs, by one Newton step for each row."""

from __future__ import annotations

import math

from sepsa.compiled.kernels import called, kernel
from sepsa.compiled.linear_algebra import add_scaled, copy, multiply
from sepsa.learner.arithmetic.head import rank_one
from sepsa.learner.experts.frame import Expert, given, row
from sepsa.learner.memory.parts import Part, work
from sepsa.learner.memory.views import Group

RIDGE = 1.0

parts = Group(
    given,
    "logistic",
    Part("LOGIT_W", float, ("outputs", "logits")),
    Part("LOGIT_U", float, ("logit_triangle",)),
    Part("LOGIT_D", float, ("logits",), start=1 / RIDGE),
    work("PHI", float, ("logits",)),
    work("B", float, ("logits",)),
    sizes={
        "logits": lambda sizes: sizes["inputs"] + 1,
        "logit_triangle": lambda sizes: sizes["inputs"] * (sizes["inputs"] + 1) // 2,
    },
)


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
    multiply(W, phi, out)
    softmax(out)


@called
def learn_logistic(U, D, W, phi, p, y, omega, b):
    """W <- W + ω (y - p) φᵀB with B⁻¹ <- B⁻¹ + ωhφφᵀ, from the probabilities p (m,) told before and the indicators y.

    h = max 2p_k(1 - p_k) bounds the curvature in every direction of the logits (Gershgorin). Where a class that was
    told to be improbable came, the curvature on the way is larger: at least half of |y_k - p_k|.
    """
    h = 1e-3
    for k in range(p.size):
        h = max(h, 2.0 * p[k] * (1.0 - p[k]), 0.5 * abs(y[k] - p[k]))
    g = rank_one(U, D, phi, 0, omega * h, b)
    for k in range(p.size):
        add_scaled(b, omega * (y[k] - p[k]) / g, W[k])


@kernel
def answer(model, e):
    W, phi = parts.views("LOGIT_W PHI", model)
    phi[0] = 1.0
    copy(row.Z(model), phi[1:])
    probabilities(W, phi, row.ANSWERS(model)[e])
    return 0


@kernel
def learn(model, e):
    U, D, W, phi, b = parts.views("LOGIT_U LOGIT_D LOGIT_W PHI B", model)
    learn_logistic(U, D, W, phi, row.ANSWERS(model)[e], row.Y(model), row.FACTS(model).trust, b)
    return 0


EXPERT = Expert(parts, answer, learn, for_classes=True)
