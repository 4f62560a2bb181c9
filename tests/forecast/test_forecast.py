"""`SepSAForecaster`: each step learns late targets exactly and never early; gaps, times, states, and 300 attempts."""

from __future__ import annotations

import contextlib
import copy
import pickle
import re
import warnings
from datetime import datetime, timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sepsa
import sepsa.river
from breaking.damage import same
from plain_kernels import plain_kernels
from reference import (
    candidate_weights,
    changes_of_inputs,
    faded_rows,
    inputs_of_heads,
    late_regression,
    smoothed_trend,
)
from sepsa import SepSAForecaster, SepSAPanelForecaster
from sepsa.checkpoint import CheckpointError
from sepsa.forecast.kernels import choice
from sepsa.forecast.model import ForecastModel, Rows, Settings
from sepsa.forecast.seasons import find_seasons
from sepsa.interfaces.keyed import KeyedLearner
from sepsa.states.sealed import sealed

HOUR = 3600.0


def series(n=600, m=2, seed=0):
    """A daily season, an autoregression and a coupling: the second series follows the first one row later."""
    rng = np.random.default_rng(seed)
    Y = np.zeros((n, m))
    for t in range(1, n):
        Y[t] = 0.8 * Y[t - 1] + rng.normal(size=m)
        Y[t, 1:] += 0.5 * Y[t - 1, :-1]
    return Y + 3 * np.sin(2 * np.pi * np.arange(n) / 12)[:, None] + 10


def forecaster(**options):
    return SepSAForecaster(**({"horizon": 4, "lags": 6, "seasons": (12,), "ridge": 1.0} | options))


def ridge_left(above, D, X, forgetting):
    """What a head has of its ridge: the information of B = UDUᵀ less that of the faded rows X."""
    U = np.eye(len(D))
    for b in range(len(D)):
        U[:b, b] = above[b * (b - 1) // 2 : b * (b - 1) // 2 + b]
    return np.linalg.inv(U @ np.diag(D) @ U.T) - faded_rows(X, forgetting)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1.0, 0.999, 0.97, 0.6]), st.integers(1, 5), st.integers(8, 60))
def test_each_step_has_the_weights_of_ridge_regression_and_no_ridge_sinks_below_half(seed, forgetting, ahead, rows):
    z = np.random.default_rng(seed).normal(size=(rows, 2)).cumsum(0)
    settings_of_model = Settings(2, 0, 5, 3, (7.0,), (forgetting,), 2.0)
    model, earlier = ForecastModel(settings_of_model), ForecastModel(settings_of_model)
    model.learn(Rows(z, np.empty((rows, 0))))
    earlier.learn(Rows(z[: rows - ahead], np.empty((rows - ahead, 0))))
    ridge, W = model.memory("RIDGE", "fixed"), model.memory("W", "heads")
    for j in range(2):
        X = inputs_of_heads(z, j, 3, 7, [1, 2])
        U, D = (earlier.memory(name, "heads")[0, j] for name in "UD")
        left = ridge_left(U, D, X[: rows - ahead], forgetting)
        # The inverse loses digits with the size of the information, about 1e4 here.
        np.testing.assert_allclose(left, np.diag(np.diag(left)), atol=1e-6)
        assert (np.diag(left) >= 0.5 * ridge - 1e-6).all()
        assert (np.diag(left) <= ridge + 1e-6).all()
        expected = late_regression(X, z[:, j], ahead, forgetting, np.diag(left))
        np.testing.assert_allclose(W[0, j, ahead - 1], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("forgetting", "lags"), [(0.98, 100), (0.95, 60)])
def test_no_ridge_sinks_below_half_while_nothing_is_learned(forgetting, lags):
    """A series that stays at its mean tells its heads nothing: what they have is their ridge."""
    model = ForecastModel(Settings(1, 0, 2, lags, (), (forgetting,), 2.0))
    for _ in range(12):
        model.learn(Rows(np.zeros((40, 1)), np.empty((40, 0))))
        left = 1 / model.memory("D", "heads")[0, 0, 1:lags]
        assert left.min() >= 1.0
        assert left.max() <= 2.0 * (1 + 1e-9)


def test_the_kernels_as_plain_python_forecast_the_same_and_stay_within_their_arrays():
    """Compiled code does not notice an index beyond the end of an array; plain Python does."""
    y, x = series(40), np.random.default_rng(0).normal(size=(40, 1))
    small = {"horizon": 3, "lags": 4, "seasons": (5, 7)}
    compiled = [forecaster(**small).prequential(y), forecaster(**small, known_ahead=True).prequential(y, x)]
    with plain_kernels():
        plain = [forecaster(**small).prequential(y), forecaster(**small, known_ahead=True).prequential(y, x)]
    for one, other in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-7)  # the order of sums differs


def test_a_new_leader_has_the_lead_over_all_others_and_one_event_makes_none():
    """The recent mean of how much smaller the errors of each naive forecast are than the leader's, when it changes."""
    rng, rate = np.random.default_rng(0), 0.01
    errors = rng.exponential(size=(600, 3)) * [1.0, 1.0, 0.7]
    errors[300:310, 0] += 5.0
    known, leader, led = np.zeros((3, 7)), 0, []
    for row in errors:
        lead = row[leader] - row
        known[:, :2] += rate * (np.stack([lead, lead**2], 1) - known[:, :2])
        leader = choice.follow_leader(known, leader, -1, rate / (2 - rate), 2.0)
        led.append(leader)
    assert led[-1] == 2
    recent = rate * (1 - rate) ** np.arange(600)[::-1] @ errors
    np.testing.assert_allclose(known[:, 0], recent[2] - recent, rtol=1e-9, atol=1e-12)
    alike = rng.exponential(size=(400, 2))
    alike[200:205, 0] = 40.0  # an event of five rows
    known, leader = np.zeros((2, 7)), 0
    for row in alike:
        known[1, :2] += rate * (np.array([row[0] - row[1], (row[0] - row[1]) ** 2]) - known[1, :2])
        # errors of ten rows ahead
        assert choice.follow_leader(known.copy(), 0, -1, 10 * rate / (2 - rate), 2.0) == 0


def test_changes_that_are_inputs_are_over_a_few_rows_and_about_a_season():
    forms = [Settings(1, 0, 2, lags, seasons, (1.0,), 30.0).spans() for lags, seasons in ((3, ()), (96, (24.0,)))]
    assert forms == [[1, 2], [1, 2, 3, 23, 24, 25]]


@pytest.mark.parametrize(
    ("t", "timed"), [*((t, False) for t in (1, 5, 63, 64, 200, 255, 256, 400)), (64, True), (400, True)]
)
def test_no_forecast_knows_a_later_value(t, timed):
    Y, rng, more = series(), np.random.default_rng(1), {}
    Y[100:110, 0] = np.nan
    other = Y.copy()
    other[t + 1 :] = 1000 - 3 * other[t + 1 :]
    X = rng.normal(size=(len(Y), 1))
    if timed:
        hours = np.sort(rng.choice(800, len(Y), replace=False)) + rng.uniform(-1, 1, len(Y)) / 60
        more = {"times": 3600 * hours}
    for options in ({}, {"lags": "auto", "seasons": "auto"}):
        one, two = (forecaster(**options).prequential(rows, X, coverage=0.9, **more) for rows in (Y, other))
        for a, b in zip(one, two, strict=True):
            assert a[: t + 1].tobytes() == b[: t + 1].tobytes()
            assert a[t + 1 :].tobytes() != b[t + 1 :].tobytes()


def test_rows_one_by_one_and_in_blocks_give_the_same_bytes():
    Y = series(400)
    whole, blocks, single = forecaster(), forecaster(), forecaster()
    made = whole.prequential(Y)
    parts = [blocks.prequential(part) for part in np.array_split(Y, [3, 70, 71, 300])]
    assert made.tobytes() == np.concatenate(parts).tobytes()
    for i, y in enumerate(Y):
        single.learn_one(list(y))
        assert [list(step.values()) for step in single.forecast()] == made[i].tolist()
    assert same([model.state_dict() for model in (blocks, single)], [whole.state_dict()] * 2)


@pytest.mark.parametrize("rows", [0, 100])
def test_a_saved_forecaster_keeps_names_of_any_kind(rows):
    """breaking/test_resume.py goes on with one."""
    model = forecaster(step=60.0)
    for i, y in enumerate(series(rows)):
        model.learn_one({"a": y[0], ("b", 1): y[1]}, {"x": float(i)}, time=60.0 * i)
    for other in (sepsa.checkpoint.from_bytes(sepsa.checkpoint.to_bytes(model)), pickle.loads(pickle.dumps(model))):
        assert same(other.state_dict(), model.state_dict())
        assert rows == 0 or other.forecast() == model.forecast()


def test_a_damaged_state_is_refused_and_changes_nothing():
    model = forecaster()
    model.prequential(series(300))
    good, before = model.state_dict(), copy.deepcopy(model.state_dict())
    for part, name in (("heads", "U"), ("stack", "D"), ("shared", "COUNTS"), ("shared", "LAGS"), ("stack", "PROFILE")):
        for damage in (np.full_like(good["model"][part][name], 7), good["model"][part][name][:1], None, object()):
            damaged = good | {"model": good["model"] | {part: good["model"][part] | {name: damage}}}
            with pytest.raises(ValueError, match=r"state_dict.*(checksum|must be made of)"):
                model.load_state_dict(damaged)
    for damaged in ({"clock": good["clock"] | {"last": 5}}, {"first": np.zeros((5, 2))}, {"names": ["a", "b"]}):
        with pytest.raises(ValueError, match=r"'checksum'\] must be that of the other entries, got \d+"):
            model.load_state_dict(good | damaged)
    assert same(model.state_dict(), before)
    model = forecaster()  # an outlier as the last value is no damage
    model.prequential(np.append(series(300, 1)[:, 0], 1e90))
    assert pickle.loads(pickle.dumps(model)).forecast() == model.forecast()


@pytest.mark.parametrize(
    ("part", "name", "damage"),
    [
        ("shared", "COUNTS", lambda old: old - 10**15),
        ("stack", "LEADER", lambda old: old + 1000),
        ("heads", "W", lambda old: old[:, :, :1]),
    ],
)
def test_no_state_with_its_own_checksum_leads_kernels_beyond_their_arrays(part, name, damage):
    model = forecaster()
    model.prequential(series(300))
    state = model.state_dict()
    state["model"][part][name] = damage(state["model"][part][name])
    with pytest.raises(ValueError, match=f"'{part}'.*'{name}'"):
        model.load_state_dict(sealed(state))


@pytest.mark.parametrize("off", [-1000, 1000])
def test_no_turn_of_the_restoration_leads_kernels_beyond_their_arrays(off):
    with plain_kernels():
        model = forecaster(horizon=3, lags=4, seasons=(5,), forgetting=(0.97,))
        model.prequential(series(20))
        state = model.state_dict()
        state["model"]["heads"]["TURN"] += off
        state["model"]["heads"]["FIRST"] += off
        model.load_state_dict(sealed({name: value for name, value in state.items() if name != "checksum"}))
        assert np.isfinite(model.prequential(series(30)[20:])).all()


def test_a_gap_in_time_is_rows_of_missing_values():
    Y = series(300)
    start = datetime(2026, 3, 1)
    kept = [i for i in range(300) if not 120 <= i < 140 and i != 290]
    timed, plain = forecaster(), forecaster()
    for i in kept:
        timed.learn_one(list(Y[i]), time=start + timedelta(hours=i))
    gaps = Y.copy()
    gaps[[i for i in range(300) if i not in kept]] = np.nan
    plain.prequential(gaps)
    assert timed.forecast() == plain.forecast()
    assert timed.rows == 300
    array = forecaster()
    made = array.prequential(Y[kept], times=[np.datetime64("2026-03-01T00") + np.timedelta64(i, "h") for i in kept])
    assert made.shape == (len(kept), 4, 2)
    assert array.forecast() == plain.forecast()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"time": 3540.0}, "at least half a step .minute. after that of the last row, 3540, got 3540: aggregate"),
        ({"time": 3480.0}, "later than that of the last row, 3540, got 3480 .call fit again where .*: sort the table"),
        ({"time": 1e16}, "seconds up to 1e15"),
        ({"time": datetime(2026, 1, 1)}, "must be numbers as before, got dates"),
        ({"time": "noon"}, "time must be seconds up to 1e15, a datetime or a datetime64, got 'noon'"),
        ({"y": [np.inf, 1.0]}, "y must hold numbers up to 1e[+]100, or NaN, got inf for 0"),
        ({"y": ["1 m", 1.0]}, "y must hold numbers, got '1 m' for 0"),
        ({"y": {"a": 1.0}}, "y must have the names of the first row, 0, 1, got 'a'"),
        ({"x": {"x": 1.0, "z": 2.0}}, "x must have the names of the first row, 'x', got 'z'"),
    ],
)
def test_bad_rows_are_named_errors_and_change_nothing(arguments, words):
    model = forecaster()
    for i, y in enumerate(series(60)):
        model.learn_one(list(y), {"x": 1.0}, time=60.0 * i)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=words):
        model.learn_one(**({"y": [1.0, 2.0], "x": {"x": 1.0}, "time": 3600.0} | arguments))
    assert same(model.state_dict(), before)


def test_wrong_options_a_longer_horizon_and_no_row_are_named():
    for name, value, words in (
        ("horizon", 0, "horizon must be an integer of at least 1, got 0"),
        ("lags", 0, "lags must be"),
        ("seasons", (1.0,), "periods of more than 2 and up to 100000 rows"),
        ("forgetting", (), "forgetting must hold 1 to 16 numbers"),
        ("forgetting", (1.2,), "forgetting must be in"),
        ("ridge", 0.0, "ridge must be in"),
    ):
        with pytest.raises(ValueError, match=words):
            forecaster(**{name: value})
    model = forecaster()
    for ask in (model.forecast, model.intervals, model.predict):
        with pytest.raises(ValueError, match="learned no row yet: call fit, learn_one or prequential first"):
            ask()
    made = model.prequential(series(100), horizon=3)
    assert made.shape == (100, 3, 2)
    assert model.forecast(2) == model.forecast()[:2]
    with pytest.raises(ValueError, match=r"at most 4.*got 5: make one with SepSAForecaster\(horizon=5\)"):
        model.forecast(5)


@pytest.mark.parametrize(("learned", "at"), [(40, 1), (40, 2), (40, 3), (2100, 1), (2100, 2)])
def test_an_error_inside_a_call_leaves_clock_and_model_as_they_were(learned, at, monkeypatch):
    """Rows are learned in several steps: again as the warm-up goes on, and before and after a long gap."""
    Y = series(learned + 300)
    times = HOUR * (np.arange(len(Y)) + 600 * (np.arange(len(Y)) > learned + 100))
    model = forecaster()
    model.update(Y[:learned], times=times[:learned])
    before, learned_by, calls = model.state_dict(), ForecastModel.learn, []

    def fail(self, *rows):
        calls.append(rows)
        if len(calls) == at:
            raise MemoryError("no more")
        return learned_by(self, *rows)

    monkeypatch.setattr(ForecastModel, "learn", fail)
    with pytest.raises(MemoryError):
        model.update(Y[learned:], times=times[learned:])
    assert same(model.state_dict(), before)
    monkeypatch.undo()
    whole = forecaster().update(Y, times=times)
    assert same(model.update(Y[learned:], times=times[learned:]).state_dict(), whole.state_dict())


def test_outliers_are_bounded_and_a_new_level_is_followed():
    Y = series(1200, 1)[:, 0]
    clean = forecaster().prequential(Y)
    spoiled, model = Y.copy(), forecaster()
    spoiled[[500, 501, 700]] = 1e90, -1e90, 1e6
    made = model.prequential(spoiled)
    assert np.isfinite(made).all()
    assert model.outliers_ >= 3
    errors = [np.abs(f[900:-1, 0] - Y[901:]).mean() for f in (clean, made)]
    assert errors[1] < 1.1 * errors[0]
    shifted = Y + 1e4 * (np.arange(1200) >= 600)
    made = forecaster().prequential(shifted)
    assert np.abs(made[900:-1, 0] - shifted[901:]).mean() < 1.3 * errors[0]


def test_a_series_that_dies_leaves_the_others_and_its_own_forecasts_bounded():
    Y = series(3000)
    dead = Y.copy()
    dead[1000:, 1] = np.nan
    made, whole = forecaster().prequential(dead), forecaster().prequential(Y)
    assert np.isfinite(made).all()
    assert np.abs(made[:, :, 1]).max() < 10 * np.abs(Y[:, 1]).max()
    errors = [np.abs(f[2000:-1, 0, 0] - Y[2001:, 0]).mean() for f in (whole, made)]
    assert errors[1] < 1.1 * errors[0]
    constant = forecaster().prequential(np.full((600, 1), 7.0))
    assert constant == pytest.approx(7.0)


def test_exogenous_inputs_known_ahead_explain_what_lags_cannot():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 1))
    y = 3 * x[:, 0] + 0.1 * rng.normal(size=2000)
    model = forecaster(seasons=(), known_ahead=True)
    made = model.prequential(y, x)
    errors = [np.abs(made[1000 : -h - 1, h] - y[1000 + h + 1 :]).mean() for h in range(4)]
    assert max(errors) < 0.3  # of values whose deviation is 3, with noise of 0.1
    unknown = forecaster(seasons=()).prequential(y, x)
    assert np.abs(unknown[1000:-1, 0] - y[1001:]).mean() > 1.5
    ahead = model.forecast(2, xs=[{0: 1.0}, {0: -1.0}])
    assert ahead == pytest.approx([3.0, -3.0], abs=0.5)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(20, 200))
def test_inputs_explain_by_the_weighted_mean_of_three_ways(seed, rows):
    """By nothing, by a regression on their changes, and by one of the change of the series since a season ago."""
    rng = np.random.default_rng(seed)
    z, E = rng.normal(size=rows + 6), rng.normal(size=(rows + 6, 2)).cumsum(0)
    model = ForecastModel(Settings(1, 2, 6, 3, (4.0, 9.0), (0.99,), 2.0))
    model.learn(Rows(z[:rows, None], E[:rows]))
    ways = model.memory.of("exogenous")
    D = changes_of_inputs(E[:rows], [4, 9])
    left = ridge_left(ways("U"), ways("D"), D, 0.9998)
    np.testing.assert_allclose(left, np.diag(np.diag(left)), atol=1e-6)
    share = 0.9998 ** np.arange(rows - 5, -1, -1.0)
    b = (D[4:] * share[:, None]).T @ (z[4:rows] - z[: rows - 4])
    season = np.linalg.solve(faded_rows(D, 0.9998) + np.diag(np.diag(left)), b)
    np.testing.assert_allclose(ways("W")[0, -1], season, rtol=1e-6, atol=1e-9)
    made, explained = model.forecast(np.empty((0, 2)))[0], model.forecast(E[rows:])[0]
    for h in range(6):
        t = rows + h
        d = np.hstack([E[t] - E[t - 4], E[t] - E[t - 9]]) / np.sqrt(ways("SQUARES"))
        last = z[t - 4] if h < 4 else z[t - 8]
        by = [0.0, ways("W")[0, h] @ d, last + season @ d - made[0, h]]
        mean = candidate_weights(ways("LOSS")[0, h], 10.0, 1e-300, 0.0) @ by
        assert explained[0, h] - made[0, h] == pytest.approx(mean, rel=1e-6, abs=1e-9)


def changing_inputs(rows=3000):
    """A series whose change since a day ago is twice that of an input, and the input."""
    rng = np.random.default_rng(0)
    x = 0.1 * rng.normal(size=(rows, 1)).cumsum(0) + np.sin(np.arange(rows)[:, None] * 2 * np.pi / 24)
    y = 0.1 * rng.normal(size=rows)
    for t in range(24, rows):
        y[t] += y[t - 24] + 2 * (x[t, 0] - x[t - 24, 0])
    return y, x


def test_changes_of_inputs_since_a_day_ago_explain_those_of_a_series():
    y, x = changing_inputs()
    made = forecaster(horizon=24, seasons=(24,), known_ahead=True).prequential(y, x)
    for h in (0, 5, 23):  # the least mean absolute error is that of the noise, 0.08
        assert np.abs(made[1500 : -h - 1, h] - y[1500 + h + 1 :]).mean() < 0.1
    model = forecaster(horizon=24, seasons=(24,))
    model.update(y[:2000], x[:2000])
    np.testing.assert_allclose(model.predict(24, x[2000:2024]), made[1999], rtol=1e-3)


def test_inputs_that_explain_nothing_cost_nothing():
    rng = np.random.default_rng(0)
    y = 3 * np.sin(2 * np.pi * np.arange(1500) / 12) + rng.normal(size=1500)
    for X in (rng.normal(size=(1500, 3)), rng.normal(size=(1500, 2)).cumsum(0)):
        for seasons in ((12,), ()):
            alone, beside = (
                forecaster(seasons=seasons, lags=24, known_ahead=True).prequential(y, inputs) for inputs in (None, X)
            )
            assert error(beside, y, 500) < 1.02 * error(alone, y, 500)


def test_errors_are_those_of_the_forecasts_that_were_made():
    y, x = changing_inputs()
    for known_ahead in (False, True):
        model = forecaster(horizon=24, seasons=(24,), known_ahead=known_ahead)
        made = model.prequential(y, x)
        for h in (0, 11):
            recent = np.abs(made[2000 : -h - 1, h] - y[2001 + h :]).mean()
            assert model.errors_["forecast"][0, h] == pytest.approx(recent, rel=0.25)


def test_intervals_know_the_hour_at_which_errors_are_large():
    rng, hour = np.random.default_rng(0), np.arange(24 * 150) % 24
    y = np.sin(2 * np.pi * hour / 24) + np.where((hour >= 7) & (hour < 20), 1.0, 0.1) * rng.normal(size=hour.size)
    _, low, high = SepSAForecaster(4, seasons=(24,)).prequential(y, coverage=0.9)
    for h in range(4):
        first = 24 * 60
        inside = (low[first : -h - 1, h] <= y[first + h + 1 :]) & (y[first + h + 1 :] <= high[first : -h - 1, h])
        shares = [inside[hour[first + h + 1 :] == k].mean() for k in range(24)]
        assert min(shares) > 0.78
        assert np.mean(inside) == pytest.approx(0.9, abs=0.02)


def test_an_event_that_comes_again_at_its_hour_is_learned_and_a_single_one_is_not():
    rng, hour = np.random.default_rng(0), np.arange(24 * 90) % 24
    y = rng.normal(size=hour.size)
    job = y + np.where(hour == 2, 60.0, 0.0) * (np.arange(hour.size) > 24 * 20)
    model = SepSAForecaster(6, seasons=(24,))
    made = model.prequential(job)
    late = np.flatnonzero(hour == 2)[-20:]
    assert np.abs(made[late - 1, 0] - job[late]).mean() < 6.0
    assert model.outliers_ < 10
    once = y.copy()
    once[24 * 50 + 2] += 60.0
    model = SepSAForecaster(6, seasons=(24,))
    assert np.abs(model.prequential(once)[24 * 50 + 2 :]).max() < 6.0
    assert model.outliers_ == 1


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_a_series_that_begins_with_zeros_is_forecast_alike_in_every_unit(unit):
    y = np.append(np.zeros(300), 50.0 + day_and_week(400))
    expected, made = small().prequential(y), small().prequential(unit * y)
    np.testing.assert_allclose(made, unit * expected, rtol=1e-6, atol=1e-6 * unit)


@pytest.mark.parametrize("coverage", [0.05, 0.5, 0.8, 0.9, 0.999])
def test_intervals_hold_their_share_of_the_values_at_every_step(coverage):
    rng = np.random.default_rng(3)
    y, model = np.cumsum(rng.standard_t(4, 6000)) * np.repeat([1.0, 5.0], 3000), forecaster(seasons=())
    _, low, high = model.prequential(y, coverage=coverage)
    assert (low <= high).all()
    for h in range(4):
        target = y[1001 + h :]
        inside = (low[1000 : len(y) - h - 1, h] <= target) & (target <= high[1000 : len(y) - h - 1, h])
        assert inside.mean() == pytest.approx(coverage, abs=0.02)
    for wrong in (0, 1, 1.5, -1, True):
        with pytest.raises(ValueError, match=r"coverage must be a share in \(0, 1\)"):
            model.intervals(coverage=wrong)


FEW = {
    "noise": np.random.default_rng(0).normal(size=30),
    "constant": np.full(30, 7.0),
    "missing": np.full(30, np.nan),
    "starts missing": np.where(np.arange(30) < 12, np.nan, np.arange(30) % 5),
}


@pytest.mark.parametrize("bounds", [(None, None), (-50, None)])
@pytest.mark.parametrize("name", FEW)
def test_no_interval_is_narrower_than_the_evidence(name, bounds):
    """It has ends only where its step has coverage / (1 - coverage) errors; no value, no forecast."""
    y, low_bound = FEW[name], -np.inf if bounds[0] is None else bounds[0]
    there = ~np.isnan(y)
    for coverage, needed in ((0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19)):
        model = forecaster(bounds=bounds, seasons=())
        made, low, high = model.prequential(y, coverage=coverage)
        assert (np.isnan(made[:, 0]) == (np.cumsum(there) == 0)).all()
        for h in range(4):
            began = np.argmax(there)  # the first row after which there was a forecast
            errors = np.array([there[began + h + 1 : max(t, began + h) + 1].sum() for t in range(30)])
            assert (np.isinf(high[:, h]) == (errors < needed)).all()
            assert ((low[:, h] == low_bound) | (errors >= needed)).all()
        single = forecaster(bounds=bounds, seasons=())
        for t in range(30):
            single.learn_one(y[t])
            ends = np.array(single.intervals(coverage=coverage))
            assert (ends[:, 0].tobytes(), ends[:, 1].tobytes()) == (low[t].tobytes(), high[t].tobytes())


def test_errors_of_a_series_that_starts_missing_have_their_whole_size_at_once():
    y = np.random.default_rng(0).normal(size=400)
    late = np.concatenate([np.full(200, np.nan), y])
    ends = [np.subtract(*forecaster(seasons=()).prequential(rows, coverage=0.9)[:0:-1]) for rows in (y, late)]
    assert ends[1][212:230].mean() == pytest.approx(ends[0][12:30].mean(), rel=0.5)


def test_seasons_are_found_as_they_are_or_none():
    t = np.arange(256)
    wave = np.sin(2 * np.pi * t / 24)[:, None] + 0.1 * np.random.default_rng(0).normal(size=(256, 1))
    assert find_seasons(wave) == (24.0,)
    third = 0.47 * np.sin(2 * np.pi * t / 8)[:, None]  # a lower peak, at a third of the period
    assert find_seasons(wave + third) == (24.0,)
    assert find_seasons(np.random.default_rng(0).normal(size=(256, 1)).cumsum(0)) == ()
    assert find_seasons(np.ones((64, 1))) == ()
    t, rng = np.arange(1024), np.random.default_rng(0)
    for period in (12, 23, 25, 52):
        wave = np.sin(2 * np.pi * t / period) + 0.02 * rng.normal(size=1024)
        assert find_seasons(wave[:, None]) == (float(period),)
    week = np.sin(2 * np.pi * t / 24) + 3 * np.where(t // 24 % 7 < 2, np.sin(2 * np.pi * t / 12), 0)
    assert find_seasons(week[:, None]) == (24.0, 168.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_day_is_found_whose_hours_shift_and_it_has_a_week_as_soon_as_two_fit(seed):
    rng = np.random.default_rng(seed)
    shift = np.repeat(rng.integers(-1, 2, 22), 24)[:512]
    day = np.exp(3 * np.sin(2 * np.pi * (np.arange(512) + shift) / 24)) + 0.5 * rng.normal(size=512)
    assert find_seasons(day[:256, None]) == (24.0,)
    assert find_seasons(day[:, None]) == (24.0, 168.0)


@pytest.mark.parametrize("seasons", [(), (12,)])
def test_a_trend_is_followed_at_every_step(seasons):
    t, rng = np.arange(160), np.random.default_rng(0)
    y = 2.0 * t + (10 * np.sin(2 * np.pi * t / 12) if seasons else 0) + rng.normal(size=160)
    made = SepSAForecaster(12, seasons=seasons).prequential(y[:148])[-1]
    assert np.abs(made - y[148:]).max() < 5  # the last value is wrong by 24, and that of a season too


def test_exponential_smoothing_equals_its_textbook_form():
    t, rng = np.arange(150), np.random.default_rng(0)
    y = 0.3 * t + 10 * np.sin(2 * np.pi * t / 12) + rng.normal(size=150) + rng.normal(size=150).cumsum()
    model = SepSAForecaster(5, seasons=(12,)).fit(y)._model
    shared, stack = model.memory.of("shared"), model.memory.of("stack")
    made = stack("SMOOTHED")[149 % 5, 0] * shared("SCALE") + shared("MEAN")
    np.testing.assert_allclose(made, smoothed_trend(y, 0.95, 0.5, 0.95, 5), rtol=1e-9)


def test_river_evaluates_it():
    evaluate = pytest.importorskip("river.evaluate")
    from river import datasets, metrics

    ours = evaluate.evaluate(datasets.AirlinePassengers(), sepsa.river.SepSAForecaster(12), metrics.MAE(), horizon=12)
    assert len(ours.get()) == 12
    assert np.isfinite(ours.get()).all()


def day_and_week(n, seed=0):
    """Hourly values with a day, a week and noise."""
    t = np.arange(n)
    rng = np.random.default_rng(seed)
    return 10 + 4 * np.sin(2 * np.pi * t / 24) + 3 * (t % 168 < 120) + 0.3 * rng.normal(size=n)


def small(**options):
    return SepSAForecaster(**({"horizon": 4, "lags": 8, "seasons": (24,)} | options))


def error(made, y, first, h=1):
    return np.nanmean(np.abs(made[first:-h, h - 1] - y[first + h :]))


def solar(n):
    return np.maximum(0, np.sin(2 * np.pi * (np.arange(n) - 300) / 288)) * 5.26e6 * (np.arange(n) > 290)


def plant(seed):
    """Whole stretches at another level, as of a plant that is switched off, and stretches that are missing."""
    rng, y = np.random.default_rng(seed), 100 + 0.3 * np.random.default_rng(seed).normal(size=1200).cumsum() / 10
    for start in rng.integers(100, 1100, 6):
        y[start : start + 30] -= 40
    y[450:480] = np.nan
    return y


WEEK = {"horizon": 24, "lags": 24, "seasons": (24, 168)}
WALK = {"horizon": 8, "lags": 12, "seasons": "auto"}
EXTREME = {"forgetting 0.6": {"forgetting": (0.6,)}} | {f"ridge {r}": {"ridge": r} for r in (1e-30, 1e-6, 1e90)}
SERIES = {  # values, options, and the error at steps ahead relative to that of the last value
    "starts at night": (solar(2000), {}, {1: 1.1}),
    "starts missing": (np.where(np.arange(1200) < 280, np.nan, 5e5 + 1e5 * day_and_week(1200)), {}, {1: 1.1}),
    "rises": (10 ** np.linspace(1, 6, 1500) * (1 + 0.01 * day_and_week(1500)), {}, {1: 1.1}),
    "jumps": (np.where(np.arange(1200) < 500, 10.0, 1e6) + day_and_week(1200), {}, {1: 1.1}),
    "falls": (1e6 * 10 ** -np.linspace(0, 5, 1500) * (1 + 0.01 * day_and_week(1500)), {}, {1: 1.1}),
    "switched off": (plant(100), WEEK, {1: 1.05, 24: 1.05}),
    "switched off at other times": (plant(101), WEEK, {1: 1.05, 24: 1.05}),
    "a random walk": (np.random.default_rng(0).normal(size=2000).cumsum(), WALK, {1: 1.01, 8: 1.01}),
    **{
        f"{name}, {setting}": (y, options, {1: 1.05})
        for name, y in {"solar": solar(900), "a week": day_and_week(900), "zero": np.zeros(300)}.items()
        for setting, options in EXTREME.items()
    },
}


@pytest.mark.parametrize("name", SERIES)
def test_no_series_and_no_setting_is_forecast_much_worse_than_by_the_last_value(name):
    y, options, allowed = SERIES[name]
    made, low, high = small(**options).prequential(y, coverage=0.9)
    half, last = len(y) // 2, pd.Series(y).ffill().to_numpy()
    assert (np.isnan(made).all(1) == np.isnan(last)).all()  # no forecast before the first value
    assert np.isfinite(made[~np.isnan(last)]).all()
    for h, factor in allowed.items():
        naive = np.nanmean(np.abs(last[half:-h] - y[half + h :]))
        assert error(made, y, half, h) <= factor * naive + 1e-12
    inside = (low[half:-1, 0] <= y[half + 1 :]) & (y[half + 1 :] <= high[half:-1, 0])
    assert inside.mean() > 0.8


def test_a_scale_that_changes_by_a_power_of_two_changes_no_forecast():
    """The same series in other units: all numbers are those of the first, times the unit."""
    y = day_and_week(600) * np.where(np.arange(600) < 300, 1.0, 1000.0)
    one, other = small().prequential(y), small().prequential(y * 2.0**20)
    np.testing.assert_array_equal(one * 2.0**20, other)


JITTER = pd.to_timedelta(np.random.default_rng(0).uniform(-1, 1, 600), unit="s")
TIMES = {
    "months": pd.date_range("1970-01-01", periods=600, freq="MS"),
    "missing rows": pd.date_range("2024-01-01", periods=604, freq="h").delete([1, 50, 51, 300]),
    "business days": pd.bdate_range("2024-01-05", periods=600),
    "jitter": pd.date_range("2024-01-01", periods=600, freq="min") + JITTER,
}


@pytest.mark.parametrize("name", TIMES)
def test_no_row_is_lost_and_none_invented(name):
    times = TIMES[name]
    model = SepSAForecaster(3, lags=6).fit(pd.Series(day_and_week(600), times))
    assert model.rows == (604 if name == "missing rows" else 600)
    ahead, step = model.predict().index[0] - times[-1], np.median(np.diff(times))
    assert ahead > pd.Timedelta(0)
    assert abs(ahead - step) < 0.1 * step + pd.Timedelta(days=3)


def run(first, step):
    """Some seconds at the start, then 120 rows of another step, a day later."""
    return np.concatenate([np.arange(float(first)), 86400.0 + step * np.arange(120)])


WRONG = {  # times and options
    "two seconds, then days": (run(2, 86400.0), {}),
    "twenty seconds, then days": (run(20, 86400.0), {}),
    "three hundred seconds, then days": (run(300, 86400.0), {}),
    "two seconds, then ten minutes": (np.concatenate([[0.0, 1.0], 600.0 * np.arange(1, 120)]), {}),
    "two seconds, a day, then quarters of an hour": (run(2, 900.0), {}),
    "minutes, then hours": (np.concatenate([60.0 * np.arange(20), 3600.0 * np.arange(1, 120)]), {}),
    "seconds were told, ten minutes came": (600.0 * np.arange(9), {"step": "second"}),
}


def until_error(model, y, at):
    """How many rows a model learns one by one, the error that follows, and whether that changes nothing."""
    for i, (value, time) in enumerate(zip(y, at, strict=True)):
        before = model.state_dict()
        try:
            model.learn_one(value, time=float(time))
        except ValueError as error:
            return i, str(error), same(model.state_dict(), before)
    return len(y), "", True


@pytest.mark.parametrize("name", WRONG)
def test_times_that_contradict_the_first_ones_are_an_error_with_the_cure(name):
    """Row by row the model stays as it was before the row of the error."""
    at, options = WRONG[name]
    y = day_and_week(len(at))
    whole, single = small(**options), small(**options)
    with pytest.raises(ValueError, match=r"(common step|leap far).*give step="):
        whole.prequential(y, times=at)
    assert whole.rows == 0
    learned, words, unchanged = until_error(single, y, at)
    assert re.search(r"(common step|leap far).*give step=", words)
    assert unchanged
    assert 1 < learned < len(at) - 1


def test_a_step_that_does_not_fit_is_an_error_with_the_cure():
    y = day_and_week(60)
    for told, at, words in (
        ("second", np.arange(60) * HOUR, "with rows every second, the last 7 rows are each 50 or more steps .* step="),
        ("day", np.arange(60) * HOUR, "at least half a step .day.*give a shorter step"),
        (None, np.cumsum(10.0 ** (np.arange(60) % 9)), "time"),
    ):
        model = small(step=told)
        with pytest.raises(ValueError, match=words):
            model.prequential(y, times=at)
        assert same(model.state_dict(), small(step=told).state_dict())


def test_rows_without_a_common_step_are_refused_and_wide_gaps_are_not():
    model, y = small(), day_and_week(50)
    model.prequential(y, times=np.arange(50) * HOUR)
    for k in range(6):
        model.learn_one(1.0, time=(50 + 300.0 * (k + 1)) * HOUR)
    with pytest.raises(ValueError, match=r"common step: with rows every hour, the last 7 rows .* give step="):
        model.learn_one(1.0, time=(50 + 300.0 * 7) * HOUR)
    with pytest.raises(ValueError, match=r"half a step \(hour\) after that of the last row"):
        model.learn_one(1.0, time=(50 + 300.0 * 6) * HOUR + 1)
    for at in (  # a wide gap among the first rows, and sparse times, leave a model that loads
        np.concatenate([np.arange(5.0), 5004 + np.arange(50.0)]) * HOUR,
        np.concatenate([np.arange(9.0), 9 + 40.0 * np.arange(1, 60) + np.arange(59) % 7]) * HOUR,
    ):
        model = small()
        model.prequential(day_and_week(len(at)), times=at)
        assert same(pickle.loads(pickle.dumps(model)).state_dict(), model.state_dict())


@pytest.mark.parametrize(("frequency", "form"), [("MS", "%Y%m"), ("D", "%Y%m%d"), ("h", "%Y%m%d%H")])
def test_dates_written_as_numbers_are_an_error_with_the_cure(frequency, form):
    dates = pd.date_range("2025-11-01", periods=20, freq=frequency)
    at, y = np.array([int(date.strftime(form)) for date in dates]), np.arange(20.0)
    cure = rf"got {at[0]}, a date .* pandas.to_datetime\(..., format='{form}'\)"
    frame = pd.DataFrame({"unique_id": "a", "ds": at, "y": y})
    for learn in (lambda: small().fit(y, times=at), lambda: SepSAPanelForecaster(small(step="day")).fit(frame)):
        with pytest.raises(ValueError, match=cure):
            learn()
    model = small()
    model.learn_one(1.0, time=int(at[0]))
    with pytest.raises(ValueError, match=cure):
        model.learn_one(2.0, time=int(at[1]))
    assert small().fit(y, times=at - at[0]).rows >= 20  # seconds


def test_seconds_of_our_years_are_no_dates():
    for seconds in (1, 60, 3600, 86400):
        small().fit(np.arange(20.0), times=1.7e9 + seconds * np.arange(20))


def test_rows_newest_first_are_an_error_with_the_cure():
    times, y = pd.date_range("2024-01-01", periods=60, freq="D"), day_and_week(60)
    for data, more in ((pd.Series(y, times[::-1]), {}), (y, {"times": times[::-1]})):
        model = small()
        with pytest.raises(
            ValueError, match=r"later than that of the last row, 2024-02-29.*sort the table by time, old"
        ):
            model.fit(data, **more)
    model.learn_one(1.0, time=times[1])
    with pytest.raises(ValueError, match=r"later than|half a step"):
        model.learn_one(1.0, time=times[0])


def test_a_time_of_2104_is_an_error_that_changes_nothing():
    times, y = pd.date_range("2024-01-01", periods=500, freq="h").to_list(), day_and_week(500)
    times[300] = pd.Timestamp("2104-01-01")
    model = small().update(y[:200], times=times[:200])
    for learn in (lambda: model.update(y[200:], times=times[200:]), lambda: model.learn_one(1.0, time=times[300])):
        with pytest.raises(ValueError, match=r"leap far beyond .* every hour, .* got 2104-01-01 00:00:00: leave this"):
            learn()
    made = model.update(np.delete(y, 300)[200:], times=np.delete(times, 300)[200:]).predict()
    assert model.rows == 500
    assert np.isfinite(made).all()


def test_a_gap_of_thousands_of_rows_costs_a_few_hundred_rows():
    y = day_and_week(900)
    at = np.arange(900) * HOUR + np.where(np.arange(900) < 400, 0, 4_999 * HOUR)
    model = small()
    made = model.prequential(y, times=at)
    assert model.rows < 2000
    assert model.times(1) == [int(at[-1] + HOUR)]
    assert error(made, y, 700) < 1.2 * error(small().prequential(y), y, 700)


@pytest.mark.parametrize(("name", "value"), [("seasons", [90_000.0] * 8), ("lags", 2000), ("horizon", 2000)])
def test_a_small_file_builds_no_large_forecaster(name, value, monkeypatch):
    model = small(horizon=2)
    model.prequential(day_and_week(300))
    state, parameters = model.state_dict(), model.get_params()
    if name in state:
        state[name] = value
    monkeypatch.setattr(model, "get_params", lambda: parameters | {name: value})
    monkeypatch.setattr(model, "state_dict", lambda: state)
    data = sepsa.checkpoint.to_bytes(model)
    with pytest.raises(CheckpointError, match=r"too small|must be|other"):
        sepsa.checkpoint.from_bytes(data)


def test_infinite_inputs_are_refused_and_masks_respected():
    y = day_and_week(200)
    X = np.ones((200, 1))
    X[50] = np.inf
    with pytest.raises(ValueError, match="X must be numbers up to"):
        small().prequential(y, X)
    masked = np.ma.masked_array(y.copy(), np.arange(200) == 100)
    masked.data[100] = 1e9
    plain = y.copy()
    plain[100] = np.nan
    np.testing.assert_array_equal(small().prequential(masked), small().prequential(plain))


def test_a_week_is_found_in_rows_without_times_and_known_with_them():
    y = day_and_week(1600)
    model = SepSAForecaster(24, lags=24)
    made = model.prequential(y)
    assert model.seasons_ == (24.0, 168.0)
    week = np.abs(y[1200 - 168 + 24 : -168] - y[1200 + 24 :]).mean()
    assert error(made, y, 1200, 24) < week
    timed = SepSAForecaster(24, lags=24)
    for rows, seasons in ((slice(0, 40), (24.0,)), (slice(40, 600), (24.0, 168.0))):
        timed.prequential(y[rows], times=np.arange(600)[rows] * HOUR)
        assert timed.seasons_ == seasons


def test_bounds_hold_for_forecasts_and_intervals():
    y = np.maximum(0, day_and_week(500) - 12)
    made, low, high = small(bounds=(0, None)).prequential(y, coverage=0.99)
    assert made.min() >= 0
    assert low.min() >= 0
    assert high.max() > y.max()
    for wrong in ((1, 0), (0,), "ab", (np.nan, 1)):
        with pytest.raises(ValueError, match="bounds must be"):
            small(bounds=wrong)


def test_interfaces_of_frames_agree_with_rows():
    times = pd.date_range("2024-01-01", periods=400, freq="h")
    frame = pd.DataFrame({"a": day_and_week(400), "b": day_and_week(400, 1)}, times)
    model = small().fit(frame[:300]).update(frame[300:396])
    made, low, high = model.predict(4, coverage=0.8)
    assert list(made.columns) == ["a", "b"]
    assert list(made.index) == list(times[396:])
    assert (low <= high).all().all()
    column = frame.reset_index(names="when")
    assert small().fit(column[:396], times="when").forecast() == model.forecast()
    assert "396 rows, every hour" in repr(model)
    assert pickle.loads(pickle.dumps(model)).forecast() == model.forecast()


def test_dates_in_frames_are_times_or_an_error_with_the_cure():
    times = pd.date_range("2024-01-31", periods=60, freq="D")
    frame, texts = pd.DataFrame({"date": times, "v": day_and_week(60)}), times.strftime("%d/%m/%Y")
    expected = small().fit(frame, times="date").predict()
    iso = frame.assign(date=times.strftime("%Y-%m-%d"))
    arrow, dated = pa.Table.from_pandas(frame.assign(v=frame["v"].astype(str))), frame.set_index(times.date)[["v"]]
    for data, column in ((iso, "date"), (arrow, "date"), (iso.set_index("date"), None), (dated, None)):
        pd.testing.assert_frame_equal(small().fit(data, times=column).predict(), expected)
    for data, words in (
        *((each, "'date': give times='date'") for each in (frame, iso, arrow, frame.assign(date=texts))),
        (frame.assign(date="north"), "got 'north' in the column 'date': leave it out"),
        (frame[["v"]].set_index(texts), "the index of Y must .*to_datetime.*'%d/%m/%Y': give times=, or Y.reset_index"),
        (frame[["v"]].set_index([texts, times]), "the index of Y must have times"),
        (frame[["v"]].set_index(times - times[0]), "the index of Y must have times"),
        (frame["date"], "must be numbers"),
    ):
        with pytest.raises(ValueError, match=words):
            small().fit(data)
    for data, more, words in (
        (frame[["v"]], {"X": frame}, "X must be numbers, got dates in the column 'date': leave it out"),
        (frame.assign(date=texts), {"times": "date"}, r"got '31/01/2024': convert texts by .*'%d/%m/%Y'"),
        (frame["v"], {"times": 0}, "times must be one for each row, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            small().fit(data, **more)


def test_quantiles_are_the_ends_of_intervals():
    model = forecaster().fit(series(200)[:, 0])
    made, levels = model.predict(3, quantiles=[0.05, 0.5, 0.95])
    alone = model.predict(3, coverage=0.9)
    assert all((one == other).all() for one, other in zip(alone, (made, levels[0.05], levels[0.95]), strict=True))
    assert ((levels[0.05] < levels[0.5]) & (levels[0.5] < levels[0.95])).all()
    for wrong in ({"coverage": 1.0}, {"coverage": [0.5]}, {"quantiles": [0.0]}, {"coverage": 0.5, "quantiles": [0.5]}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.* must be"):
            model.predict(**wrong)


def test_one_input_is_a_vector_and_too_many_rows_ahead_are_an_error():
    y, x = series(120)[:, 0], np.random.default_rng(0).normal(size=120)
    model, other = forecaster().fit(y[:116], x[:116]), forecaster().fit(y[:116], x[:116, None])
    assert (model.predict(4, x[116:]) == other.predict(X=x[116:, None])).all()
    named = forecaster().fit(pd.Series(y[:116]), pd.Series(x[:116], name="wind"))
    assert (np.asarray(named.predict(X=pd.DataFrame({"wind": x[116:]}))) == model.predict(X=x[116:])).all()
    for wrong, words in ((x[111:], "at most the 4 rows of a forecast, got 9"), (series(2), "1 columns .* got 2")):
        with pytest.raises(ValueError, match=words):
            model.predict(2, wrong)
    with pytest.raises(ValueError, match=r"X must be rows \(120, inputs\)"):
        forecaster().fit(y, x[:100])


def test_polars_in_polars_out():
    polars = pytest.importorskip("polars")
    times = pd.date_range("2024-01-01", periods=60, freq="D")
    frame = polars.DataFrame({"date": times.to_numpy(), "v": day_and_week(60), "w": day_and_week(60, 1)})
    with pytest.raises(ValueError, match="give times='date'"):
        small().fit(frame)
    model = small().fit(frame, times="date")
    for other in (model, pickle.loads(pickle.dumps(model))):
        made, low, _ = other.predict(2, coverage=0.8)
        assert made.columns == low.columns == ["date", "v", "w"]
        assert made["date"].to_list() == [datetime(2024, 3, 1), datetime(2024, 3, 2)]
        assert made["v"].to_list() == [step["v"] for step in model.forecast(2)]
    assert small().fit(frame["v"]).predict(2).to_list() == small().fit(frame["v"].to_numpy()).predict(2).tolist()
    assert small().fit(frame.select("v", "w")).predict().columns == ["v", "w"]


def test_a_forecaster_for_each_key(tmp_path):
    alone = small(lags=4, horizon=2)
    with KeyedLearner(small(lags=4, horizon=2), tmp_path / "keys", in_memory=2) as models:
        for i in range(30):
            for key in range(4):
                models.learn_one(key, None, float(key + i % 3), time=i * HOUR)
            alone.learn_one(3.0 + i % 3, time=i * HOUR)
        models.commit()
        assert len(models) == 4
        assert models.forecast(3) == alone.forecast()


def break_state(rng, model):
    """A forecaster with one number of a state replaced by a wild one."""
    state, other = copy.deepcopy(model.state_dict()), small()
    part = state["model"][rng.choice(list(state["model"]))]
    array = part[rng.choice([name for name, array in part.items() if array.size])]
    numbers = {"b": [False, True], "i": [-(2**40), -1, 0, 1, 10**6, 2**62]}
    reals = [np.nan, np.inf, -1e300, 1e150, -1.0, 0.0, 1e-310, 1e5]
    array.flat[rng.integers(array.size)] = rng.choice(numbers.get(array.dtype.kind, reals))
    other.load_state_dict(state)
    return other


def odd_times(rng):
    at = np.arange(120) * float(rng.choice([1, 60, HOUR, 86400, 31 * 86400]))
    at = at + rng.choice([0.0, -1e9, 4e9]) + rng.normal(size=120) * rng.choice([0, 0.01, 0.2]) * (at[1] - at[0])
    for _ in range(rng.integers(3)):
        at[rng.integers(120)] *= rng.choice([-1, 0, 2, 1000])
    dated = rng.random() < 0.5
    return (at * 1e6).astype("datetime64[us]") if dated else at


def odd_settings(rng):
    return {
        "ridge": rng.choice([0.0, 1e-30, 1e-9, 30.0, 1e99, np.inf, np.nan, -1.0]),
        "forgetting": [(0.51,), (1.0,), (0.5,), (), (0.9, 1.1), (np.nan,), (0.7, 1.0)][rng.integers(7)],
        "seasons": [(), (2.5,), (7, 7), (1e9,), (np.nan,), (3.7, 50.1), "weekly"][rng.integers(7)],
        "lags": [1, 2, 8, 0, 10**9][rng.integers(5)],
        "bounds": [(None, None), (0, None), (5, 5), (None, 1e308)][rng.integers(4)],
    }


@pytest.mark.parametrize("seed", range(6))
def test_fifty_attempts_are_refused_or_end_with_sane_forecasts(seed):
    """Nothing is accepted that gives NaN, a forecast beyond ten times the data, or more than a few thousand rows."""
    rng = np.random.default_rng(seed)
    y, accepted = day_and_week(200), 0
    model = small()
    model.prequential(y[:120])
    for attempt in range(50):
        with contextlib.suppress(ValueError, TypeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = attempt % 3
            if kind == 0:
                tried = break_state(rng, model)
            elif kind == 1:
                tried = small()
                tried.prequential(y[:120], times=odd_times(rng))
            else:
                tried = small(**{k: v for k, v in odd_settings(rng).items() if rng.random() < 0.4})
                spoiled = y[:120] * rng.choice([1e-90, 1.0, 1e90])
                spoiled[rng.integers(120, size=5)] = rng.choice([np.nan, 1e99, -1e99])
                tried.prequential(spoiled / max(np.nanmedian(np.abs(spoiled)), 1e-300) * 10)
            accepted += 1
            assert tried.rows < 70_000
            made = tried.prequential(y[120:])
            assert np.isfinite(made).all()
            assert np.abs(made[60:]).max() < 200, (seed, attempt, kind)
    assert accepted >= 5
