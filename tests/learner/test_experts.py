"""Experts beside the network: each against a slow reference, then all together as a learner."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plain_learner import Engine, StreamLearner
from reference import candidate_weights, log_evidence, nearest_targets, ridge_regression, stack_weights, tree_gains
from sepsa import SepSAClassifier, SepSARegressor
from sepsa.learner.arithmetic import head
from sepsa.learner.arithmetic import weigh as kernels_weigh
from sepsa.learner.experts import EXPERTS, bayes, linear, logistic, neighbours, products, stack, tree_growth, tree_parts
from sepsa.river import SepSAClassifier as RiverClassifier
from sepsa.river import SepSARegressor as RiverRegressor

OPTIONS = {"hidden": (64,), "activation": "fourier", "optimizer": "auto", "lr": 3e-3, "ridge": 10.0, "skip": True}
OPTIONS |= {"forgetting": "auto", "loss": "huber", "body": "experts"}
seeds = st.integers(0, 2**32 - 1)
remember, solve, weigh = stack.remember, stack.solve, kernels_weigh.weigh
expand, rank_one, forget = products.expand, head.rank_one, products.forget
learn_logistic, probabilities = logistic.learn_logistic, logistic.probabilities
learn_class, posterior = bayes.learn_class, bayes.posterior


def steps(n, inputs=4, seed=0):
    """Thresholds along single inputs."""
    rng = np.random.default_rng(seed)
    X = rng.normal(5, 3, (n, inputs))
    return X, 10.0 * (X[:, 0] > 6) - 7.0 * (X[:, 1] > 4) + 0.3 * rng.normal(size=n)


@settings(max_examples=20)
@given(seed=seeds, n=st.integers(1, 200), d=st.integers(1, 5), m=st.integers(1, 3))
def test_neighbours_equal_the_slow_reference(seed, n, d, m):
    rng = np.random.default_rng(seed)
    engine = StreamLearner(d, m, regression=True, **OPTIONS).engine
    engine.set_scaling(np.zeros(d), np.ones(d))
    engine.set_output_weights(1.0)
    engine.learn(rng.normal(size=(n, d)), rng.normal(size=(n, m)), rng.uniform(0.1, 5, n))
    X, Y, omega = (engine.memory(name, "neighbours") for name in ("ROWS", "TARGETS", "WEIGHTS"))
    X, Y, omega = X[:, :n].T, Y[:n], omega[:n]
    z = X.mean(0).astype(float)
    slow = nearest_targets(X, Y, omega, z, np.ptp(X, 0).astype(float), neighbours.NEIGHBOURS)
    place = list(engine.chosen["experts"]).index("neighbours")
    np.testing.assert_allclose(engine.answers(z[None])[0, place], slow, rtol=1e-3, atol=1e-4)


@settings(max_examples=50)
@given(seed=seeds, n=st.integers(1, 40), experts=st.integers(2, 8), m=st.integers(1, 3))
def test_the_stack_is_ridge_regression_on_differences_of_answers(seed, n, experts, m):
    rng = np.random.default_rng(seed)
    answers, Y, omega = rng.normal(size=(n, experts, m)), rng.normal(size=(n, m)), rng.uniform(0, 3, n)
    J = experts - 1
    gram, moment, w = np.zeros((J, J)), np.zeros(J), np.zeros(J)
    for a, y, o in zip(answers, Y, omega, strict=True):
        remember(gram, moment, a, y, o)
    solve(gram, moment, np.zeros((J, J)), np.zeros(J), w)
    slow = stack_weights(answers, Y, omega, stack.STACK_FORGETTING, stack.RIDGE)
    np.testing.assert_allclose(w, slow, rtol=1e-7, atol=1e-9)


@given(
    losses=st.lists(st.floats(0.0, 1e6), min_size=2, max_size=6),
    strength=st.floats(0, 50),
    floor=st.sampled_from([1e-12, 1e-300]),
    prior=st.sampled_from([0.0, stack.PRIOR]),
)
def test_candidates_are_weighted_by_a_power_of_their_losses(losses, strength, floor, prior):
    weights = np.empty(len(losses))
    best = weigh(np.array(losses), strength, floor, prior, weights)
    slow = candidate_weights(np.array(losses), strength, floor, prior)
    # 1e-6: a logarithm up to 700 times a strength of 50 rounds in the eleventh digit
    np.testing.assert_allclose(weights, slow, rtol=1e-6, atol=1e-12)
    assert weights[best] == weights.max()


def test_few_rows_count_for_less_in_the_weights_of_experts():
    assert stack.strength(0.0) == 0.0
    assert stack.strength(stack.CAUTION) == 0.25 * stack.POWER * stack.CAUTION
    assert stack.strength(1e9) == pytest.approx(0.5 * stack.POWER * 1e9, rel=1e-6)


@settings(max_examples=6)
@given(seed=seeds, d=st.integers(1, 4), m=st.integers(1, 3))
def test_a_tree_is_grown_as_by_the_slow_reference(seed, d, m):
    """Each split has the largest gain of all leaves, and each leaf the mean of what the other trees leave."""
    rng = np.random.default_rng(seed)
    engine, n = StreamLearner(d, m, regression=True, **OPTIONS).engine, 150
    X = np.where(rng.random((n, d)) < 0.1, np.nan, rng.choice([rng.normal(size=(n, d)), rng.integers(0, 3, (n, d))]))
    Y, omega = rng.normal(size=(n, m)) + np.nansum(X > 0, 1)[:, None], rng.choice([0.5, 1.0, 2.0], n)
    engine.set_scaling(np.zeros(d), np.ones(d))
    engine.set_output_weights(1.0)
    checked, after = 0, engine.copy().memory.of("trees")
    for i in range(n):
        before = after
        engine.learn(X[i : i + 1], Y[i : i + 1], omega[i : i + 1])
        after = engine.copy().memory.of("trees")
        growth, now = before("GROWTH"), after("GROWTH")
        t, rows, phase = (int(growth[name]) for name in ("tree", "rows", "phase"))
        grown = now["tree"] == (t + 1) % max(1, growth["trees"])
        if i < 90 or checked == 2 or not grown or phase < tree_parts.RESIDUALS or now["phase"] >= tree_parts.COLLECT:
            continue  # not the tree alone, or not as it was grown
        checked += 1
        leaves, values = after("LEAF_OF_ROW")[:, : i + 1], after("VALUES")
        total = values[np.arange(tree_parts.TREES)[:, None], leaves[: tree_parts.TREES]].sum(0)
        # Sums are float32 and are changed once for each tree: a few roundings of 6e-8 of the largest.
        np.testing.assert_allclose(after("SUMS")[: i + 1], total, atol=2e-5 * max(1, abs(total).max()))
        Z, weight = after("LATEST")[:, :rows].T.astype(float), after("WEIGHTS")[:rows].astype(float)
        Z[Z >= tree_parts.NOWHERE] = np.nan
        r = (after("TARGETS") - after("SUMS"))[:rows] + values[t, leaves[t, :rows]]
        nodes = (after(name)[t].tolist() for name in ("SPLIT_INPUTS", "SPLIT_THRESHOLDS", "CHILDREN"))
        splits = [node for node in zip(*nodes, strict=True) if node[1] < tree_parts.NOWHERE]
        edges = {j: [-1e30, *before("EDGES")[j].tolist()] for j in before("CHOSEN").tolist()}
        found = [*tree_gains(Z, r @ before("DIRECTION"), weight, edges, splits, tree_growth.LEAST, tree_growth.SHRINK)]
        # Residuals are rounded to 2^-29 of the largest: gains to some 1e-6 of that of the whole.
        whole = 1e-5 * max(1.0, found[0][1])
        for gain, best in found if len(splits) < tree_growth.FEWEST_LEAVES - 1 else found[:-1]:
            assert gain == pytest.approx(best, rel=1e-4, abs=whole)
        for leaf in range(len(splits) + 1):
            mine = leaves[t, :rows] == leaf
            expected = tree_parts.RATE / 1000 * (weight[mine] @ r[mine]) / (weight[mine].sum() + tree_growth.SHRINK)
            np.testing.assert_allclose(values[t, leaf], expected, rtol=1e-3, atol=1e-4)
    assert checked


@pytest.mark.parametrize("m", [1, 2])
def test_boosted_trees_each_fit_what_those_before_leave(m):
    rng = np.random.default_rng(m)
    X, weight = rng.normal(size=(300, 3)), rng.choice([0.5, 1.0, 2.0], 300)
    Y = 5 + np.abs(X[:, :m]) + rng.normal(size=(300, m))
    learner = StreamLearner(3, m, regression=True, trees=40, **OPTIONS)
    learner.learn(X, Y, weight)
    learner.fit_experts(X, Y, np.ones(len(X)))
    part = learner.engine.memory.of("trees")
    leaves, values, omega = part("LEAF_OF_ROW")[:, :300], part("VALUES"), part("WEIGHTS")[:300].astype(float)
    left = part("TARGETS")[:300].astype(float)
    first, rate = omega @ left[:, 0] ** 2, tree_parts.TABLE_RATE / 1000
    for t in range(40):
        for leaf in np.unique(leaves[t]):
            mine = leaves[t] == leaf
            expected = rate * (omega[mine] @ left[mine]) / (omega[mine].sum() + tree_growth.SHRINK)
            # Sums of rows are float32: some roundings of 6e-8 of a target of 10.
            np.testing.assert_allclose(values[t, leaf], expected, atol=1e-5)
        left -= values[t, leaves[t]]
    assert omega @ left[:, 0] ** 2 < 0.5 * first
    ahead = learner.copy()
    ahead.load_state_dict(learner.state_dict())
    assert np.array_equal(ahead.learn(X, Y), learner.learn(X, Y))


@settings(max_examples=20)
@given(seed=seeds, n=st.integers(1, 40), d=st.integers(1, 5))
def test_products_under_the_head_are_ridge_regression(seed, n, d):
    rng = np.random.default_rng(seed)
    Z, y = rng.normal(size=(n, d)), rng.normal(size=n)
    p = 1 + d * (d + 3) // 2
    Phi, W, U, D, b = np.empty((n, p)), np.zeros(p), np.zeros(p * (p - 1) // 2), np.full(p, 0.1), np.empty(p)
    for z, phi, target in zip(Z, Phi, y, strict=True):
        expand(z, np.arange(d), phi)
        off = target - W @ phi
        W += off / rank_one(U, D, phi, 0, 1.0, b) * b
    slow = np.array([[1.0, *np.concatenate([[z[j], *(z[j] * z[: j + 1])] for j in range(d)])] for z in Z])
    np.testing.assert_allclose(Phi, slow)
    expected = ridge_regression(slow, y[:, None], np.ones(n), np.full(p, 10.0), np.zeros((1, p)))[0]
    np.testing.assert_allclose(W, expected, rtol=1e-6, atol=1e-9)


@settings(max_examples=20)
@given(seed=seeds, n=st.integers(1, 40), p=st.integers(1, 8))
def test_a_feature_that_leaves_a_head_leaves_the_others_as_they_are(seed, n, p):
    rng = np.random.default_rng(seed)
    U, D, b = np.zeros(p * (p - 1) // 2), np.full(p, 0.1), np.empty(p)
    for phi in rng.normal(size=(n, p)):
        rank_one(U, D, phi, 0, 1.0, b)

    def covariance():
        dense = np.eye(p)
        for j in range(p):
            dense[:j, j] = U[j * (j - 1) // 2 : j * (j - 1) // 2 + j]
        return (dense * D) @ dense.T

    f, expected = int(rng.integers(p)), covariance()
    expected[f], expected[:, f] = 0.0, 0.0
    expected[f, f] = 0.5
    forget(U, D, f, 0.5, b)
    np.testing.assert_allclose(covariance(), expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(seed=seeds, n=st.integers(1, 40), d=st.integers(1, 5), m=st.integers(2, 4))
def test_the_logistic_expert_makes_newton_steps(seed, n, d, m):
    rng = np.random.default_rng(seed)
    Phi, labels, omega = rng.normal(size=(n, d)), rng.integers(0, m, n), rng.uniform(0.1, 3, n)
    W, U, D, b, p = np.zeros((m, d)), np.zeros(d * (d - 1) // 2), np.ones(d), np.empty(d), np.empty(m)
    slow, A = np.zeros((m, d)), np.eye(d)
    for phi, y, o in zip(Phi, np.eye(m)[labels], omega, strict=True):
        probabilities(W, phi, p)
        q = np.exp(slow @ phi)
        q /= q.sum()
        np.testing.assert_allclose(p, q, rtol=1e-6)
        learn_logistic(U, D, W, phi, p, y, o, b)
        A += o * max(1e-3, (2 * q * (1 - q)).max(), 0.5 * np.abs(y - q).max()) * np.outer(phi, phi)
        slow += o * np.outer(y - q, np.linalg.solve(A, phi))
    np.testing.assert_allclose(W, slow, rtol=1e-6, atol=1e-9)


@settings(max_examples=30)
@given(seed=seeds, n=st.integers(1, 40), d=st.integers(1, 5), m=st.integers(1, 3))
def test_naive_bayes_has_the_posterior_of_normal_laws_with_common_variances(seed, n, d, m):
    rng = np.random.default_rng(seed)
    Z, labels, omega, z = rng.normal(size=(n, d)), rng.integers(0, m, n), rng.uniform(0.1, 3, n), rng.normal(size=d)
    means, counts, spread, out = np.zeros((m, d)), np.zeros(m), np.zeros(d), np.empty(m)
    slow, rows, squares = np.zeros((m, d)), np.zeros(m), np.zeros(d)
    for row, label, share in zip(Z, labels, omega, strict=True):
        learn_class(means, counts, spread, label, row, share)
        rows *= bayes.CLASS_FORGETTING
        before = rows[label] + bayes.SHRINK
        mean = (before * slow[label] + share * row) / (before + share)
        squares = bayes.CLASS_FORGETTING * squares + share * (row - slow[label]) * (row - mean)
        slow[label], rows[label] = mean, rows[label] + share
    posterior(means, counts, spread, counts.sum(), z, out)
    log = np.log(rows + bayes.SHRINK) - ((z - slow) ** 2 * (rows.sum() + 1) / (2 * squares + 2)).sum(1)
    likely = np.exp(log - log.max())
    np.testing.assert_allclose(out, likely / likely.sum(), rtol=1e-7, atol=1e-12)


def test_thresholds_are_learned_better_with_experts():
    X, y = steps(1500)
    errors = [
        np.abs(SepSARegressor(random_state=0, body=body).prequential(X, y) - y)[500:].mean()
        for body in ("fourier", "experts")
    ]
    assert errors[1] < 0.7 * errors[0]


def test_a_target_that_persists_is_followed_and_errors_are_kept_for_each_key():
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(800, 3)), np.cumsum(rng.normal(size=800))
    model = SepSARegressor(random_state=0, body="experts")
    off = np.abs(model.prequential(X, y) - y)[300:].mean()
    assert off < 1.15 * np.abs(np.diff(y))[300:].mean()
    assert sum(model.chosen_["experts"].values()) == pytest.approx(1.0)
    rng = np.random.default_rng(1)
    key = rng.integers(0, 5, 1500)
    levels = np.cumsum(0.4 * rng.normal(size=(1500, 5)), 0)
    X, y = np.hstack([np.eye(5)[key], rng.normal(size=(1500, 1))]), levels[np.arange(1500), key]
    model = SepSARegressor(random_state=0, body="experts")
    off = np.abs(model.prequential(X, y) - y)[300:].mean()
    assert np.count_nonzero(model._learner.body.engine.memory("KEYED", "last errors")) >= 5
    last = np.array([y[:i][key[:i] == key[i]][-1] for i in range(300, 1500)])
    assert off < 1.25 * np.abs(y[300:] - last).mean()
    smooth = SepSARegressor(random_state=0, body="experts").partial_fit(X[:, 5:], y)._learner.body.engine
    assert np.count_nonzero(smooth.memory("KEYED", "last errors")) <= 2  # the second row has one of two values


def test_linear_logits_are_learned_by_the_logistic_expert():
    rng = np.random.default_rng(1)
    X = rng.standard_t(4, (1500, 6))
    y = (rng.random(1500) < 1 / (1 + np.exp(1 - 1.5 * X @ rng.normal(size=6)))).astype(int)
    model = SepSAClassifier(random_state=0, body="experts")
    wrong = (model.prequential(X, y) != y)[500:].mean()
    assert wrong < 1.05 * (SepSAClassifier(random_state=0, body="fourier").prequential(X, y) != y)[500:].mean()
    assert model.chosen_["experts"]["logistic"] > 0.1


PLAIN = {"hidden": (8,), "skip": True, "ridge": 10.0, "forgetting": 0.99}


@pytest.mark.parametrize(("classes", "options"), [(False, OPTIONS), (True, OPTIONS), (False, PLAIN)])
def test_rows_in_blocks_equal_rows_one_by_one(classes, options):
    X, y = steps(1200)  # room for rows is made at 512 and 1,024
    Y = np.stack([y > 0, y <= 0], 1).astype(float) if classes else y[:, None]
    X[5, 1] = np.nan
    one, other = (StreamLearner(4, Y.shape[1], regression=not classes, **options) for _ in range(2))
    weight = np.where(np.arange(1200) % 7 == 3, 0.0, 1.0)
    blocks = one.learn(X, Y, weight)
    single = np.concatenate([other.learn(X[i : i + 1], Y[i : i + 1], weight[i : i + 1]) for i in range(1200)])
    assert np.array_equal(blocks, single)
    assert np.array_equal(one.predict(X), [other.predict_row(x) for x in X.tolist()])


@pytest.mark.parametrize("max_rows", [300, 16384])
def test_growth_continues_bit_for_bit_from_any_row(max_rows):
    X, y = steps(900)
    X[:, 3] = 2.0  # constant
    learner = StreamLearner(4, 1, regression=True, max_rows=max_rows, **OPTIONS)
    phases = set()
    for rows in np.split(np.arange(900), np.arange(300, 900, 23)):
        other = StreamLearner(4, 1, regression=True, max_rows=max_rows, **OPTIONS)
        other.load_state_dict(learner.state_dict())
        phases.add(int(learner.engine.memory("GROWTH", "trees")["phase"]))
        assert np.array_equal(learner.learn(X[rows], y[rows, None]), other.learn(X[rows], y[rows, None]))
        learner = other
    assert len(phases) >= 4
    assert learner.engine.memory("WEIGHTS", "trees").size <= max(1024, max_rows) * 9 / 8


def test_products_take_the_inputs_that_matter_wherever_they_are():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1500, 14))
    y = 3 * X[:, 12] * X[:, 13] + X[:, 11] + 0.1 * rng.normal(size=1500)
    learner = StreamLearner(14, 1, regression=True, **OPTIONS)
    learner.learn(X, y[:, None])
    assert {11, 12, 13} <= set(learner.engine.memory("PAIRS", "products").tolist())
    off = np.abs(learner.predict(X)[:, 0] - y).mean()
    assert off < 0.2 * np.abs(y - y.mean()).mean()


def test_a_state_that_points_outside_is_refused():
    X, y = steps(50)
    engine = StreamLearner(4, 1, regression=True, **OPTIONS).engine
    engine.learn(X, y[:, None])
    before = engine.predict(X)
    outside = {"SPLIT_INPUTS": 4, "CHOSEN": -1, "CUTS": 200, "ORDER": 10**6, "CHILDREN": 0, "LEAF_ROWS": 10**6}
    outside |= {"LEAF_OF_ROW": 99, "CODES": tree_parts.BINS, "STORED": -1, "GROWTH": 99.0}
    for name, value in outside.items():
        state = engine.state_dict()
        state["parts"]["trees"][name].flat[0] = value
        with pytest.raises(ValueError, match=name):
            engine.load_state_dict(state)
    assert np.array_equal(engine.predict(X), before)


def test_an_engine_has_the_experts_of_its_table():
    X, y = steps(60)
    few = tuple(expert for expert in EXPERTS if expert.name != "linear")
    engine = Engine(4, 1, body="experts", table=few)
    engine.learn(X, y[:, None])
    copy = pickle.loads(pickle.dumps(engine))
    assert "linear" not in copy.chosen["experts"]
    assert list(copy.chosen["experts"]) == list(engine.chosen["experts"])
    assert np.array_equal(copy.learn(X, y[:, None]), engine.learn(X, y[:, None]))


@pytest.mark.parametrize("classes", [False, True])
@pytest.mark.filterwarnings("ignore:more than 12 features")
@pytest.mark.filterwarnings("ignore:.*of the rows lie beyond")
def test_hostile_rows_through_river(classes):
    """Missing and huge values, features and classes that come late, weights without bounds; Inf is refused."""
    rng = np.random.default_rng(3)
    X, y = steps(4_000)
    model = (RiverClassifier if classes else RiverRegressor)(hidden=(8,), seed=0, body="experts", max_features=12)
    right, sizes = [], []
    for i in range(4_000):
        x, target, w = dict(zip("abcd", X[i].tolist(), strict=True)), (int(y[i] > 0) if classes else y[i]), 1.0
        name, case = "abcd"[rng.integers(4)], rng.integers(6) if i < 3_000 else None
        if case == 0:
            x[name] = [None, math.nan, 1e300, -1e300, 5e-324][rng.integers(5)]
        elif case == 1:
            x[f"late {rng.integers(40)}"] = rng.choice([1.0, 1e12, -3.0])
        elif case == 2:
            target = f"class {rng.integers(6)}" if classes else rng.choice([1e300, -1e300, 1e9])
        elif case == 3:
            w = rng.choice([0.0, 1e-300, 1e200])
        elif case == 4:
            del x[name]
        elif case == 5:
            with pytest.raises(ValueError, match="finite"):
                model.learn_one(x | {name: math.inf}, target, w)
        told = model.predict_proba_one(x) if classes else model.predict_one(x)
        assert all(math.isfinite(v) for v in (told.values() if classes else [told]))
        right += [] if i < 3_000 else [model.predict_one(x) == target if classes else abs(told - target)]
        model.learn_one(x, target, w)
        sizes += [len(pickle.dumps(model))] if i in (1_500, 3_999) else []
    assert np.mean(right) > 0.8 if classes else np.mean(right) < 3.0
    assert max(sizes) < 5e6  # 16,384 rows of 16 inputs, with 80 further bytes each, are 1.6e6 of them


@pytest.mark.parametrize(("n", "d", "noise"), [(60, 4, 3.0), (200, 12, 0.5), (40, 30, 5.0), (300, 3, 100.0)])
def test_the_linear_head_of_fit_is_that_of_largest_evidence(n, d, noise):
    rng = np.random.default_rng(n)
    X = rng.standard_normal((n, d)) @ rng.standard_normal((d, d))
    Y = X @ rng.standard_normal((d, 1)) + noise * rng.standard_normal((n, 1)) + 7.0
    parts = np.split(np.arange(n), [n // 3])
    slopes, intercepts = linear.fitted((X[some], Y[some], np.ones(len(some))) for some in parts)
    Z, T = X - X.mean(0), Y - Y.mean(0)
    ridges = np.logspace(-4, 6, 2001)
    best = max(ridges, key=lambda ridge: log_evidence(X, Y, ridge, np.zeros((1, d))))
    wanted = ridge_regression(Z, T, np.ones(n), np.full(d, best), np.zeros((1, d)))
    np.testing.assert_allclose(slopes @ Z.T, wanted @ Z.T, atol=0.03 * T.std())
    np.testing.assert_allclose(slopes @ X.mean(0) + intercepts, Y.mean(0))


def test_the_linear_head_of_fit_sees_weights_units_and_constant_targets():
    rng = np.random.default_rng(0)
    X, weight = rng.standard_normal((80, 3)), rng.uniform(0.5, 2.0, 80)
    Y = np.c_[X @ [1.0, -2.0, 0.5] + rng.standard_normal(80), np.full(80, 3.0), rng.standard_normal(80)]
    slopes, intercepts = linear.fitted([(X, Y, weight)])
    scaled, _ = linear.fitted([(X, Y * [1.0, 1.0, 1e6], 1e3 * weight)])
    np.testing.assert_allclose(scaled / [[1.0], [1.0], [1e6]], slopes, rtol=1e-9)
    assert not slopes[1].any()
    assert intercepts[1] == pytest.approx(3.0)
    assert not linear.fitted([(np.zeros((5, 2)), Y[:5], weight[:5])])[0].any()
