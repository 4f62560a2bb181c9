"""`OnlineIntervals`: they cover their share for any model, learn what of its errors can be predicted, and are saved."""

import numpy as np
import pytest

import sepsa
from sepsa import OnlineIntervals, SepSAForecaster


def walked(intervals, y, forecast):
    """The ends before each value, which is then learned."""
    ends = []
    for value, made in zip(y, forecast, strict=True):
        ends.append(intervals.interval(made))
        intervals.update(value, made)
    return np.array(ends)


def made_series(rows=1500, seed=0):
    """Values with drifting noise, and the forecasts of a model that is biased and late."""
    rng = np.random.default_rng(seed)
    size = np.exp(np.sin(np.arange(rows) / 200))
    y = np.cumsum(0.3 * rng.normal(size=rows)) + size * rng.standard_t(4, size=rows)
    return y, np.concatenate([[0.0] * 3, y[:-3]]) + 2.0


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_the_share_of_values_inside_is_the_coverage(coverage):
    y, forecast = made_series()
    low, high = walked(OnlineIntervals(coverage), y, forecast)[300:].T
    inside = (low <= y[300:]) & (y[300:] <= high)
    assert inside.mean() == pytest.approx(coverage, abs=0.015)


def test_errors_that_can_be_predicted_make_narrow_intervals():
    """Errors of an alternating sign and a bias: quantiles of the plain errors would span 4."""
    rng = np.random.default_rng(0)
    y = 5 + 2 * (-1.0) ** np.arange(600) + 0.1 * rng.normal(size=600)
    low, high = walked(OnlineIntervals(0.9), y, np.zeros(600))[300:].T
    assert (high - low).mean() < 0.8
    assert low.min() > 2  # the forecast, 0, is outside


def test_one_call_equals_many_and_arrays_get_the_same_interval():
    y, forecast = made_series(200)
    one, many = OnlineIntervals(0.8, ahead=4), OnlineIntervals(0.8, ahead=4)
    ends = walked(one, y, forecast)
    many.update(y, forecast)
    assert many.interval(1.5) == one.interval(1.5)
    low, high = one.interval([1.5, 2.5])
    assert (low[0], high[0]) == one.interval(1.5)
    assert low[1] - low[0] == pytest.approx(1.0)
    few = np.isinf(ends).all(1)  # the first error of a forecast 4 rows ahead is known after 5 rows
    assert few[:8].all()
    assert not few[9:].any()


def test_a_missing_value_is_a_row_without_an_error():
    intervals = OnlineIntervals()
    y, forecast = made_series(60)
    intervals.update(y, forecast)
    before = intervals.interval(0.0)
    intervals.update(None, 3.0)
    assert intervals.rows == 61
    assert np.isfinite(intervals.interval(0.0)).all()
    assert np.isfinite(before).all()


@pytest.mark.parametrize(
    ("y", "forecast", "words"),
    [
        (1.0, np.nan, "forecast must be finite"),
        ([1.0, 2.0], 1.0, "two arrays of one length"),
        ([[1.0]], [[1.0]], "two arrays of one length"),
        ([], [], "two arrays of one length"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(y, forecast, words):
    intervals = OnlineIntervals()
    with pytest.raises(ValueError, match=words):
        intervals.update(y, forecast)
    assert intervals.rows == 0
    assert intervals.interval(1.0) == (-np.inf, np.inf)


@pytest.mark.parametrize("options", [{"coverage": 1.0}, {"coverage": "0.9"}, {"ahead": 0}, {"ahead": 5000}])
def test_wrong_options_are_named(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        OnlineIntervals(**options)


def test_saved_intervals_continue_with_the_same_bits(tmp_path):
    y, forecast = made_series(120)
    intervals = OnlineIntervals(0.8, ahead=2)
    intervals.update(y[:100], forecast[:100])
    sepsa.save(intervals, tmp_path / "intervals.sepsa")
    again = sepsa.load(tmp_path / "intervals.sepsa")
    assert repr(again) == "OnlineIntervals(coverage=0.8, ahead=2)  # 100 rows"
    assert (walked(again, y[100:], forecast[100:]) == walked(intervals, y[100:], forecast[100:])).all()
    with pytest.raises(ValueError, match="errors"):
        again.load_state_dict({})


def test_forecasts_with_and_without_inputs_have_intervals_of_their_own():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(800, 1))
    y = 3 * X[:, 0] + 0.3 * rng.normal(size=800)
    model = SepSAForecaster(2, seasons=(), lags=4, known_ahead=True)
    with_inputs = model.prequential(y[:-2], X[:-2], coverage=0.9)
    _, low, high = model.predict(coverage=0.9)
    _, lower, upper = model.predict(X=X[-2:], coverage=0.9)
    assert ((high - low) > 5 * (upper - lower)).all()
    without = SepSAForecaster(2, seasons=(), lags=4).prequential(y[:-2], X[:-2], coverage=0.9)
    for _, low, high in (with_inputs, without):
        inside = (low[300:-1, 0] <= y[301:-2]) & (y[301:-2] <= high[300:-1, 0])
        assert inside.mean() == pytest.approx(0.9, abs=0.02)
