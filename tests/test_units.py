"""Units: a target or a feature times a million or a millionth changes no prediction of another target.

The second target is noise, whose large unit would show in every sum over outputs. Heads by themselves promise it for
targets: a ridge is in the units of the features. Learners of rows standardize, so they promise it for both.
"""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from sepsa import RLS, PerOutput, SepSA, SepSAClassifier, SepSAForecaster, SepSARegressor
from sepsa.river import SepSARegressor as RiverRegressor

N, PROBES, K = 200, 40, 4
UNITS = (1e-6, 1e3, 1e6)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N + PROBES, K))
X[:, 3] = X[:, 3] > 0
Y = np.column_stack([X @ [1.0, -2.0, 0.5, 1.0] + 0.5 * RNG.normal(size=len(X)), RNG.normal(size=len(X))])
WAVE = np.sin(np.arange(N) * 2 * np.pi / 24) + 0.5 * X[:N, 1]
LABELS = (X[:, 0] + X[:, 1] > 0).astype(int) + (X[:, 2] > 1)


def head(make, X, Y, size=10):
    torch.manual_seed(0)
    linear = nn.Linear(K, 2).double()
    solver, x, y = make().bind(linear), torch.from_numpy(X), torch.from_numpy(Y)
    for rows in torch.arange(N).split(size):
        solver.update(x[rows], y[rows])
    return linear(x[N:]).detach().numpy()


def network(make, X, Y):
    """A body at rest: what follows the loss follows the largest target."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    optimizer = SepSA(model, torch.optim.SGD, lr=0.0, solver=make and make())
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    for rows in torch.arange(N).split(10):
        optimizer.learn(x[rows], y[rows])
    return model(x[N:]).detach().numpy()


HEADS = {
    "RLS": partial(head, RLS),
    "RLS, forgetting": partial(head, partial(RLS, forgetting=0.95)),
    "evidence": partial(head, partial(RLS, ridge="evidence")),
    "evidence, one by one": partial(head, partial(RLS, ridge="evidence"), size=1),
    "evidence, forgetting": partial(head, partial(RLS, ridge="evidence", forgetting=0.95)),
    "PerOutput": partial(head, lambda: PerOutput(RLS(ridge="evidence"))),
    "SepSA": partial(network, None),
    "SepSA, RLS": partial(network, RLS),
    "SepSA, PerOutput": partial(network, lambda: PerOutput(RLS())),
}


def regressor(fit, X, Y):
    model = SepSARegressor(random_state=0)
    if fit:
        return model.fit(X[:N], Y[:N]).predict(X[N:])
    for rows in np.array_split(np.arange(N), 10):
        model.partial_fit(X[rows], Y[rows])
    return model.predict(X[N:])


def classifier(fit, X, Y):
    model = SepSAClassifier(random_state=0)
    if fit:
        return model.fit(X[:N], LABELS[:N]).predict_proba(X[N:])
    for rows in np.array_split(np.arange(N), 10):
        model.partial_fit(X[rows], LABELS[rows], classes=np.arange(3))
    return model.predict_proba(X[N:])


def river(X, Y):
    model = RiverRegressor(seed=0)
    rows = [{str(j): value for j, value in enumerate(row)} for row in X.tolist()]
    for row, y in zip(rows[:N], Y[:N, 0].tolist(), strict=True):
        model.learn_one(row, y)
    return np.array([[model.predict_one(row)] for row in rows[N:]])


def forecaster(X, Y):
    """Forecasts of two series from inputs of the rows to come; the second one is noise."""
    model = SepSAForecaster(horizon=PROBES, seasons=[24], known_ahead=True)
    inputs = [{str(j): value for j, value in enumerate(row)} for row in X.tolist()]
    for i in range(N):
        model.learn_one({"wave": WAVE[i], "noise": Y[i, 1]}, inputs[i])
    return np.array([[row["wave"]] for row in model.forecast(xs=inputs[N:])])


LEARNERS = {
    "SepSARegressor.fit": partial(regressor, True),
    "SepSARegressor.partial_fit": partial(regressor, False),
    "SepSAClassifier.fit": partial(classifier, True),
    "SepSAClassifier.partial_fit": partial(classifier, False),
    "River": river,
    "SepSAForecaster": forecaster,
}


def changes(face, part):
    """The largest changes of predictions of the first output, in standard deviations, by unit."""
    before, found = face(X, Y), []
    for unit in UNITS:
        tables = {"X": X.copy(), "Y": Y.copy()}
        tables[part][:, 1] *= unit
        found.append(float(np.abs(face(**tables) - before)[:, 0].max() / before[:, 0].std()))
    return found


@pytest.mark.parametrize("name", HEADS)
def test_the_unit_of_a_target_changes_no_prediction_of_another(name):
    # Four digits of the squares of a target of 1e-6 are left beside those of the initial weights.
    assert max(changes(HEADS[name], "Y")) < 1e-3


@pytest.mark.parametrize("name", ["SepSARegressor.fit", "SepSARegressor.partial_fit", "SepSAForecaster"])
def test_learners_standardize_targets(name):
    assert max(changes(LEARNERS[name], "Y")) < 1e-9


@pytest.mark.parametrize("name", LEARNERS)
def test_learners_standardize_features(name):
    assert max(changes(LEARNERS[name], "X")) < 1e-6
