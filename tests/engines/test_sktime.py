"""sktime: its own checks pass, and `update` learns what `fit` on all rows learns."""

import numpy as np
import pytest

pytest.importorskip("sktime", reason="sktime is not installed: pip install 'sepsa[sktime]'")

import pandas as pd
from sktime.split import ExpandingWindowSplitter
from sktime.utils.estimator_checks import check_estimator

from sepsa.engines.sktime import SktimeForecaster

# Every forecaster of sktime 1.2 says that its default changes in 1.3.
pytestmark = pytest.mark.filterwarnings("ignore:The default of config:FutureWarning")

HOURS = pd.date_range("2026-01-01", periods=400, freq="h")
INPUT = pd.DataFrame({"heat": np.sin(np.arange(400) ** 2)}, index=HOURS)
LOAD = pd.Series(10 + np.cos(np.arange(400) * np.pi / 12) + INPUT["heat"], index=HOURS, name="load")
STEPS = [1, 2, 5]


def forecaster(**options):
    return SktimeForecaster(seasons=[24], lags=24, **options).set_config(remember_data=False)


@pytest.mark.filterwarnings("ignore")  # sktime's checks give their own
def test_the_checks_of_sktime():
    results = check_estimator(SktimeForecaster, raise_exceptions=False, verbose=False)
    assert len(results) > 500
    assert {name: result for name, result in results.items() if result != "PASSED"} == {}


@pytest.mark.parametrize(
    "index", [HOURS, HOURS.to_period("h"), pd.RangeIndex(400)], ids=["dates", "periods", "numbers"]
)
def test_an_update_equals_a_fit_on_all_rows(index):
    y, X = LOAD.set_axis(index), INPUT.set_axis(index)
    updated = forecaster().fit(y[:200], X[:200], fh=STEPS)
    for start in range(200, 350, 50):
        updated.update(y[start - 10 : start + 50], X[start - 10 : start + 50])  # ten rows are known already
    fitted = forecaster().fit(y[:350], X[:350], fh=STEPS)
    known = X[350:]
    pd.testing.assert_frame_equal(updated.predict_interval(X=known), fitted.predict_interval(X=known))
    made = updated.predict(X=known)
    assert list(made.index) == list(index[[350, 351, 354]])
    assert np.abs(made - y[made.index]).max() < 0.2  # the truth is a season and an input; without the input about 1


def test_rows_that_do_not_change_parameters_wait():
    model = forecaster().fit(LOAD[:300], fh=STEPS)
    rows = model.forecaster_.rows
    model.update(LOAD[300:350], update_params=False)
    assert model.forecaster_.rows == rows == 300
    ahead = model.predict()
    assert list(ahead.index) == list(HOURS[[350, 351, 354]])
    model.update(LOAD[350:351])
    pd.testing.assert_series_equal(model.predict(), forecaster().fit(LOAD[:351], fh=STEPS).predict())


def test_quantiles_are_those_of_the_forecaster():
    model = forecaster().fit(LOAD[:300], fh=STEPS)
    quantiles = model.predict_quantiles(alpha=[0.05, 0.5, 0.95])["load"]
    made, low, high = model.forecaster_.predict(5, coverage=0.9)
    for alpha, expected in ((0.05, low), (0.5, made), (0.95, high)):
        np.testing.assert_allclose(quantiles[alpha], np.ravel(expected)[[0, 1, 4]])


def test_update_predict_forecasts_every_window():
    model, later = forecaster().fit(LOAD[:360], fh=[1]), LOAD[360:]
    made = model.update_predict(later, ExpandingWindowSplitter(fh=[1], initial_window=1, step_length=1))
    assert list(made.index) == list(later.index[1:])


def test_a_forecast_from_before_the_last_row_is_an_error():
    model = forecaster().fit(LOAD[:300], fh=[1])
    with pytest.raises(NotImplementedError, match="forecasts start after 2026-01-13 11:00:00, the last"):
        model.update_predict(LOAD[:300], ExpandingWindowSplitter(fh=[1], initial_window=200, step_length=50))
    with pytest.raises(ValueError, match="horizon must be at most 1, which this forecaster learns"):
        model.predict(fh=[9])
