"""One rule for cells, whichever library a column comes from and whichever interface reads it."""

import datetime
import shlex
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import sepsa
from command_line import invoke
from sepsa import river
from sepsa.learner.columns.reader import column_of
from sepsa.shell.cells import column_of_arrow
from sepsa.shell.reading import Reading

NAN = float("nan")
DAY = datetime.datetime(2026, 1, 31, 12, 30)
SECONDS = DAY.replace(tzinfo=datetime.UTC).timestamp()
CELLS = {  # values of a column, then its numbers, times and texts
    "numbers": ([1, None, 2.5], [1, NAN, 2.5], None, None),
    "booleans": ([True, None, False], [1, NAN, 0], None, None),
    "decimals": ([Decimal("1.5"), None, Decimal(2)], [1.5, NAN, 2], None, None),
    "dates": ([DAY, None, DAY], [NAN] * 3, [SECONDS, NAN, SECONDS], None),
    "days": ([DAY.date(), None, DAY.date()], [NAN] * 3, [SECONDS - 45000, NAN, SECONDS - 45000], None),
    "durations": ([datetime.timedelta(minutes=2), None, datetime.timedelta(seconds=0.5)], [120, NAN, 0.5], None, None),
    "times of day": ([datetime.time(1, 0, 5), None, datetime.time(0, 0, 1)], [3605, NAN, 1], None, None),
    "spelled": (["1.5", "NA", "2026-01-31T12:30"], [1.5, NAN, NAN], [NAN, NAN, SECONDS], None),
    "texts": (["a", None, "1"], [NAN, NAN, 1], None, ["a", None, None]),
}


READERS = {
    "objects": lambda values: column_of(pd.Series(values, dtype=object)),
    "inferred": lambda values: column_of(pd.Series(values)),
    "arrow": lambda values: column_of_arrow("c", pa.array(values), False, Reading()),
    "array": lambda values: column_of(np.array(values, object)),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", CELLS)
def test_cells_are_read_alike(name, read):
    values, numbers, times, texts = CELLS[name]
    column = READERS[read](values)
    np.testing.assert_array_equal(column.numbers, numbers)
    np.testing.assert_array_equal(np.full(3, NAN) if column.times is None else column.times, times or [NAN] * 3)
    assert [column.text(i) if column.is_text[i] else None for i in range(3)] == (texts or [None] * 3)


@pytest.mark.parametrize("value", [[1], b"1", object()])
def test_other_objects_are_refused_with_their_type(value):
    with pytest.raises(TypeError, match=type(value).__name__):
        column_of(pd.Series([value, "a"], dtype=object))


@pytest.mark.parametrize("values", [["1", "2", "NA"], [1, 2, None]])
def test_a_category_is_a_name_in_every_interface_and_a_text_that_spells_a_number_is_a_number(
    values, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    y = pd.Series(np.arange(60) % 3 * 1.0)
    cells = pd.Series(values * 20, dtype=object)
    for dtype, named in (("category", ["c=1", "c=2"]), (object, ["c"])):
        frame = pd.DataFrame({"c": cells.astype(dtype), "other": ["a"] * 60})
        estimator = sepsa.SepSARegressor(body="fourier", random_state=0).partial_fit(frame, y)
        learner = river.SepSARegressor(body="fourier", seed=0)
        learner.learn_many(frame, y)
        table = pa.Table.from_pandas(frame.assign(y=y))
        from_arrow = river.SepSARegressor(body="fourier", seed=0)
        from_arrow.learn_many(table.drop_columns("y"), table["y"])
        with pa.OSFile("t.arrow", "wb") as file, pa.ipc.new_file(file, table.schema) as out:
            out.write_table(table)  # Parquet has no categories of numbers
        line = f"stream t.arrow --target y --body fourier --predictions p.csv --checkpoint {len(named)}.sepsa"
        assert invoke(shlex.split(line)).exit_code == 0
        saved = sepsa.load(f"{len(named)}.sepsa")
        for names in (
            estimator._learner.inputs.names,
            learner._learner.inputs.names,
            from_arrow._learner.inputs.names,
            saved.inputs.names,
        ):
            assert sorted(set(names) - {"other=a"}) == named
