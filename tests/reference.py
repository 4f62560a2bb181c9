"""The slow, obvious truth that the fast code is compared with. NumPy in float64, one thing at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def with_ones(features: Matrix, bias: bool) -> Matrix:
    """Φ (n, p): a head with a bias sees [features, 1]."""
    return np.hstack([features, np.ones((len(features), 1))]) if bias else features


def ridges(p: int, ridge: float, bias: bool, bias_ridge: float = 1e-4) -> Matrix:
    """The ridge (p,) of each coordinate: that of the bias, the last one, is another."""
    return np.append(np.full(p - 1, ridge), min(bias_ridge, ridge)) if bias else np.full(p, float(ridge))


def covariance_of(engine: Any) -> Matrix:
    """B (p, p), the inverse of the curvature of a stream engine's first head."""
    U, D = (engine.memory(name, "heads", 0) for name in "UD")
    full = np.eye(len(D))
    column, row = np.tril_indices(len(D), -1)  # U's columns lie one after the other
    full[row, column] = U
    return (full * D) @ full.T


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


def restored_coordinates(p: int, forgetting: float, cursor: int, at_least: int = 0) -> list[int]:
    """The coordinates that an update restores; the cursor counts those restored before."""
    count = 0 if forgetting == 1.0 else int(np.ceil(p * np.log2(1 / forgetting)))
    return [(cursor + i) % p for i in range(min(p, max(count, at_least)))]


def restored_ridge(ridge: Any, left: Any) -> Any:
    """The ridge of a coordinate that an update restores, which has so much left: all of it."""
    return ridge


def ridge_left(ridge: Matrix, forgetting: float, batches: list[int]) -> Matrix:
    """The ridge that each coordinate has after these updates: all fade, then the next few are restored."""
    left, cursor = ridge.copy(), 0
    for _ in batches:
        left *= forgetting
        at = restored_coordinates(len(ridge), forgetting, cursor)
        left[at] = restored_ridge(ridge[at], left[at])
        cursor += len(at)
    return left


def restore(A: Matrix, b: Matrix, left: Matrix, ridge: Matrix, prior: Matrix, at: Any) -> None:
    """Restore the ridge of the coordinates `at` of the normal equations A and b, which have so much left."""
    q = restored_ridge(ridge[at], left[at]) - left[at]
    A[at, at] += q
    b[at] += q[:, None] * prior.T[at]
    left[at] += q


def continued(
    A: Matrix, W: Matrix, left: Matrix, ridge: Matrix, prior: Matrix, cursor: int, forgetting: float, batches: list[Any]
) -> tuple[Matrix, Matrix]:
    """The curvature and the head (m, p) that go on from A and W with batches (Φ, Y), by the normal equations."""
    b = A @ W.T
    for Phi, Y in batches:
        A, b, left = forgetting * A, forgetting * b, forgetting * left
        at = restored_coordinates(len(ridge), forgetting, cursor)
        restore(A, b, left, ridge, prior, at)
        cursor += len(at)
        A, b = A + Phi.T @ Phi, b + Phi.T @ Y
    return A, np.linalg.solve(A, b).T


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


class RobustHeads:
    """What `sepsa.learner.engine.Engine(loss="huber", forgetting="auto")` does without a body, one row at a time.

    Every head is a ridge regression on Φ = [z, 1], solved anew for each row: A = Σ ω φφᵀ + diag(ridge left), fading by
    λ. Targets' errors, inputs and weights are bounded by running quantiles of their sizes, farther where more than one
    row in fifty, and four more, is far away but not behind a gap.
    """

    QUANTILES = (0.5, 0.8, 0.9)

    def __init__(self, inputs: int, outputs: int, heads: list[tuple[float, float]]) -> None:
        p = inputs + 1
        self.mean, self.scale, self.gain = np.zeros(inputs), np.ones(inputs), np.ones(outputs)
        self.centre, self.excess, self.error_excess = np.zeros(inputs), np.zeros(inputs), np.zeros(outputs)
        self.typical, self.typical_run = np.full(inputs, 0.7), np.zeros(inputs)
        self.error, self.error_run = np.zeros((outputs, 3)), np.zeros((outputs, 3))
        self.cut, self.most, self.error_most = 0, np.zeros(inputs), np.zeros(outputs)
        self.low, self.high = np.full(outputs, np.inf), np.full(outputs, -np.inf)
        self.usual_weight, self.evidence, self.steps = 0.0, 0.0, 0
        self.heads = [
            {"ridge": r, "lam": lam, "A": r * np.eye(p), "b": np.zeros((p, outputs)), "left": np.full(p, r), "turn": 0}
            | {"loss": 0.0, "weight": 1 / len(heads)}
            for r, lam in heads
        ]

    def limit(self) -> Matrix:
        """How large an error may be and count fully, per output."""
        size = np.maximum(self.error[:, 0], 0.25 * self.error[:, 1])
        return np.where(size > 0, 4.5 * size * tail(self.error_excess, 1.5), np.inf)

    def bound(self) -> Matrix:
        """Where each input is clipped."""
        return np.maximum(6.0, 16.0 * self.typical) * tail(self.excess, 1.1) ** 2

    def seen(self, x: Matrix) -> Matrix:
        bound = self.bound()
        return np.append(np.clip((x - self.mean) * self.scale, -bound, bound), 1.0)

    def predict(self, x: Matrix) -> Matrix:
        phi = self.seen(x)
        mixed = sum(head["weight"] * (phi @ np.linalg.solve(head["A"], head["b"])) for head in self.heads)
        margin = 0.5 * (self.high - self.low)
        return np.where(self.high >= self.low, np.clip(mixed, self.low - margin, self.high + margin), mixed)

    def learn(self, x: Matrix, y: Matrix, weight: float) -> Matrix:
        """One row; returns the prediction made before."""
        before, phi, limit = self.predict(x), self.seen(x), self.limit()
        usual, omega = self.usual_weight, weight
        if usual and weight > 10 * usual:
            omega = max(usual, 100 * usual**2 / weight)
        distance = np.abs(x - self.mean) * self.scale
        bound = self.bound()
        omega *= float(np.min(np.where(distance > bound, (bound / distance) ** 2, 1.0)))
        self.cut += omega < weight or any(np.abs(y - before) > 2 * limit)
        ordinary = np.maximum(6.0, 16.0 * self.typical) / 4.64 * tail(self.excess, 1.1)
        far = (x != self.centre) & (distance > ordinary) & (distance < 8 * bound)
        self.excess = excess_step(self.excess, far, 1.1)
        for j, z in enumerate(distance):
            if z > 0 and x[j] != self.centre[j]:
                self.typical[j], self.typical_run[j] = quantile_step(z, self.typical[j], self.typical_run[j], 0.5, 0.05)
        self.steps += 1
        share = omega / self.usual_weight if self.usual_weight else 1.0
        self.evidence = 0.99 * self.evidence + share
        for head in self.heads:
            off = np.minimum(np.abs(phi @ np.linalg.solve(head["A"], head["b"]) - y), 2 * limit)
            head["loss"] = 0.99 * head["loss"] + share * float(self.gain @ off**2)
        least = min(head["loss"] for head in self.heads)
        odds = [((head["loss"] + 1e-300) / (least + 1e-300)) ** (-0.25 * self.evidence) for head in self.heads]
        leading = int(np.argmax(odds))
        leverage = 0.0
        for h, head in enumerate(self.heads):
            head["weight"] = odds[h] / sum(odds)
            head["A"], head["b"], head["left"] = (head[name] * head["lam"] for name in ("A", "b", "left"))
            e = np.abs(y - phi @ np.linalg.solve(head["A"], head["b"]))
            ratio = np.min(np.where(e > limit, limit / e, 1.0))
            row = omega * ratio * min(1.0, 4 * ratio)
            if h == leading:
                leverage = float(phi @ np.linalg.solve(head["A"], phi))
            head["A"] = head["A"] + row * np.outer(phi, phi)
            head["b"] = head["b"] + row * np.outer(phi, y)
            need = len(phi) * np.log2(1 / head["lam"])
            if head["lam"] < 1 and (need >= 1 or self.steps % int(1 / need) == 0):
                for _ in range(max(1, int(np.ceil(need)))):
                    j = head["turn"]
                    full = restored_ridge(head["ridge"], head["left"][j])
                    head["A"][j, j] += full - head["left"][j]
                    head["left"][j], head["turn"] = full, (j + 1) % len(phi)
        off = y - before
        plausible = before + np.clip(off, -limit, limit)
        self.low, self.high = np.minimum(self.low, plausible), np.maximum(self.high, plausible)
        far = (np.abs(off) > 2 * limit) & (np.abs(off) < 32 * limit)
        self.error_excess = excess_step(self.error_excess, far, 1.5)
        for k, size in enumerate(np.abs(off)):
            for t, tau in enumerate(self.QUANTILES):
                shown, step = (size / np.sqrt(1 + leverage), 0.1) if tau == 0.9 else (size, 0.05)
                self.error[k, t], self.error_run[k, t] = quantile_step(
                    shown, self.error[k, t], self.error_run[k, t], tau, step
                )
        self.most, self.error_most = np.maximum(self.most, self.excess), np.maximum(self.error_most, self.error_excess)
        self.usual_weight += 0.01 * (omega - self.usual_weight) if self.usual_weight else omega
        return before


def excess_step(excess: Matrix, far: Matrix, growth: float) -> Matrix:
    """How many more values were far away than one in fifty rows, up to where a tail is eight times as long."""
    return np.clip(excess + far - 1 / 50, 0, 4 + np.log(8) / np.log(growth))


def tail(excess: Matrix, growth: float) -> Matrix:
    """How many times as long as a normal one a tail is: more than four values in excess say so."""
    return growth ** np.maximum(excess - 4, 0.0)


def quantile_step(value: float, quantile: float, run: float, tau: float, step: float) -> tuple[float, float]:
    """log q up by step · τ where the value lies above, else down by step · (1 - τ); more from an unlikely run on."""
    if quantile == 0:
        return value, 0.0
    above = value > quantile
    run = max(run, 0) + 1 if above else min(run, 0) - 1
    unlikely = -abs(run) * np.log(1 - tau if above else tau) - 4.16
    move = (step * tau if above else -step * (1 - tau)) * np.exp(np.clip(unlikely / 3, 0, 12))
    return float(np.clip(quantile * np.exp(np.clip(move, -5, 5)), 1e-300, 1e100)), run


def free_bias_regression(X: Matrix, Y: Matrix, omega: Matrix, ridge: float, prior: Matrix) -> Matrix:
    """Ridge regression as people know it, about `prior` (m, k + 1), whose bias is not asked: [weights, intercept].

    On features and targets less their means, and the intercept is what is then left of the means.
    """
    start = prior[:, :-1]
    x, y = (np.average(a, axis=0, weights=omega) for a in (X, Y))
    W = ridge_regression(X - x, Y - y, omega, np.full(X.shape[1], ridge), start)
    return np.hstack([W, (y - W @ x)[:, None]])


def faded_rows(X: Matrix, forgetting: float) -> Matrix:
    """The information Σ λ^(n-1-s) x xᵀ (p, p) in rows (n, p) alone, without any ridge."""
    share = forgetting ** np.arange(len(X) - 1, -1, -1.0)
    return (X * share[:, None]).T @ X


def inputs_of_heads(z, j, lags, season, spans):
    """The inputs (n, p) of the heads of series j of a forecaster: lags, changes of the others, both by the season."""
    rows = np.arange(len(z))
    angles = 2 * np.pi / season * np.outer(rows, range(1, 5))
    common = np.column_stack([np.ones(len(z)), *(f(angles[:, k]) for k in range(4) for f in (np.sin, np.cos))])

    def before(k, i):
        return z[np.maximum(rows - k, 0), i]

    own = [z[:, j], *(before(k, j) - z[:, j] for k in range(1, lags))]
    others = [z[:, i] - before(k, i) for k in spans for i in range(z.shape[1]) if i != j]
    seasonal = [
        change * common[:, f] for change in (z[:, j], *(z[:, j] - before(k, j) for k in spans)) for f in range(1, 5)
    ]
    return np.column_stack([*own, *others, *seasonal, common])


def late_regression(X: Matrix, z: Matrix, step: int, forgetting: float, ridge: Matrix) -> Matrix:
    """The weights (p,) that forecast z[s + step] - z[s] by X[s], from all pairs inside the rows, older ones faded.

    `ridge` (p,) is what there is of it after the last pair: forgetting has taken a part, and restoration given it back.
    """
    n = len(z) - step
    share = forgetting ** np.arange(n - 1, -1, -1.0)
    b = (X[:n] * share[:, None]).T @ (z[step:] - z[:n])
    return np.linalg.solve(faded_rows(X[:n], forgetting) + np.diag(ridge), b)


def changes_of_inputs(E: Matrix, periods: list[int]) -> Matrix:
    """The changes (n, q S) of inputs over each period, over the root of the mean of their squares so far.

    Before the first row all inputs were those of the first.
    """
    rows = np.arange(len(E))
    change = np.hstack([E - E[np.maximum(rows - period, 0)] for period in periods])
    squares = np.cumsum(change**2, 0) / (1 + rows[:, None])
    return np.divide(change, np.sqrt(squares), out=np.zeros_like(change), where=squares > 0)


def smoothed_trend(y: Matrix, to_level: float, to_trend: float, damping: float, ahead: int) -> Matrix:
    """The forecasts (ahead,) by exponential smoothing with a damped trend, in the textbook form."""
    level, trend = y[0], 0.0
    for value in y[1:]:
        before, level = level, to_level * value + (1 - to_level) * (level + damping * trend)
        trend = to_trend * (level - before) + (1 - to_trend) * damping * trend
    return level + trend * np.cumsum(damping ** np.arange(1.0, ahead + 1))


def nearest_targets(X: Matrix, Y: Matrix, omega: Matrix, z: Matrix, width: Matrix, count: int) -> Matrix:
    """The mean (m,) of the targets of the rows nearest to z; inputs whose range has no width are left out."""
    squares = (((X - z)[:, width > 0] / width[width > 0]) ** 2).sum(1)
    order = np.argsort(squares, kind="stable")[:count]
    share = omega[order] / (squares[order] + squares[order].mean() / 16 + 1e-12)
    return share @ Y[order] / share.sum()


def nearest_on_simplex(s: Matrix) -> Matrix:
    """max(s - τ, 0) with the τ at which these sum to 1, by halving."""
    low, high = s.min() - 1, s.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(s - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(s - low, 0)


def stack_weights(answers: Matrix, Y: Matrix, omega: Matrix, forgetting: float, ridge: float) -> Matrix:
    """w (J,) that minimizes Σ λ^(n-t) ω |y - a_0 - Σ w_j (a_j - a_0)|² + ridge |w|² for answers (n, 1 + J, m)."""
    share = omega * forgetting ** np.arange(len(Y) - 1, -1, -1)
    off = answers[:, 1:] - answers[:, :1]
    A = np.einsum("t,tik,tjk->ij", share, off, off) + ridge * np.eye(off.shape[1])
    return np.linalg.solve(A, np.einsum("t,tik,tk->i", share, off, Y - answers[:, 0]))


def candidate_weights(losses: Matrix, strength: float, floor: float, prior: float) -> Matrix:
    """The weights (c,) of candidates: shares of (losses + floor)^-strength, times e^-prior for those after the first.

    A head, an expert or a forecast with these discounted losses counts so much in a mixture.
    """
    logarithms = -strength * np.log(losses + floor)
    logarithms[1:] -= prior
    weights = np.exp(logarithms - logarithms.max())
    return weights / weights.sum()


def tree_gains(
    X: Matrix,
    r: Matrix,
    omega: Matrix,
    edges: dict[int, list[float]],
    splits: list[tuple[int, float, list[int]]],
    least: float,
    shrink: float,
) -> Iterator[tuple[float, float]]:
    """The gain of each split of a tree, and the largest gain of any leaf at that time, then 0 and that at the end.

    `splits` (input, threshold, children) are the tree's in the order in which they were made: a child is a split, or
    -1 - a leaf. Rows at most at a threshold, or missing, go to the first child. Candidates are the `edges` of inputs.
    """

    def gain(here: Matrix, j: int, edge: float) -> float:
        right = here & (X[:, j] > edge)
        n = np.array([omega[here & ~right].sum(), omega[right].sum(), omega[here].sum()])
        sums = np.array([(omega * r)[rows].sum() for rows in (here & ~right, right, here)])
        return float((sums**2 / (n + shrink)) @ [1, 1, -1]) if min(n[:2]) >= least else 0.0

    def best(here: Matrix) -> float:
        return max((gain(here, j, edge) for j, some in edges.items() for edge in some), default=0.0)

    made, parents = {0: np.ones(len(X), bool)}, {}
    for q, (_, _, children) in enumerate(splits):
        parents |= {child: (q, side) for side, child in enumerate(children) if child >= 0}
    largest = {0: best(made[0])}
    for q, (j, edge, _) in enumerate(splits):
        if q:
            above, side = parents[q]
            right = X[:, splits[above][0]] > splits[above][1]
            made[q] = made[above] & (right if side else ~right)
        yield gain(made[q], j, edge), max(largest.values())
        right = X[:, j] > edge
        for side, rows in enumerate((made[q] & ~right, made[q] & right)):
            largest[next((c for c, place in parents.items() if place == (q, side)), -1 - 2 * q - side)] = best(rows)
        del largest[q]
    yield 0.0, max(largest.values())


# ---------------------------------------------------------------------- the ridge by evidence


def log_evidence(X, Y, ridge, prior):
    """The logarithm of the likelihood of targets Y (n, m), up to a constant, at the best variance of the noise: over
    all biases, and over weights that scatter about `prior` (m, k).
    """
    n, m = Y.shape
    X, Y = X - X.mean(0), Y - Y.mean(0)
    errors = Y - X @ prior.T
    spread = np.eye(n) + X @ X.T / ridge
    squares = (errors * np.linalg.solve(spread, errors)).sum()
    return -0.5 * m * ((n - 1) * np.log(squares) + np.linalg.slogdet(spread)[1])


def evidence_of(Phi, Y, initial, ridge, bias_ridge, n, r, refuted):
    """γ, RSS/V, |W - t W₀|²/V, n - r (γ + 1), and s* (m,): what samples Φ (n, p) and Y (n, m), scaled by the roots of
    their weights, say about a ridge; the second and third as means over the outputs. `bias_ridge` None: no bias.
    """
    p, bias = Phi.shape[1], bias_ridge is not None
    k = p - bias
    each = np.append(np.full(k, ridge), [bias_ridge] * bias)
    A = Phi.T @ Phi + np.diag(each)
    gamma = k - ridge * np.trace(np.linalg.inv(A)[:k, :k])
    freedom = max(n - r * (gamma + 1), 0.01 * n)
    found = []
    for y, start in zip(Y.T, initial, strict=True):

        def fit(s, y=y, start=start):  # the weights, the RSS and the objective about the prior s W₀
            w = np.linalg.solve(A, Phi.T @ y + each * s * start)
            rss = ((y - Phi @ w) ** 2).sum()
            return w, rss, rss + (each * (w - s * start) ** 2).sum()

        least, middle, most = (fit(s)[2] for s in (-1.0, 0.0, 1.0))
        best = (least - most) / (2 * (least + most - 2 * middle))  # the lowest point of the parabola
        noise, lowest = refuted * fit(best)[1] / freedom, fit(best)[2]
        t = float(middle > lowest + noise and most <= lowest + noise)
        w, rss, _ = fit(t)
        ones = Phi[:, k:]
        V = ((y - ones @ (ones.T @ y) / (ones.T @ ones).sum()) ** 2).sum() if bias else (y**2).sum()
        found.append((rss / V, ((w - t * start)[:k] ** 2).sum() / V, best))
    found = np.array(found)
    return (gamma, *found[:, :2].mean(0), freedom), found[:, 2]


class Dense:
    """Equations 1 and 2 of `math.cross_entropy` with A and the gradients formed, by sample and class."""

    def __init__(self, W, ridge, forgetting, label_smoothing, class_weight, bias):
        self.W, self.prior = W.copy(), W.copy()
        K, p = W.shape
        self.ridge = ridges(p, ridge, bias) * max(K / 2, 1)
        self.forgetting, self.smoothing = forgetting, label_smoothing
        self.weight = np.ones(max(K, 2)) if class_weight is None else np.array(class_weight)
        self.A, self.left = np.diag(self.ridge), self.ridge.copy()
        self.shares, self.seen, self.cursor = np.ones(K), 0.0, 0

    def update(self, Phi, targets, omega):
        """Phi (n, p) features with their ones, targets (n, classes) probabilities, omega (n,) weights."""
        K, p = self.W.shape
        n, C = targets.shape
        U, R = np.zeros((n, K)), np.zeros((n, K))
        total = 0.0
        for i in range(n):
            tau = omega[i] * self.weight * ((1 - self.smoothing) * targets[i] + self.smoothing / C)
            logits = self.W @ Phi[i]
            logits = np.append(0.0, logits) if K == 1 else logits
            P = np.exp(logits - logits.max())
            P /= P.sum()
            for k in range(K):
                j = k + (K == 1)
                R[i, k] = tau.sum() * P[j] - tau[j]
                sampled = R[i, k] ** 2 / tau.sum() if tau.sum() else 0.0
                U[i, k] = (tau.sum() * P[j] * (1 - P[j]) + sampled) / 2
            total += tau.sum()
        lam = min(self.forgetting, (self.seen + 8 * p) / (self.seen + 8 * p + 7 * total))
        self.seen += total
        self.shares = lam * self.shares + (1 - lam) + U.sum(0)
        s = min(K, 2) * self.shares / self.shares.sum()
        rho = max(min(K, 2) * U[:, k].sum() / U.sum() / s[k] for k in range(K)) if U.sum() else 0.0
        own = sum(U[i].sum() * np.outer(Phi[i], Phi[i]) for i in range(n))
        gradient = R.T @ Phi / s[:, None]
        self.A, self.left = lam * self.A, lam * self.left
        for j in restored_coordinates(p, self.forgetting, self.cursor, at_least=n):
            q = max(0.0, restored_ridge(self.ridge[j], self.left[j]) - self.left[j])
            self.A[j, j] += q
            gradient[:, j] += q * (self.W - self.prior)[:, j]
            self.left[j], self.cursor = self.left[j] + q, self.cursor + 1
        self.W = self.W - np.linalg.solve(self.A + rho * own, gradient.T).T
        self.A = self.A + own

    def set_ridge(self, ridge, bias):
        """Take another ridge, where each coordinate keeps its share, and the weights of the parabola that has it."""
        K, p = self.W.shape
        new = ridges(p, ridge, bias) * max(K / 2, 1)
        change = (new - self.ridge) * self.left / self.ridge
        self.left, self.ridge = self.left * new / self.ridge, new
        pull = self.A @ (self.W - self.prior).T  # A'(W' - prior) = A(W - prior), A' = A + change
        self.A = self.A + np.diag(change)
        self.W = self.prior + np.linalg.solve(self.A, pull).T


def first_class_ridge(X, omega, K):
    """The ridge before rows X (n, k) with these weights: that of 10 rows or of all of them, at even probabilities."""
    curvature = 1 / 4 if K == 1 else 1 - 1 / K  # Σ_k (p_k (1 - p_k) + (p_k - y_k)²) / 2 at p = 1/K, over the outputs
    row = sum(w * (x @ x) / len(x) * curvature for x, w in zip(X, omega, strict=True)) / omega.sum()
    return row / max(K / 2, 1) * max(10, omega.sum())


def class_ridge(A, left, shares, W, prior, updates, seen, bias, forgetting, ridge, kappa):
    """The ridge by evidence after so many updates of a cross-entropy head W (K, p) of this curvature A (p, p), whose
    ridge is `left` of the present one.
    """
    K, p = W.shape
    k, B = p - bias, np.linalg.inv(A)
    determined = sum(1 - left[j] * B[j, j] for j in range(k))
    distance = sum(shares[i] / shares.mean() * np.sum((W[i, :k] - prior[i, :k]) ** 2) for i in range(K))
    total = seen + 8 * p
    remembered = total / 8 * (1 - (8 * p / total) ** 8)
    if forgetting < 1:
        remembered = min(remembered, seen / updates / (1 - forgetting))
    row = np.mean([A[j, j] - left[j] for j in range(k)]) / remembered / max(K / 2, 1)
    if seen < 8 or distance <= 0 or row <= 0:
        return ridge
    least = row * max(10, seen / updates)
    most = max(2 * row * remembered, least)
    best = np.clip(kappa * max(K - 1, 1) * determined / distance, least, most)
    stays = least <= ridge <= most and ridge / 2 < best < 2 * ridge
    return ridge if stays else max(best, ridge / 1e4)


def log_class_evidence(A, s, minimum, prior, ridge):
    """The logarithm of the evidence of samples whose loss is a parabola, up to a constant: of class k with the
    curvature s_k A about minimum (K, p), for weights of variance 1 / (ridge s_k/s̄) about the prior (K, p).
    """
    data = np.kron(np.diag(s), A)
    penalty = np.kron(np.diag(ridge * s / s.mean()), np.eye(minimum.shape[1]))
    spread = np.linalg.inv(data) + np.linalg.inv(penalty)  # of the minimum about the prior
    apart = (minimum - prior).ravel()
    return -0.5 * (apart @ np.linalg.solve(spread, apart) + np.linalg.slogdet(spread)[1])
