"""An ensemble of trees that grows with the stream: one tree at a time is grown anew, a bounded amount of work per row.

The prediction is the sum of the trees, F(x) = Σ_t f_t(x). Tree t is grown on what the others leave, r = y - F + f_t
(backfitting), over the last rows: all of them until there are `room`, of which each input is kept as a code of one
byte. A code counts the edges below a value; 0 is a missing value. The edges are quantiles of the first rows; where many
of the latest values lie between two of them, they are drawn again, from the former edges and the latest values.

The leaf with the largest gain is split next, until there are `LEAVES`, or no split gains:

    S_l²/(n_l + λ) + S_r²/(n_r + λ) - S²/(n + λ),      S = Σ r·direction over the rows of a leaf, λ = `SHRINK`,

where r has several outputs, along a random direction. Rows of a leaf lie together in `ORDER`. A split moves them to
its two leaves, counts the rows of the smaller one in histograms over the codes, and subtracts these from its parent's.
The value of a leaf is Σr/(n + λ), times a rate. A cell of a histogram is one integer, so that a row is added to it in
one operation: the sum of weights in its upper bits, and that of weighted residuals in the lower ones.
"""

from __future__ import annotations

from sepsa.compiled.kernels import called, kernel
from sepsa.compiled.linear_algebra import add_scaled, copy, fill
from sepsa.learner.experts.frame import Expert, row, size
from sepsa.learner.experts.tree_edges import code_of
from sepsa.learner.experts.tree_growth import LEAST, grow
from sepsa.learner.experts.tree_parts import NOWHERE, SAMPLE, parts


@kernel
def answer(model, e):
    """F(x) = Σ_t f_t(x), and the leaf of x in each tree; a missing value goes left, or is the mean if none ever was."""
    x, missed, leaves, values, told = parts.views("ASKED MISSED LEAVES VALUES TOLD", model)
    inputs, thresholds, children = parts.views("SPLIT_INPUTS SPLIT_THRESHOLDS CHILDREN", model)
    wide, out = row.WIDE(model), row.ANSWERS(model)[e]
    for j in range(x.size):
        x[j] = wide[j] if wide[j] == wide[j] or missed[j] else 0.0
    fill(told, 0.0)
    for t in range(leaves.size):
        node = 0
        while node >= 0:
            node = children[t, node, 1 if x[inputs[t, node]] > thresholds[t, node] else 0]
        leaves[t] = -1 - node
        add_scaled(values[t, leaves[t]], 1.0, told)
    copy(told, out)
    return 0


@kernel
def learn(model, e):
    """Store the row with the trees' sums and leaves, and go on with the tree in growth."""
    (stored, growth), room = parts.views("STORED GROWTH", model), size.room(model)
    if stored.late < room - growth.rows:  # else the place is that of a row of the tree in growth
        store(model, stored.next, stored.ever % SAMPLE)
        stored.rows, stored.next = min(stored.rows + 1, room), (stored.next + 1) % room
        stored.late += 1
        stored.ever += 1
    if stored.rows >= 2 * LEAST:
        grow(model)
    return 0


@called
def store(model, at, latest):
    x, y, facts = row.views("WIDE Y FACTS", model)
    told, leaves, codes, edges, values, missed = parts.views("TOLD LEAVES CODES EDGES LATEST MISSED", model)
    targets, sums, leaf_of_row, weights = parts.views("TARGETS SUMS LEAF_OF_ROW WEIGHTS", model)
    for j in range(x.size):
        values[j, latest] = x[j] if x[j] < NOWHERE else NOWHERE
        codes[j, at] = code_of(edges[j], x[j])
        if codes[j, at] == 0:
            missed[j] = 1
    copy(y, targets[at])
    copy(told, sums[at])
    for t in range(leaves.size):
        leaf_of_row[t, at] = leaves[t]
    weights[at] = facts.share


@kernel
def boost(model, n):
    """Grow each tree once on the stored rows, after all were removed: boosting."""
    growth, last, steps = parts.GROWTH(model), 0, 0
    while growth.tree >= last and parts.STORED(model).rows >= 2 * LEAST:
        last = growth.tree
        grow(model)
        steps += 1
    return steps


EXPERT = Expert(parts, answer, learn)
