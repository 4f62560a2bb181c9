"""A small ensemble of trees, of which one at a time is grown anew on the window, a bounded number of visits per row.

The prediction is the sum of the trees, F(x) = Σ_t f_t(x). Tree t is grown on what the others leave, r = y - F + f_t
(backfitting), on some inputs, with candidate thresholds drawn from the window. A level of the tree is one pass over the
window that adds each row to the histograms of its node; after it every node takes the split of the largest gain

    S_l²/(n_l + λ) + S_r²/(n_r + λ) - S²/(n + λ),      S = Σ r·direction over the rows of a node, λ = `SHRINK`,

where r has several outputs, along a random direction. A last pass collects the values of the leaves, `RATE` Σr/(n + λ).
"""

from __future__ import annotations

from sepsa.stream.experts.compilation import called

TREES = 20
DEPTH = 5
SPLITS, LEAVES = 2**DEPTH - 1, 2**DEPTH
BINS = 16
INPUTS = 12  # at most, of a tree
RATE = 0.3
SHRINK = 2.0
LEAST = 4.0  # rows on either side of a split
VISITS = 160  # of window rows, for each row learned
LATE = 255  # in place of a node, for a row of the window that the tree in growth does not see

# Positions in the numbers of the growth: the tree, the level (-1: none has begun), the next row of the pass, the state
# of the random generator.
G_TREE, G_LEVEL, G_CURSOR, G_RANDOM = range(4)


@called
def random(growth):
    """A number from [0, 1), by a linear congruential generator."""
    state = (int(growth[G_RANDOM]) * 1664525 + 1013904223) % 4294967296
    growth[G_RANDOM] = state
    return state / 4294967296.0


@called
def leaf(inputs, thresholds, t, X, i):
    """The leaf of row i of X (d, window) in tree t of those with splits (trees, SPLITS)."""
    node = 0
    for _ in range(DEPTH):
        j = int(inputs[t, node])
        node = 2 * node + (2 if j >= 0 and X[j, i] > thresholds[t, node] else 1)
    return node - SPLITS


@called
def add_trees(split_inputs, split_thresholds, values, z, out):
    """out (m,) = Σ_t f_t(z)."""
    for k in range(out.size):
        out[k] = 0.0
    for t in range(values.shape[0]):
        node = 0
        for _ in range(DEPTH):
            j = int(split_inputs[t, node])
            node = 2 * node + (2 if j >= 0 and z[j] > split_thresholds[t, node] else 1)
        for k in range(out.size):
            out[k] += values[t, node - SPLITS, k]


@called
def begin(X, rows, growth, chosen, edges, direction, nodes):
    """Draw the inputs of the next tree, its candidate thresholds and the direction of its residuals."""
    d, m = X.shape[0], direction.size
    for f in range(chosen.size):  # of the inputs not drawn yet, the one at a random rank
        rank = int(random(growth) * (d - f))
        j = 0
        while True:
            drawn = False
            for g in range(f):
                drawn = drawn or chosen[g] == j
            if not drawn:
                if rank == 0:
                    break
                rank -= 1
            j += 1
        chosen[f] = j
    for f in range(chosen.size):
        row, column = edges[f], X[int(chosen[f])]
        for b in range(row.size):
            value, at = column[int(random(growth) * rows)], b
            while at > 0 and row[at - 1] > value:
                row[at] = row[at - 1]
                at -= 1
            row[at] = value
    for k in range(m):
        direction[k] = 1.0 if m == 1 else 2.0 * random(growth) - 1.0
    if m == 2:
        direction[0], direction[1] = 1.0, -1.0
    for i in range(rows):
        nodes[i] = 0


@called
def prepare(X, i, chosen, edges, inputs, thresholds, t, old, bins):
    """Sort row i of the window into the bins of the tree in growth, and find its leaf in the tree to be replaced."""
    for f in range(chosen.size):
        value, place, half = X[int(chosen[f]), i], 0, BINS // 2
        while half > 0:
            if value > edges[f, place + half - 1]:
                place += half
            half //= 2
        bins[i, f] = place
    old[i] = leaf(inputs, thresholds, t, X, i)


@called
def best_splits(histograms, level, chosen, edges, inputs, thresholds, cuts):
    """Give every node of a level its best split; an input of -1 sends all rows to the left."""
    for node in range(1 << level):
        at = (1 << level) - 1 + node
        inputs[at], best = -1.0, 1e-12
        for f in range(chosen.size):
            cells = histograms[node, f]
            n, total = 0.0, 0.0
            for b in range(BINS):
                n += cells[b, 0]
                total += cells[b, 1]
            if n < 2.0 * LEAST:
                break
            n_left, left, whole = 0.0, 0.0, total * total / (n + SHRINK)
            for b in range(BINS - 1):
                n_left += cells[b, 0]
                left += cells[b, 1]
                if n_left >= LEAST and n - n_left >= LEAST:
                    right = total - left
                    gain = left * left / (n_left + SHRINK) + right * right / (n - n_left + SHRINK) - whole
                    if gain > best:
                        best = gain
                        inputs[at], thresholds[at], cuts[at] = chosen[f], edges[f, b], BINS * f + b


@called
def finish(X, F, rows, t, split_inputs, split_thresholds, values, leaf_counts, nodes, old):
    """Replace tree t by the tree in growth, and F (window, m) by the sums of the new ensemble."""
    trees = values.shape[0] - 1
    for v in range(LEAVES):
        for k in range(F.shape[1]):
            values[trees, v, k] *= RATE / (leaf_counts[v] + SHRINK)
    for i in range(rows):
        if nodes[i] != LATE:
            after, before = int(nodes[i]), int(old[i])
        else:
            after = leaf(split_inputs, split_thresholds, trees, X, i)
            before = leaf(split_inputs, split_thresholds, t, X, i)
        for k in range(F.shape[1]):
            F[i, k] += values[trees, after, k] - values[t, before, k]
    for node in range(SPLITS):  # loops, because assignments of arrays take long to compile
        split_inputs[t, node], split_thresholds[t, node] = split_inputs[trees, node], split_thresholds[trees, node]
    for v in range(LEAVES):
        for k in range(F.shape[1]):
            values[t, v, k] = values[trees, v, k]


@called
def grow(
    X, Y, F, weights, rows, growth, chosen, edges, direction, split_inputs, split_thresholds, values, cuts, leaf_counts,
    histograms, nodes, old, bins,
):  # fmt: skip
    """Visit at most `VISITS` rows of the window for the tree in growth, and put it in its place once it is complete.

    The last of `split_inputs`, `split_thresholds` and `values` is the tree in growth. `nodes` (window,) is `LATE` for a
    row that entered after the tree was begun.
    """
    trees, m, width = values.shape[0] - 1, direction.size, chosen.size
    flat = histograms.reshape(histograms.size)  # indexed by one number: a view for each cell takes longer than the sum
    left = VISITS
    while left > 0:
        level, cursor, t = int(growth[G_LEVEL]), int(growth[G_CURSOR]), int(growth[G_TREE])
        if level < 0:
            begin(X, rows, growth, chosen, edges, direction, nodes)
            level = 0
        if cursor == 0:
            if level < DEPTH:
                for c in range((2 * BINS * width) << level):
                    flat[c] = 0.0
            else:
                for v in range(LEAVES):
                    leaf_counts[v] = 0.0
                    for k in range(m):
                        values[trees, v, k] = 0.0
        stop = min(rows, cursor + left)
        left -= stop - cursor
        for i in range(cursor, stop):
            node = int(nodes[i])
            if node == LATE:
                continue
            if level == 0:
                prepare(X, i, chosen, edges, split_inputs, split_thresholds, t, old, bins)
            else:
                at = (1 << (level - 1)) - 1 + node
                cut = int(cuts[at])
                right = split_inputs[trees, at] >= 0.0 and bins[i, cut // BINS] > cut % BINS
                node = 2 * node + (1 if right else 0)
                nodes[i] = node
            before, omega = int(old[i]), weights[i]
            if level < DEPTH:
                r = 0.0
                for k in range(m):
                    r += direction[k] * (Y[i, k] - F[i, k] + values[t, before, k])
                weighted, cell = flat.dtype.type(omega * r), 2 * BINS * width * node
                for f in range(width):
                    at = cell + 2 * int(bins[i, f])
                    flat[at] += omega
                    flat[at + 1] += weighted
                    cell += 2 * BINS
            else:
                leaf_counts[node] += omega
                for k in range(m):
                    values[trees, node, k] += omega * (Y[i, k] - F[i, k] + values[t, before, k])
        growth[G_LEVEL], growth[G_CURSOR] = level, stop
        if stop == rows:
            growth[G_CURSOR] = 0.0
            growth[G_LEVEL] = level + 1.0
            if level < DEPTH:
                best_splits(histograms, level, chosen, edges, split_inputs[trees], split_thresholds[trees], cuts)
            else:
                finish(X, F, rows, t, split_inputs, split_thresholds, values, leaf_counts, nodes, old)
                growth[G_LEVEL] = -1.0
                growth[G_TREE] = (t + 1) % trees
