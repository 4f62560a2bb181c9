"""The stack: least squares on the experts' answers, and the weights of experts by their recent losses.

The stack predicts a_0 + Σ_j w_j (a_j - a_0) from the answers a of the experts, a_0 being the network's. The weights w
minimize Σ_t λ^(n-t) |y_t - prediction_t|² + `RIDGE` |w|²: before any row they are 0 and the stack is the network.
"""

from __future__ import annotations

from sepsa.compiled.kernels import called
from sepsa.compiled.linear_algebra import backward_row, cholesky, copy, copy_rows, forward_row

STACK_FORGETTING = 0.999
RIDGE = 5.0
DISCOUNT = 0.99
POWER = 2.0
CAUTION = 200.0  # rows: losses of n rows count as those of n²/(n + CAUTION): few rows say little about experts
PRIOR = 2.0  # the logarithm of the network's weight before any row over that of another candidate
FLOOR = 1e-12  # added to every loss


@called
def remember(gram, moment, answers, y, omega):
    """Add a row with answers (experts, m) and targets y (m,) to the normal equations, which forget."""
    J = moment.size
    for i in range(J):
        moment[i] *= STACK_FORGETTING
        for j in range(i + 1):
            gram[i, j] *= STACK_FORGETTING
    for k in range(y.size):
        off = omega * (y[k] - answers[0, k])
        for i in range(J):
            a = answers[i + 1, k] - answers[0, k]
            moment[i] += a * off
            a *= omega
            for j in range(i + 1):
                gram[i, j] += a * (answers[j + 1, k] - answers[0, k])


@called
def solve(gram, moment, factor, inverse, w):
    """w (J,) = (gram + RIDGE·1)⁻¹ moment by Cholesky's factor; `gram` is given by its lower triangle."""
    copy_rows(gram, factor)
    for i in range(w.size):
        factor[i, i] += RIDGE
    if cholesky(factor, inverse):
        copy(moment, w)
        forward_row(factor, w)
        backward_row(factor, w)


def strength(evidence: float) -> float:
    """The power of a loss in the weight of an expert, by the discounted number of rows. Kernels compile this too."""
    return 0.5 * POWER * evidence * evidence / (evidence + CAUTION)
