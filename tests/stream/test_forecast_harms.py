"""What happened to forecasters in the field, silently, and 300 random attempts of that kind."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings

import numpy as np
import pytest

import sepsa
from sepsa import SepSAForecaster
from sepsa.checkpoint import CheckpointError
from sepsa.stream.keyed import KeyedLearner

pd = pytest.importorskip("pandas")
HOUR = 3600.0


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
    assert np.isfinite(made).all()
    half, last = len(y) // 2, pd.Series(y).ffill().to_numpy()
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


@pytest.mark.parametrize(
    "times",
    [
        pd.date_range("1970-01-01", periods=600, freq="MS"),
        pd.date_range("2024-01-01", periods=604, freq="h").delete([1, 50, 51, 300]),
        pd.bdate_range("2024-01-05", periods=600),
        pd.date_range("2024-01-01", periods=600, freq="min")
        + pd.to_timedelta(np.random.default_rng(0).uniform(-1, 1, 600), unit="s"),
    ],
    ids=["months", "missing rows", "business days", "jitter"],
)
def test_no_row_is_lost_and_none_invented(times):
    y = pd.Series(day_and_week(600), times)
    model = SepSAForecaster(3, lags=6).fit(y)
    assert model.rows == (604 if times[1] - times[0] == pd.Timedelta(hours=2) else 600)  # missing rows are gaps
    ahead, step = model.predict().index[0] - times[-1], np.median(np.diff(times))
    assert ahead > pd.Timedelta(0)
    assert abs(ahead - step) < 0.1 * step + pd.Timedelta(days=3)


def test_one_time_of_2104_waits_and_is_left_out():
    times = pd.date_range("2024-01-01", periods=500, freq="h").to_list()
    times[300] = pd.Timestamp("2104-01-01")
    model = small()
    with pytest.warns(UserWarning, match="time far ahead"):
        made = model.prequential(day_and_week(500), times=times)
    assert model.rows == 500
    assert model.refused_ == 1
    assert np.isnan(made[300]).all()
    assert np.isfinite(np.delete(made, 300, 0)).all()


def test_a_real_gap_of_years_costs_a_few_hundred_rows():
    y = day_and_week(900)
    at = np.arange(900) * HOUR + np.where(np.arange(900) < 400, 0, 70_000 * 24 * HOUR)
    model = small()
    made = model.prequential(y, times=at)
    assert model.rows < 2000
    assert model.times(1) == [int(at[-1] + HOUR)]
    assert error(made, y, 700) < 1.2 * error(small().prequential(y), y, 700)


def test_rows_at_one_time_are_an_error_or_the_aggregate_that_was_chosen():
    y, at = day_and_week(300), np.arange(300) * HOUR
    twice, doubled = np.insert(y, 200, 7.0), np.insert(at, 200, at[199] + 60)
    with pytest.raises(ValueError, match='aggregate such rows by same_time="mean"'):
        small().prequential(twice, times=doubled)
    last, mean = small(same_time="last"), small(same_time="mean")
    for model in (last, mean):
        model.prequential(twice, times=doubled)
        assert model.rows == 300
    np.testing.assert_allclose(mean._history.Y[199], (y[199] + 7.0) / 2)


@pytest.mark.parametrize("value", [1e6, 1e50, -1e90])
def test_a_revised_outlier_is_bounded(value):
    y = day_and_week(700)
    model, clean = small(), small()
    model.prequential(y[:400])
    clean.prequential(y[:400])
    model.revise(value, rows_ago=1)
    assert error(model.prequential(y[400:]), y[400:], 100) < 1.5 * error(clean.prequential(y[400:]), y[400:], 100)


@pytest.mark.parametrize(("name", "value"), [("seasons", [90_000.0] * 8), ("lags", 2000), ("horizon", 2000)])
def test_a_small_file_builds_no_large_forecaster(name, value, monkeypatch):
    model = small(horizon=2)
    model.prequential(day_and_week(300))
    state, parameters = model.state_dict(), model._get_params()
    if name in state:
        state[name] = value
    monkeypatch.setattr(model, "_get_params", lambda: parameters | {name: value})
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
    assert model.score(frame[396:]) == pytest.approx(np.abs(made - frame[396:]).to_numpy().mean())
    column = frame.reset_index(names="when")
    assert small().fit(column[:396], times="when").forecast() == model.forecast()
    assert "396 rows, every hour" in repr(model)
    plotting = pytest.importorskip("matplotlib")
    plotting.use("Agg")
    assert len(model.plot("b").lines) == 2
    assert pickle.loads(pickle.dumps(model)).forecast() == model.forecast()


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
            kind = attempt % 4
            if kind in (0, 3):
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
    assert accepted >= 10
