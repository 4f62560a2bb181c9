"""The rule by which forgotten ridge comes back."""

import pytest

from sepsa.restoration import LEAST_SHARE, due, next_cursor


@pytest.mark.parametrize("each", [True, False], ids=["in every update", "in every so many"])
@pytest.mark.parametrize("forgetting", [1.0, 1 - 1e-9, 0.999, 0.98, 0.7, 0.3])
@pytest.mark.parametrize("p", [1, 3, 51])
def test_no_coordinate_ever_has_less_than_its_share_of_the_ridge(p, forgetting, each):
    left, cursor = [1.0] * p, 0
    for step in range(1500):
        count = due(p, forgetting, 0 if each else step)
        left = [forgetting * share for share in left]
        for i in range(count):
            at = next_cursor(cursor, i, p)
            left[at] = 1.0
        cursor = next_cursor(cursor, count, p)
        assert min(left) >= LEAST_SHARE
    assert due(p, forgetting, at_least=2) >= min(p, 2)
