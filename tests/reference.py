"""The slow, obvious truth that the fast code is compared with. NumPy in float64, one thing at a time."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def with_ones(features: Matrix, bias: bool) -> Matrix:
    """Φ (n, p): a head with a bias sees [features, 1]."""
    return np.hstack([features, np.ones((len(features), 1))]) if bias else features


def ridge_regression(Phi: Matrix, Y: Matrix, omega: Matrix, ridge: Matrix, prior: Matrix) -> Matrix:
    """argmin_W sum_i ω_i ||y_i - W φ_i||² + sum_j ridge_j ||W_j - prior_j||², W (m, p), by least squares."""
    rows = np.vstack([np.sqrt(omega)[:, None] * Phi, np.diag(np.sqrt(ridge))])
    targets = np.vstack([np.sqrt(omega)[:, None] * (Y - Phi @ prior.T), np.zeros((len(ridge), len(prior)))])
    scale = np.linalg.norm(rows, axis=0)
    return prior + (np.linalg.lstsq(rows / scale, targets, rcond=None)[0] / scale[:, None]).T


def objective(W: Matrix, Phi: Matrix, Y: Matrix, omega: Matrix, ridge: Matrix, prior: Matrix) -> Matrix:
    """The value that `ridge_regression` minimizes, per output."""
    return (omega[:, None] * (Y - Phi @ W.T) ** 2).sum(0) + (ridge * (W - prior) ** 2).sum(1)


def curvature(Phi: Matrix, omega: Matrix, ridge: Matrix) -> Matrix:
    """A = diag(ridge) + Σ ω_i φ_i φ_iᵀ."""
    return np.diag(ridge) + (Phi * omega[:, None]).T @ Phi


def ridge_left(p: int, ridge: float, forgetting: float, batches: list[int]) -> Matrix:
    """The ridge each coordinate still has after updates of these sizes: all fade, then some are made whole in turn."""
    left = np.full(p, float(ridge))
    turn = 0
    for n in batches:
        if forgetting == 1.0:
            continue
        left *= forgetting
        whole = n > 1 and 4 * n >= p
        for _ in range(p if whole else min(p, int(np.ceil(p * np.log2(1 / forgetting))))):
            left[turn] = ridge
            turn = (turn + 1) % p
    return left


def rls_step(B: Matrix, alpha: Matrix, h: Matrix, y: Matrix) -> tuple[Matrix, Matrix]:
    """The paper's equations 18, then 17, for one sample: B (p, p), alpha (p, m), h (p,), y (m,)."""
    Bh = B @ h
    B = B - np.outer(Bh, Bh) / (1 + h @ Bh)
    return B, alpha - np.outer(B @ h, h @ alpha - y)


class Adam:
    """Adam with L2 weight decay, for arrays updated in place."""

    def __init__(self, parameters: list[Matrix], lr: float, weight_decay: float) -> None:
        self.parameters, self.lr, self.weight_decay, self.k = parameters, lr, weight_decay, 0
        self.mean = [np.zeros_like(p) for p in parameters]
        self.square = [np.zeros_like(p) for p in parameters]

    def step(self, gradients: list[Matrix]) -> None:
        self.k += 1
        for p, g, m, v in zip(self.parameters, gradients, self.mean, self.square, strict=True):
            g = g + self.weight_decay * p
            m += 0.1 * (g - m)
            v += 0.001 * (g * g - v)
            p -= self.lr * (m / (1 - 0.9**self.k)) / (np.sqrt(v / (1 - 0.999**self.k)) + 1e-8)


class PaperLoop:
    """Algorithm 2 on the paper's network, one sample at a time: Affine + ReLU, then a head by RLS from B = I.

    U (q, d), c (q,) are the body, alpha (q + 1, m) the head with its bias as the last row. The body's
    gradient is that of the mean over outputs of (y - η)², at the head just updated.
    """

    def __init__(self, U: Matrix, c: Matrix, alpha: Matrix, lr: float, weight_decay: float) -> None:
        self.U, self.c, self.alpha = U.copy(), c.copy(), alpha.copy()
        self.B = np.eye(len(alpha))
        self.body = Adam([self.U, self.c], lr, weight_decay)

    def step(self, x: Matrix, y: Matrix) -> float:
        s = self.U @ x + self.c
        h = np.append(np.maximum(s, 0), 1.0)
        self.B, self.alpha = rls_step(self.B, self.alpha, h, y)
        error = h @ self.alpha - y
        ds = (self.alpha[:-1] @ (2 * error / len(y))) * (s > 0)
        self.body.step([np.outer(ds, x), ds])
        return float((error**2).mean())


def weights(linear: Any) -> Matrix:
    """[weight, bias] of an `nn.Linear` as one array (m, p), a copy in float64."""
    parts = [linear.weight] if linear.bias is None else [linear.weight, linear.bias[:, None]]
    return np.hstack([part.detach().double().numpy() for part in parts]).copy()


class CsvRecord(NamedTuple):
    """A record of a CSV file: its line, its cells and whether it is blank; `whole` is False for an open quote."""

    line: int
    fields: int
    blank: bool
    whole: bool
    end: int


def csv_records(data: bytes, separator: str) -> list[CsvRecord]:
    """The records of a CSV file, byte by byte: a quote counts at the start of a field alone, and doubled is itself.

    A record whose quote is never closed is its first line.
    """
    records, at, line = [], 0, 1
    while at < len(data):
        record = _csv_record(data, at, line, separator, True)
        if not record.whole:
            record = _csv_record(data, at, line, separator, False)._replace(whole=False)
        lines = len(re.findall(rb"\r\n|\r|\n", data[at : record.end]))
        records.append(record)
        at, line = record.end, line + max(1, lines)
    return records


def _csv_record(data: bytes, start: int, line: int, separator: str, quotes: bool) -> CsvRecord:
    at, fields, opening, quoted = start, 1, True, False
    while at < len(data):
        c = data[at : at + 1]
        if quoted:
            if data[at : at + 2] == b'""':
                at += 1
            elif c == b'"':
                quoted = False
        elif c in (b"\r", b"\n"):
            end = at + (2 if data[at : at + 2] == b"\r\n" else 1)
            return CsvRecord(line, fields, at == start, True, end)
        elif c == separator.encode():
            fields, opening = fields + 1, True
            at += 1
            continue
        elif c == b'"' and opening and quotes:
            quoted = True
        opening = False
        at += 1
    return CsvRecord(line, fields, False, not quoted, len(data))
