"""`OnlineIntervals`: intervals around the forecasts of any model, from its errors so far."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sepsa.forecast.forecaster import LARGEST, SepSAForecaster, check_coverage
from sepsa.learner.memory.parts import Floats
from sepsa.states import schema
from sepsa.states.objects import Saves, rebuilt_as
from sepsa.validation import at_least


@rebuilt_as("sepsa.OnlineIntervals")
class OnlineIntervals(Saves):
    """Put intervals around the forecasts of any model, from its errors one by one.

    Choose it where another library, a person or a physical model forecasts, and values arrive one after another. A
    `SepSAForecaster` of the errors learns what of them can be predicted, and the quantiles of the rest, which follow
    the share of values that they have covered. So in the long run the share `coverage` of the values lies inside,
    whatever the model. An interval need not contain the forecast: after errors that were all positive it lies above.

    Args:
        coverage: The share in (0, 1) of values that lie inside.
        ahead: How many rows ahead the model forecasts: 24 where the value of a forecast is the 24th that comes after
            it was made. A model that forecasts several steps gets an `OnlineIntervals` for each.

    See also:
        `SepSAForecaster.intervals`, for a forecaster that has them.

    Examples:
        >>> import random
        >>> from sepsa import OnlineIntervals
        >>> rng = random.Random(0)
        >>> inside, intervals = 0, OnlineIntervals(coverage=0.8)
        >>> for row in range(500):
        ...     low, high = intervals.interval(10.0)
        ...     y = rng.gauss(12.0, 1.0)
        ...     inside += low <= y <= high
        ...     intervals.update(y, 10.0)
        >>> 0.75 < inside / 500 < 0.85
        True
        >>> low, high = intervals.interval(10.0)
        >>> 10.0 < low < 12.0 < high
        True
    """

    def __init__(self, coverage: float = 0.9, *, ahead: int = 1) -> None:
        self.coverage, self.ahead = check_coverage(coverage), at_least("ahead", ahead, 1)
        if ahead > LARGEST:
            raise ValueError(f"ahead must be at most {LARGEST}, got {ahead}")
        self._errors = SepSAForecaster(ahead)

    def _get_params(self) -> dict[str, Any]:
        return {"coverage": self.coverage, "ahead": self.ahead}

    def __repr__(self) -> str:
        return f"OnlineIntervals(coverage={self.coverage}, ahead={self.ahead})  # {self.rows} rows"

    @property
    def rows(self) -> int:
        """The number of errors so far, including missing ones."""
        return self._errors.rows

    def update(self, y: ArrayLike, forecast: ArrayLike) -> None:
        """Learn the error of a forecast, or of several in order.

        Args:
            y: The value that came, or an array (n,) of values in order; None and NaN are missing.
            forecast: What the model had forecast for it, or an array (n,).

        Raises:
            ValueError: There are not as many values as forecasts, or a forecast is not finite; nothing changed.
        """
        values, made = np.array(y, float), numbers(forecast)
        if values.shape != made.shape or values.ndim > 1 or not values.size:
            raise ValueError(
                "y and forecast must be two numbers, or two arrays of one length, got shapes "
                f"{values.shape} and {made.shape}"
            )
        self._errors.update(np.atleast_1d(values - made))

    def interval(self, forecast: ArrayLike) -> tuple[Any, Any]:
        """Return the two ends of the interval of a forecast: that of the row `ahead` rows after the last value.

        The ends are infinite until there are coverage / (1 - coverage) errors: 9 for 0.9.

        Args:
            forecast: A number, or an array of numbers, each of which gets the interval of that row.

        Returns:
            The lower and the upper end: numbers, or arrays of the shape of `forecast`.
        """
        made = numbers(forecast)
        low, high = -np.inf, np.inf
        if self.rows:
            low, high = (float(ends[-1]) for ends in self._errors.predict(coverage=self.coverage)[1:])
        return (made + low, made + high) if made.ndim else (float(made) + low, float(made) + high)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"errors": self._errors.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: The result of `state_dict` of intervals with the same parameters.

        Raises:
            ValueError: An entry is missing or wrong; nothing changed.
        """
        self._errors.load_state_dict(schema.read("state_dict", state_dict, {"errors"})["errors"])


def numbers(forecast: ArrayLike) -> Floats:
    """A forecast, or several, as finite numbers."""
    made = np.array(forecast, float)
    if not np.isfinite(made).all():
        raise ValueError(f"forecast must be finite numbers, got {schema.brief(forecast)}: leave such rows out")
    return made
