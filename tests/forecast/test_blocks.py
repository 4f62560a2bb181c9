"""`SepSAForecaster(every=...)`: rows of blocks, what they see, bad input, clocks and states."""

from __future__ import annotations

import pickle
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from breaking.damage import same
from sepsa import SepSAForecaster, SepSARegressor
from sepsa.forecast.blocks import BlockModel, between, phase
from sepsa.forecast.clock import Clock
from sepsa.forecast.grids import Grid
from sepsa.forecast.model import Settings

HOUR = 3600.0
MONDAY = datetime(2026, 1, 5)


def hours(n, start=MONDAY, zone=None):
    """The times of n hours."""
    if zone is None:
        return [start + timedelta(hours=i) for i in range(n)]
    first = start.replace(tzinfo=ZoneInfo(zone)).astimezone(ZoneInfo("UTC"))
    return [(first + timedelta(hours=i)).astimezone(ZoneInfo(zone)) for i in range(n)]


def day_series(days, seed=0):
    """Hourly values of days that follow an input known ahead, the weekday and the day before."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(days, 24)).cumsum(1) / 3
    shape = np.sin(2 * np.pi * np.arange(24) / 24)
    y = np.zeros((days, 24))
    for t in range(days):
        y[t] = 20 + 5 * shape + 3 * (t % 7 == 6) + 0.3 * (y[t - 1] - 20 if t else 0) + 4 * x[t]
    return (y + 0.1 * rng.normal(size=y.shape)).ravel(), x.reshape(-1, 1)


def blocks(horizon=24, **options):
    return SepSAForecaster(horizon, **({"every": 24, "known_ahead": True} | options))


def test_fit_is_that_of_the_regressor_on_rows_of_blocks_and_update_its_partial_fit():
    y, X = day_series(50)
    days, inputs = y.reshape(-1, 24), X.reshape(-1, 24)
    rows = []
    for t in range(1, 50):
        lag = [days[t - k] if t >= k else np.full(24, np.nan) for k in (1, 2, 3, 7)]
        level = days[max(t - 7, 0) : t].mean()
        change = [inputs[t] - inputs[t - k] if t >= k else np.full(24, np.nan) for k in (1, 7)]
        rows.append(np.concatenate([*(one - level for one in lag), inputs[t], *change, np.arange(7) == t % 7, [level]]))
    rows = np.array(rows)
    level = rows[:, -1:]
    regressor = SepSARegressor(random_state=3).fit(rows[:39], days[1:40] - level[:39])
    model = blocks(seasons=(168,), seed=3).fit(y[:960], X[:960])
    for t in range(40, 50):
        part = slice(24 * t, 24 * t + 24)
        made = regressor.predict(rows[t - 1 : t])[0] + level[t - 1]
        np.testing.assert_allclose(model.predict(24, X[part]), made, rtol=1e-12)
        regressor.partial_fit(rows[t - 1 : t], days[t : t + 1] - level[t - 1 : t])
        model.update(y[part], X[part])


def test_forecasts_are_those_of_before_however_rows_are_divided_and_nothing_leaks():
    """Values after the origin of a block change no forecast of it, and calls may cut the rows anywhere."""
    y, X = day_series(20)
    whole = blocks(seasons=(168,)).prequential(y, X)
    changed = y.copy()
    changed[24 * 15 :] += 100.0
    other = blocks(seasons=(168,)).prequential(changed, X)
    np.testing.assert_array_equal(whole[: 24 * 15], other[: 24 * 15])
    model = blocks(seasons=(168,))
    for i in range(24 * 15):
        model.learn_one(y[i], {0: X[i, 0]})
    ahead = [{0: x} for x in X[24 * 15 : 24 * 16, 0]]
    assert model.forecast(xs=ahead) == whole[24 * 15 - 1].tolist()
    for i in range(24 * 15, 24 * 15 + 5):
        model.learn_one(y[i], {0: X[i, 0]})
    np.testing.assert_array_equal(model.forecast(xs=ahead[5:]), whole[24 * 15 - 1, 5:])
    np.testing.assert_array_equal(whole[24 * 15 + 4, :19], whole[24 * 15 - 1, 5:])
    assert np.isnan(whole[24 * 15 + 4, 19:]).all()
    assert np.isnan(whole[-1]).all()  # the inputs of the next day are not among the rows


def test_before_three_blocks_and_after_empty_ones_forecasts_follow_the_last_value_however_rows_are_divided():
    y, _ = day_series(9)
    Y = np.column_stack([y, y + 5])
    Y[:30, 1] = Y[24 * 3 : 24 * 7 + 6, 1] = np.nan  # a series that begins late, and is away for four days
    times, options = hours(len(y)), {"known_ahead": False, "seasons": ()}
    whole = blocks(**options).prequential(Y, times=times)
    model, parts = blocks(**options), []
    for start, stop in ((0, 7), (7, 24), (24, 31), (31, 24 * 4), (24 * 4, 24 * 7 + 3), (24 * 7 + 3, len(y))):
        parts.append(model.prequential(Y[start:stop], times=times[start:stop]))
        made = model.predict()
        np.testing.assert_array_equal(made, whole[stop - 1, : len(made)])
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_the_clock_begins_blocks_at_midnight_or_where_start_says():
    y, X = day_series(8)
    at_noon = hours(len(y), MONDAY + timedelta(hours=9))
    model = blocks().update(y[: 24 * 5], X[: 24 * 5], times=at_noon[: 24 * 5])
    assert len(model.times()) == 15  # 9 of 24 hours have come
    assert model.times()[-1].hour == 23
    assert [time.hour for time in blocks(start=9).update(y[:48], X[:48], times=at_noon[:48]).times()][::23] == [9, 8]
    short = SepSAForecaster(6, every=24).update(y[:48], times=at_noon[:48])
    assert short.times() == []
    for ask in (short.forecast, short.predict, lambda: short.forecast(3)):
        with pytest.raises(ValueError, match="the 6 rows that are forecast every 24 rows have come"):
            ask()


def test_rows_that_end_inside_a_block_are_forecast_to_its_end_and_an_error_names_the_start_of_a_whole_one():
    days, y = pd.date_range("2026-01-07", periods=100), np.arange(100) % 7.0  # from a Wednesday on, to a Thursday
    model = SepSAForecaster(7, every=7).fit(y, times=days)
    assert [str(at)[:10] for at in model.times()] == ["2026-04-17", "2026-04-18", "2026-04-19"]
    np.testing.assert_allclose(model.predict(), np.arange(100, 103) % 7, atol=0.1)
    with pytest.raises(ValueError, match=r"at most 3, .* got 7: None forecasts these; with start=4 a block begins at"):
        model.predict(7)
    whole = SepSAForecaster(7, every=7, start=4).fit(y, times=days)
    np.testing.assert_allclose(whole.predict(7), np.arange(100, 107) % 7, atol=0.1)


@pytest.mark.parametrize(("day", "count"), [(datetime(2026, 3, 29), 23), (datetime(2026, 10, 25), 25)])
def test_days_of_daylight_saving_have_23_and_25_hours_and_the_days_after_begin_at_midnight(day, count):
    zone, start = "Europe/Berlin", day - timedelta(days=4)
    times = hours(24 * 4 + count + 24, start, zone)
    y = np.array([time.hour for time in times], float)
    model = blocks(known_ahead=False)
    model.update(y[: 24 * 4], times=times[: 24 * 4])
    assert len(model.times()) == min(count, 24)
    assert [time.hour for time in model.times()] == y[24 * 4 :][: min(count, 24)].tolist()
    model.update(y[24 * 4 : 24 * 4 + count], times=times[24 * 4 : 24 * 4 + count])
    assert model.times()[0].hour == 0
    values = model._window.model.Y[-1, :, 0]
    np.testing.assert_array_equal(
        values, np.where(np.arange(24) == 2, np.nan, np.arange(24)) if count == 23 else np.arange(24)
    )


def test_rows_are_numbered_from_midnight_of_a_monday_or_from_january():
    monday = (MONDAY - datetime(1970, 1, 1)).total_seconds()
    first = int((monday - 4 * 86400) / HOUR)
    assert first % 168 == 0

    def numbers(points, grid, dated=True):
        clock = Clock(None)
        clock.dated, clock.grid = dated, grid
        return clock.numbers(np.array(points))

    assert numbers([0, 25], Grid("seconds", HOUR, monday)).tolist() == [first, first + 25]
    assert numbers([0, 1], Grid("seconds", HOUR, 5 * HOUR + 3), dated=False).tolist() == [5, 6]
    assert numbers([0], Grid("months", 1.0, monday))[0] % 12 == 0
    assert numbers([0, 1], Grid("months", 3.0, monday)).tolist() == [224, 225]
    assert numbers([0], Grid("business days", 1.0, monday))[0] % 5 == 0
    assert numbers([3, 4], None).tolist() == [3, 4]


def test_a_plan_has_the_last_three_blocks_and_whole_seasons():
    def made(every, horizon, lags, seasons, ahead=False):
        settings = Settings(1, 0, horizon, lags, seasons, (1.0,), 30.0, ahead, every=every)
        return BlockModel(settings, Clock(None), False)

    assert made(24, 24, "auto", (24.0, 168.0)).lags == [1, 2, 3, 7]
    assert made(24, 24, 100, ()).lags == [1, 2, 3, 4, 5]
    assert made(10, 24, "auto", (24.0, 168.0)).lags == [1, 2, 3]
    model = made(7, 14, "auto", (7.0, 365.25), True)
    assert (model.lags, model.periods, model.touched, model.input_lags) == ([1, 2, 3, 52], [365.25 / 7], 2, [1, 52])
    np.testing.assert_array_equal(phase(9, 7.0), np.arange(7) == 2)
    np.testing.assert_allclose(phase(53, 52.5) @ phase(53, 52.5), 1.0)
    targets = np.array([[1.0, np.nan], [np.nan, np.nan], [3.0, np.nan]])
    np.testing.assert_array_equal(between(targets), [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])


def test_missing_hours_and_inputs_are_missing_to_the_learner_and_nothing_is_lost():
    y, X = day_series(14)
    gaps, unknown = y.copy(), X.copy()
    gaps[24 * 5 + 3 : 24 * 5 + 9] = np.nan  # a quarter of a day
    gaps[24 * 7 : 24 * 8 - 2] = np.nan  # all but two hours: not learned
    unknown[24 * 9 + 5] = np.nan
    model = blocks(seasons=(168,)).update(gaps, unknown)
    assert model._window.model.blocks == 12
    assert np.isfinite(model.predict(X=np.where(np.arange(24) == 3, np.nan, X[:24, 0])[:, None])).all()
    assert np.isfinite(blocks(seasons=(168,)).fit(gaps, unknown).predict(X=X[:24])).all()
    np.testing.assert_array_equal(model._window.model.Y[-7, :22, 0], np.full(22, np.nan))


def test_a_gap_of_days_moves_the_blocks_on_and_forecasts_keep_their_level():
    y, X = day_series(14)
    times = hours(24 * 40)
    model = blocks().update(y[: 24 * 10], X[: 24 * 10], times=times[: 24 * 10])
    for days in (1, 3, 12, 200):
        other = pickle.loads(pickle.dumps(model))
        start = MONDAY + timedelta(days=10 + days, hours=7)
        other.learn_one(20.0, {0: 0.0}, time=start)
        other.learn_one(21.0, {0: 0.0}, time=start + timedelta(hours=1))
        assert other.times()[-1] == (start + timedelta(days=1)).replace(hour=23) - timedelta(days=1)
        made = other.predict(X=X[: len(other.times())])
        assert np.isfinite(made).all()
        assert (np.abs(made - 20) < 40).all()


def test_before_three_blocks_the_forecast_is_the_last_value_of_the_hour():
    y, _ = day_series(3)
    model = blocks(known_ahead=False, bounds=(0, 22))
    with pytest.raises(ValueError, match="no row"):
        model.forecast()
    model.learn_one(np.nan)
    assert np.isnan(model.forecast()).all()
    model.update(y[1:5])
    assert model.forecast() == np.clip([y[4]] * 19, 0, 22).tolist()
    model.update(y[5:30])
    np.testing.assert_array_equal(model.forecast(), np.clip(y[6:24], 0, 22))
    assert model.intervals(3, coverage=0.9) == [(0, 22)] * 3


def test_inputs_ahead_are_told_and_counted():
    y, X = day_series(6)
    model = blocks(seasons=()).update(y, X)
    for wrong in (X[:23], X[:25]):
        with pytest.raises(ValueError, match=f"the 24 rows .* got {len(wrong)}"):
            model.predict(X=wrong)
    assert len(model.predict(5, X[:24])) == 5
    assert "every=24" in repr(model)
    other = blocks(known_ahead=False).update(y, X)
    with pytest.raises(ValueError, match="give known_ahead=True to SepSAForecaster"):
        other.predict(X=X[:24])
    for name, value in (("forgetting", (1.0,)), ("ridge", 3.0)):
        with pytest.raises(ValueError, match=f"{name} must be left out for every=24"):
            blocks(**{name: value})
    for name in ("every", "start", "seed"):
        with pytest.raises(ValueError, match=name):
            blocks(**{name: -1})
    with pytest.raises(ValueError, match="makes 2161: give fewer lags"):
        blocks(every=720, known_ahead=False).update(np.arange(1500.0))


def test_inputs_of_a_day_of_25_hours_are_used_at_its_midnight():
    times = hours(24 * 14, datetime(2026, 10, 11), "Europe/Berlin")  # 2026-10-25 has an hour twice
    hour = np.array([[float(time.hour)] for time in times])
    model = blocks().update(np.sin(hour[:, 0]), hour, times=times)
    ahead = model.times()
    made = model.predict(X=[[float(time.hour)] for time in ahead])
    assert [time.hour for time in ahead[:5]] == [0, 1, 2, 2, 3]
    assert np.abs(made - np.sin([time.hour for time in ahead])).max() < 0.2


@pytest.mark.parametrize("way", ["fit", "update"])
def test_a_value_far_outside_all_before_is_missing_and_several_again_are_a_new_level(way):
    y, X = day_series(10)
    wild, none = y.copy(), y.copy()
    wild[-30], none[-30] = 1e6, np.nan
    model, missing = (getattr(blocks(seasons=(24, 168)), way)(each, X) for each in (wild, none))
    assert model.predict(X=X[:24]).tolist() == missing.predict(X=X[:24]).tolist()
    assert model.outliers_ == missing.outliers_ + 1
    assert pickle.loads(pickle.dumps(model)).outliers_ == model.outliers_
    for hours_of in (slice(-30, -25), slice(-5, None)):  # several of a block, once
        wild, none = y.copy(), y.copy()
        wild[hours_of], none[hours_of] = 9999.0, np.nan
        model, missing = (getattr(blocks(seasons=(24, 168)), way)(each, X) for each in (wild, none))
        assert model.predict(X=X[:24]).tolist() == missing.predict(X=X[:24]).tolist()
    again, new = y.copy(), y.copy()
    again[-30:-25] = again[-6:-1] = 9999.0
    new[-48:] += 1e6
    for values, dropped in ((again, 5), (new, 24)):
        model = blocks(seasons=(24, 168))
        getattr(model, way)(values, X, times=hours(len(y)))
        assert model._window.model.dropped == dropped
        assert np.nanmax(model._window.model.Y[-1]) > 9e3


@pytest.mark.parametrize("way", ["fit", "update"])
@pytest.mark.parametrize("hour", [0, 5, 40, 71])
def test_a_wild_value_of_the_first_three_blocks_is_missing(way, hour):
    y, X = day_series(10)
    wild, none = y.copy(), y.copy()
    wild[hour], none[hour] = -9999.0, np.nan
    model, missing = (getattr(blocks(seasons=(24, 168)), way)(each, X) for each in (wild, none))
    assert model.predict(X=X[:24]).tolist() == missing.predict(X=X[:24]).tolist()
    np.testing.assert_array_equal(model.errors_["forecast"], missing.errors_["forecast"])


def test_a_constant_is_as_far_out_as_its_size_and_zeros_say_nothing_of_it():
    y = np.full(24 * 8, 5.0)
    y[-3], rare = 9999.0, np.zeros(24 * 8)
    rare[-3] = 2.0
    model, other = (blocks(known_ahead=False).update(each) for each in (y, rare))
    assert (model.outliers_, model.predict().tolist()) == (1, [5.0] * 24)
    assert other._window.model.Y[-1, -3, 0] == 2.0


def test_a_new_level_of_blocks_of_two_rows_is_learned():
    level = np.where(np.arange(60) < 40, 0.0, 1000.0) + np.arange(60) % 2
    model = SepSAForecaster(2, every=2).update(level)
    assert model.outliers_ >= 2
    np.testing.assert_allclose(model.predict(), [1000, 1001], atol=100)


def test_frames_of_inputs_have_the_times_of_the_values_and_of_the_rows_ahead():
    y, X = day_series(8)
    index = pd.date_range(MONDAY, periods=len(y), freq="h")
    y, X = pd.Series(y, index), pd.DataFrame(X, index)
    for every in (1, 24):
        model = SepSAForecaster(24, every=every, known_ahead=True)
        for wrong in (X[24:-24], X[23::-1]):
            with pytest.raises(ValueError, match=r"X must have the times of Y, got others in .* rows, first in row 0"):
                model.update(y[: len(wrong)], wrong)
        model.update(y[:-24], X[:-24])
        made = model.predict(X=X[-24:])
        assert made.index.equals(index[-24:])
        assert made.tolist() == model.predict(X=X[-24:].to_numpy()).tolist()
        for wrong in (X[-48:-24], X[:-25:-1]):
            with pytest.raises(ValueError, match="X must have the times of the rows ahead, 2026-01-12 00:00:00 in"):
                model.predict(X=wrong)


def test_several_series_with_a_horizon_of_two_blocks_are_learned_together():
    y, _ = day_series(30)
    Y = np.column_stack([y, 2 * y + 5])
    model = SepSAForecaster(12, every=8, seasons=(24,), lags=16).update(Y)
    made = model.predict()
    assert made.shape == (12, 2)
    np.testing.assert_allclose(made[:, 1], 2 * made[:, 0] + 5, atol=5)
    errors = model.errors_
    assert list(errors) == ["forecast", "1 block of 8 rows ago", "3 blocks of 8 rows ago"]
    assert errors["forecast"].shape == (2, 12)


def test_a_clone_has_the_options_and_no_rows():
    model = blocks(bounds=(0, None), seed=4)
    copy = clone(model.update(np.arange(30.0)))
    assert (copy.get_params(), copy.rows) == (model.get_params(), 0)


@pytest.mark.parametrize("missing", [0, 150])
def test_an_error_inside_a_call_leaves_the_forecaster_as_it_was(missing, monkeypatch):
    """Also where no block has been learned before."""
    y, X = day_series(9)
    y[:missing] = np.nan
    model = blocks(seasons=(168,)).update(y[:150], X[:150])
    before, learn, calls = model.state_dict(), SepSARegressor.prequential, []

    def fail(self, *rows):
        calls.append(rows)
        if len(calls) == 2:
            raise MemoryError("no more")
        return learn(self, *rows)

    monkeypatch.setattr(SepSARegressor, "prequential", fail)
    with pytest.raises(MemoryError):
        model.update(y[150:], X[150:])
    assert same(model.state_dict(), before)
    monkeypatch.undo()
    whole = blocks(seasons=(168,)).update(y, X)
    assert same(model.update(y[150:], X[150:]).state_dict(), whole.state_dict())


def test_a_copy_of_a_model_has_a_lock_of_its_own():
    model = blocks(known_ahead=False).update(day_series(9)[0])._window.model
    assert model.learner._lock is not model.copy().learner._lock


def test_a_damaged_state_is_refused_by_its_name_and_changes_nothing():
    y, X = day_series(4)
    model = SepSAForecaster(4, every=4, seasons=(12,)).update(y[:50])
    good = model.state_dict()
    blocks_of, X = good["model"], X[:5]
    wrong = {
        "counts": [blocks_of["counts"][:4], [0] * 8],
        "kept": [blocks_of["kept"][:, :3], None],
        "seen": [np.zeros(2), np.full((2, 1), 0.5)],
        "missed": [np.full_like(blocks_of["missed"], np.nan)],
        "learner": [None, {}, SepSARegressor(random_state=0).partial_fit(X, y[:5]).state_dict()],
    }
    damaged = [{"model": blocks_of | {name: value}} for name, values in wrong.items() for value in values]
    for other in (
        *damaged,
        {"seasons": [1.0]},
        {"first": blocks_of["kept"][0]},
        {"checksum": None},
        {"clock": object()},
    ):
        with pytest.raises(ValueError, match=r"state_dict.*(checksum|must be made of)"):
            model.load_state_dict(good | other)
    for options, words in (
        ({}, "state_dict"),
        ({"every": 4, "start": 1}, r"\['start'\] must be 1, .* got 0"),
        ({"every": 4, "lags": 20}, r"\['width'\] must be \d+"),
    ):
        with pytest.raises(ValueError, match=words):
            SepSAForecaster(4, seasons=(12,), **options).load_state_dict(good)
    assert same(model.state_dict(), good)
