"""The numbers of rows on a grid by local time, by which they belong to blocks."""

from __future__ import annotations

from datetime import tzinfo
from typing import Any, NamedTuple

import numpy as np

from sepsa.forecast.grids import BUSINESS, DAY, MONTHS, Grid, day_of, month_of
from sepsa.forecast.times import local_seconds

MONDAY = 4 * DAY  # seconds since 1970 of the first Monday, from which rows of dates are numbered
EARLY = 0.25  # of a step: a row that comes by less before its time is in time


class Calendar(NamedTuple):
    """A grid, whether its times are dates, and their zone."""

    grid: Grid | None
    dated: bool = False
    zone: tzinfo | None = None

    def numbers(self, points: Any) -> Any:
        """The numbers of rows at these points, so that 0 is at midnight of a Monday, or begins a year.

        They go by local time: where daylight saving begins a number is left out, and where it ends one comes twice.
        Without a grid a row's number is its point; the numbers of times that are no dates start at time 0.
        """
        numbers, grid = np.asarray(points, np.int64), self.grid
        if grid is None:
            return numbers
        if grid.unit == MONTHS:
            return numbers + month_of(grid.origin) // int(grid.step)
        if grid.unit == BUSINESS:
            return numbers + int(np.busday_count(day_of(MONDAY), day_of(grid.origin)))
        walls = grid.origin + numbers * grid.step
        if self.zone is not None and grid.step < DAY:
            walls = np.array([local_seconds(at, self.zone) for at in walls.ravel().tolist()]).reshape(walls.shape)
        return np.floor((walls - MONDAY * self.dated) / grid.step + EARLY).astype(np.int64)
