"""The clock of the forecaster: steps of every unit from the first times, jitter, gaps, leaps, zones, saved clocks."""

from __future__ import annotations

import warnings
from datetime import UTC, date, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from sepsa import SepSAForecaster
from sepsa.forecast.clock import Clock
from sepsa.forecast.grids import BUSINESS, MONTHS, SECONDS, Grid, find_grid
from sepsa.forecast.times import read_times

pd = pytest.importorskip("pandas")
HOUR, DAY = 3600.0, 86400.0


def seconds(times):
    return read_times(times).seconds


def placed(times, step=None):
    """A clock that has seen these times, and the number of rows of its grid."""
    moments, clock, rows = read_times(times), Clock(step), 0
    clock.begin(moments)
    clock.find(moments.seconds)
    for at in moments.seconds.tolist():
        rows += 1 + clock.place(at, rows)
    return clock, rows


@pytest.mark.parametrize("zone", ["America/New_York", "Europe/Berlin", "Asia/Kolkata"])
@pytest.mark.parametrize(("frequency", "step"), [("15min", 900), ("h", "hour"), ("D", "day"), ("B", "business day")])
def test_a_step_that_is_given_has_its_rows_in_every_zone(zone, frequency, step):
    times = pd.date_range("2026-03-20 10:30", periods=200, freq=frequency, tz=zone)
    clock, rows = placed(times[:-1], step)
    assert rows == len(times) - 1
    assert clock.ahead(1) == times[-1]


@pytest.mark.parametrize("first", ["2026-02-28", "2026-04-30", "2026-01-31", "2026-09-30"])
@pytest.mark.parametrize(("frequency", "step"), [("ME", "month"), ("QE", "quarter")])
def test_a_step_of_months_that_is_given_is_counted_from_their_ends(first, frequency, step):
    times = pd.date_range(first, periods=30, freq=frequency)
    for count in (4, 29):
        clock, rows = placed(times[:count], step)
        assert (rows, clock.ahead(1)) == (count, times[count])


@pytest.mark.parametrize(
    ("frequency", "unit", "step"),
    [
        ("s", SECONDS, 1), ("5min", SECONDS, 300), ("30min", SECONDS, 1800), ("h", SECONDS, HOUR), ("D", SECONDS, DAY),
        ("W", SECONDS, 7 * DAY), ("B", BUSINESS, 1), ("MS", MONTHS, 1), ("ME", MONTHS, 1), ("QS", MONTHS, 3),
        ("QE", MONTHS, 3), ("YS", MONTHS, 12), ("BME", MONTHS, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", ["2020-01-01", "2021-02-28 00:00", "2019-05-31"])
def test_the_step_and_its_unit_are_found(frequency, unit, step, start):
    times = pd.date_range(start, periods=60, freq=frequency)
    grid = find_grid(seconds(times), True)
    assert (grid.unit, grid.step) == (unit, step)
    assert np.diff([grid.nearest(at) for at in seconds(times)]).tolist() == [1] * 59
    clock, rows = placed(times)
    assert rows == 60
    tolerance = 3 * DAY if frequency == "BME" else 0.0  # the last business day is up to three days before the last day
    following = pd.date_range(times[-1], periods=4, freq=frequency)[1:]
    for h, expected in enumerate(following, 1):
        assert abs((clock.ahead(h) - expected.to_pydatetime()).total_seconds()) <= tolerance


def test_holidays_are_gaps_of_business_days_and_a_weekend_is_an_error():
    days = pd.bdate_range("2024-01-01", periods=300).delete([90, 91, 200])
    clock, rows = placed(days)
    assert (clock.grid.unit, rows) == (BUSINESS, 300)
    with pytest.raises(ValueError, match=r'must be a business day.*give step="day"'):
        clock.place(seconds([pd.Timestamp("2025-02-22")])[0], rows)


@pytest.mark.parametrize(
    ("frequency", "first", "warned"), [("B", "2026-01-05", 1), ("B", "2026-01-08", 1), ("D", "2026-01-05", 0)]
)
@pytest.mark.parametrize("step", [None, "day"])
def test_days_without_the_first_weekend_are_named_once_row_by_row(frequency, first, warned, step):
    model = SepSAForecaster(2, lags=3, step=step)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i, day in enumerate(pd.date_range(first, periods=30, freq=frequency)):
            model.learn_one(float(i), time=day)
    assert ['step="business day"' in str(one.message) for one in told] == [True] * (warned * (step is None))


@pytest.mark.parametrize(("rows", "most"), [(300, 5000), (4000, 8000)])
def test_a_leap_beyond_twice_the_rows_is_an_error(rows, most):
    clock, _ = placed(np.arange(rows) * HOUR)
    with pytest.raises(ValueError, match=rf"{most + 1} rows after .* call fit with the rows after the gap"):
        clock.place((rows + most) * HOUR, rows)
    assert clock.place((rows + most - 1) * HOUR, rows) == most - 1


@pytest.mark.parametrize("first", [1, 2, 30])
def test_the_step_is_found_once_in_the_call_that_brings_the_second_time(first):
    """Milliseconds of jitter in two dates make no step of 3600.02 seconds."""
    times = pd.date_range("2026-01-01", periods=60, freq="h") + pd.to_timedelta(np.arange(60) ** 2 % 37, unit="ms")
    model = SepSAForecaster(2, lags=3)
    for part in np.split(np.arange(60), [first]):
        model.update(part * 1.0, times=times[part])
    assert (model.step_, model.rows, model.seasons_) == ("hour", 60, (24.0,))


def learn(model, times):
    """Learn rows of these times one by one."""
    for i, at in enumerate(times):
        model.learn_one(float(i), time=at)
    return model


def test_a_time_that_contradicts_the_step_of_the_first_two_is_an_error_and_a_table_shows_the_step():
    hours, late = pd.date_range("2026-01-01", periods=13, freq="h").delete(1), np.append(0.0, np.arange(1, 12) - 0.13)
    whole = SepSAForecaster(2).fit(np.arange(12.0), times=hours)
    assert (whole.rows, whole.step_) == (13, "hour")
    for times, learned, words in (
        (hours, 2, "every 7200 seconds, this row is 0.5 of a step .* give step="),
        (late, 4, "every 0.87 seconds, this row is 0.45 of a step .* give step="),
    ):
        model = SepSAForecaster(2)
        with pytest.raises(ValueError, match=words):
            learn(model, times)
        assert model.rows == learned
    assert learn(SepSAForecaster(2, step=1.0), late).rows == 12


def test_a_time_after_rows_without_one_is_an_error():
    for step in (None, "hour"):
        model = SepSAForecaster(2, step=step)
        model.learn_one(1.0, time=0)
        model.learn_one(2.0)
        if step is None:
            with pytest.raises(ValueError, match="from the first row on or never, got 7200 after 2"):
                model.learn_one(3.0, time=2 * HOUR)
        else:
            model.learn_one(3.0, time=2 * HOUR)
            assert model.times(1) == [3 * HOUR]


def test_daylight_saving_neither_adds_nor_loses_a_row():
    zone = "Europe/Berlin"
    for first, periods in (("2024-03-30", 72), ("2024-10-26", 50)):
        assert placed(pd.date_range(first, periods=periods, freq="h", tz=zone))[1] == periods
    days = pd.date_range("2024-03-20", periods=30, freq="D", tz=zone)
    clock, rows = placed(days)
    assert rows == 30
    assert clock.ahead(1) == datetime(2024, 4, 19, tzinfo=ZoneInfo(zone))


def test_times_are_taken_from_what_people_have():
    index = pd.date_range("2024-01-01 12:00", periods=5, freq="h")
    expected = np.arange(5) * HOUR + datetime(2024, 1, 1, 12, tzinfo=UTC).timestamp()
    zone, dates = index.tz_localize("UTC"), [time.to_pydatetime() for time in index]
    arrays = index.to_numpy(), index.to_numpy().astype("datetime64[m]")
    for times in (index, index.to_series(), zone, zone.to_series(), index.to_period("h"), list(index), dates, *arrays):
        assert read_times(times).seconds.tolist() == expected.tolist()
        assert read_times(times).dated
    numbers = read_times(np.arange(3))
    assert numbers == (pytest.approx([0, 1, 2]), False, None)
    assert read_times([date(1970, 1, 2)]) == ([DAY], True, None)
    assert read_times([datetime(1930, 1, 1)]).seconds < 0
    far = np.datetime64(10**6, "Y")  # whose microseconds overflow
    assert read_times([far]).seconds == read_times(np.array([far])).seconds == far.astype("datetime64[s]").astype(int)
    for wrong in (
        "noon",
        "1.5",
        float("nan"),
        float("inf"),
        True,
        b"1",
        np.timedelta64(5, "s"),
        pd.NaT,
        np.datetime64("NaT", "s"),
        1e300,
        None,
    ):
        with pytest.raises(ValueError, match="time must be"):
            read_times([wrong])
    with pytest.raises(ValueError, match="all dates or all numbers"):
        read_times([1.0, datetime(2020, 1, 1)])


def test_seasons_come_from_the_clock():
    steps = {1: (), 900: (96, 672), 1800: (48, 336), HOUR: (24, 168), DAY: (7, 365.25), 7 * DAY: (365.25 / 7,)}
    for unit, seasons in ((SECONDS, steps), (BUSINESS, {1: (5,)}), (MONTHS, {1: (12,), 3: (4,), 12: ()})):
        for step, expected in seasons.items():
            assert Grid(unit, float(step), 0.0).seasons() == pytest.approx(expected)


@pytest.mark.parametrize("zone", [None, "Europe/Berlin", timezone(timedelta(hours=5))])
def test_a_saved_clock_goes_on(zone):
    days = pd.date_range("2024-01-01", periods=40, freq="D", tz=zone)
    clock, _ = placed(days)
    other = Clock(None)
    other.load_state_dict(clock.state_dict())
    assert other.ahead(3) == clock.ahead(3)
    assert other.state_dict() == clock.state_dict()


@pytest.mark.parametrize("step", ["fortnight", 0.0, -5, True, float("nan")])
def test_a_wrong_step_is_named(step):
    with pytest.raises(ValueError, match="step must be seconds"):
        Clock(step)
