"""Long frames: each series is learned as if alone, whatever the order of rows; wrong frames change nothing."""

import numpy as np
import pandas as pd
import pytest

from sepsa import SepSAForecaster, SepSAPanelForecaster

DAYS = pd.date_range("2026-01-01", periods=60)
OPTIONS = {"lags": 4, "seasons": [7]}


def long(names="uvw", start=0, stop=50, inputs=False):
    """Series with a week, each of its own level."""
    parts = []
    for level, name in enumerate(names):
        t = np.arange(start, stop)
        y = 10.0 * level + np.sin(2 * np.pi * t / 7) + np.cos(0.1 * t * (level + 1))
        part = {"unique_id": name, "ds": DAYS[start:stop], "y": y}
        parts.append(pd.DataFrame(part | ({"promotion": t % 3 == 0, "price": t % 5 * 1.0} if inputs else {})))
    return pd.concat(parts, ignore_index=True)


def panel(path=None, **options):
    return SepSAPanelForecaster(SepSAForecaster(3, **OPTIONS, step="day"), path, **options)


@pytest.mark.parametrize("inputs", [False, True])
def test_each_series_is_forecast_as_if_it_were_alone(inputs):
    df, ahead = long(inputs=inputs), long(start=50, stop=55, inputs=inputs).drop(columns="y")
    df.loc[df.index % 17 == 5, "y"] = np.nan
    shuffled = df.sample(frac=1, random_state=0)
    with panel(in_memory=1) as model:
        early = shuffled["ds"] < DAYS[40]
        model.fit(shuffled[early]).update(shuffled[~early])
        told = model.predict(2, ahead if inputs else None, level=[50, 90])
        assert sorted(model.series) == ["u", "v", "w"]
    expected = ["SepSA", "SepSA-lo-90", "SepSA-lo-50", "SepSA-hi-50", "SepSA-hi-90"]
    assert told.columns.tolist() == ["unique_id", "ds", *expected]
    assert told["unique_id"].tolist() == [*"uuvvww"]
    assert told["ds"].tolist() == [*DAYS[50:52]] * 3
    for name in "uvw":
        own, alone = df[df["unique_id"] == name], SepSAForecaster(3, **OPTIONS, step="day")
        X = own[["promotion", "price"]].to_numpy(float) if inputs else None
        for rows in (slice(0, 40), slice(40, 50)):
            alone.update(own["y"].to_numpy()[rows], X if X is None else X[rows], times=own["ds"].to_numpy()[rows])
        X = ahead[ahead["unique_id"] == name][["promotion", "price"]].to_numpy(float)[:2] if inputs else None
        made = {share: alone.predict(2, X, coverage=share) for share in (0.5, 0.9)}
        wanted = [made[0.5][0], made[0.9][1], made[0.5][1], made[0.5][2], made[0.9][2]]
        np.testing.assert_array_equal(told[told["unique_id"] == name][expected].to_numpy().T, wanted)


def test_an_integer_that_pandas_made_a_float_is_the_same_series():
    first, later = long([1, 2], stop=40), long([1.0, 2.0], start=40)
    with panel() as model, panel() as other:
        told = model.fit(first).update(later).predict(2)
        assert list(model.series) == [1, 2]
        pd.testing.assert_frame_equal(told, other.fit(first).update(long([1, 2], start=40)).predict(2))


def test_polars_in_polars_out():
    polars = pytest.importorskip("polars")
    with panel() as model, panel() as other:
        told = model.fit(polars.from_pandas(long())).predict(level=[90])
        expected = other.fit(long()).predict(level=[90])
    assert isinstance(told, polars.DataFrame)
    pd.testing.assert_frame_equal(told.to_pandas(), expected, check_dtype=False)


def test_gaps_late_series_and_series_that_stop():
    with panel() as model, panel() as whole:
        model.fit(long("uv", stop=40)).update(pd.concat([long("u", 42, 45), long("w", 42, 45)]))
        told = model.predict(1).set_index("unique_id")["ds"]
        assert told.to_dict() == {"u": DAYS[45], "v": DAYS[40], "w": DAYS[45]}
        gaps = long("u", stop=45)
        gaps.loc[40:41, "y"] = np.nan
        np.testing.assert_allclose(model.predict()["SepSA"][:3], whole.fit(gaps).predict()["SepSA"], rtol=1e-9)
        model.fit(long("w"))
        assert list(model.series) == ["w"]


def test_other_columns_and_times_that_are_numbers():
    df = long("uv").rename(columns={"unique_id": "shop", "ds": "week", "y": "sales"})
    df["week"] = np.tile(np.arange(50), 2)
    names = {"id_col": "shop", "time_col": "week", "target_col": "sales"}
    with SepSAPanelForecaster(SepSAForecaster(2, **OPTIONS, step=1.0), **names) as model:
        told = model.fit(df).predict()
    assert told[["shop", "week"]].to_numpy().tolist() == [["u", 50], ["u", 51], ["v", 50], ["v", 51]]


def test_a_file_continues_with_the_same_bits(tmp_path):
    path, ahead = tmp_path / "panel.sqlite", long(start=50, stop=53, inputs=True)
    with panel() as never_saved:
        never_saved.fit(long(stop=40, inputs=True)).update(long(start=40, inputs=True))
        expected = never_saved.predict(3, ahead)
    with panel(path, in_memory=2) as model:
        model.fit(long(stop=40, inputs=True)).commit()
        model.update(long("u", 40, inputs=True))  # is lost
    with panel(path, in_memory=2) as model:
        assert model.inputs == ["promotion", "price"]
        pd.testing.assert_frame_equal(model.update(long(start=40, inputs=True)).predict(3, ahead), expected)


FRAME, TEXTS = long(), long().assign(price="cheap")


@pytest.mark.parametrize(
    ("df", "message"),
    [
        (FRAME.drop(columns="ds"), r"df must have the columns \['unique_id', 'ds', 'y'\], got \['unique_id', 'y'\]"),
        (FRAME.assign(ds=FRAME["ds"].where(FRAME.index != 7)), r"df\['ds'\] must .* got one in row 7"),
        (FRAME.assign(unique_id=FRAME["unique_id"].where(FRAME.index > 0)), r"df\['unique_id'\] must .* in row 0"),
        (pd.concat([FRAME, FRAME[60:61]]), "series 'v': time must be at least half a step .* aggregate the rows"),
        (FRAME.assign(y=np.inf), r"df\['y'\] must be numbers up to"),
        (FRAME.assign(y="a"), r"df\['y'\] must be numbers, got 'a' in the column 'y'"),
        (TEXTS, r"must be numbers, got 'cheap' in the column 'price'|df must have the inputs \[\]"),
        (FRAME.assign(ds="soon"), "time must be seconds up to 1e15, a datetime or a datetime64, got 'soon'"),
        ([1, 2], "df must be a frame of pandas or Polars, got list"),
    ],
)  # fmt: skip
def test_a_wrong_frame_changes_nothing(df, message):
    with panel() as model:
        expected = model.fit(long("xyz")).predict()
        for learn in (model.fit, model.update):
            with pytest.raises((ValueError, TypeError), match=message):
                learn(df)
        pd.testing.assert_frame_equal(model.predict(), expected)


def test_rows_that_are_not_new_or_have_other_inputs_change_nothing():
    with panel() as model:
        with pytest.raises(ValueError, match="the panel has learned no row yet: call fit first"):
            model.predict()
        expected = model.fit(long()).predict()
        with pytest.raises(ValueError, match=r"series 'w': time must be .* got 2026-02-1"):
            model.update(pd.concat([long("uv", 50, 51), long("w", 49, 51)]))
        with pytest.raises(ValueError, match=r"df must have the inputs \[\] of .*, got \['promotion', 'price'\]"):
            model.update(long(start=50, stop=51, inputs=True))
        pd.testing.assert_frame_equal(model.predict(), expected)
        with pytest.raises(ValueError, match="level must hold percents between 0 and 100, got 100"):
            model.predict(level=[100])


def test_inputs_of_the_rows_ahead_must_be_there():
    with panel() as model:
        model.fit(long(inputs=True))
        ahead = long(start=50, stop=53, inputs=True)
        for missing, message in (
            (ahead[ahead["unique_id"] != "v"], "series 'v': X_df .* got none at 2026-02-20"),
            (ahead.drop(index=2), "series 'u': X_df .* got none at 2026-02-22"),
            (pd.concat([ahead, ahead[1:2].assign(price=99.0)]), "series 'u': X_df .* got 2 at 2026-02-21"),
            (ahead.drop(columns="price"), "X_df must have the columns"),
        ):
            with pytest.raises(ValueError, match=message):
                model.predict(3, missing)
        model.fit(long())
        with pytest.raises(ValueError, match="X_df must be None where the frames that were learned have no inputs"):
            model.predict(3, ahead)


def test_an_error_of_blocks_names_the_series_and_changes_nothing():
    days = [long(start=start, stop=start + 18) for start in (0, 18)]  # the first ones end with a Sunday
    with SepSAPanelForecaster(SepSAForecaster(2, every=7, lags=700, seasons=(), step="day")) as model:
        made = model.fit(days[0]).predict()
        wide = pd.concat([days[1], pd.DataFrame(np.ones((54, 300)))], axis=1)
        for wrong, message in ((wide, "series 'u': every must be such"), (days[0][:0], "df must have rows to learn")):
            with pytest.raises(ValueError, match=message):
                model.fit(wrong)
        pd.testing.assert_frame_equal(model.predict(), made)
        model.update(long("v", 18, 21))
        with pytest.raises(ValueError, match="series 'v': the 2 rows that are forecast every 7 rows have come"):
            model.predict()


def test_the_start_has_learned_nothing_and_tells_the_step_of_single_rows():
    learned = SepSAForecaster(3).update(np.arange(9.0))
    for start in (learned, 3):
        with pytest.raises(ValueError, match="start must be a SepSAForecaster that has learned no row"):
            SepSAPanelForecaster(start)
    with SepSAPanelForecaster(SepSAForecaster(3)) as model:
        model.fit(long("u", stop=1))
        with pytest.raises(ValueError, match="series 'u': it has too few rows to tell the time between two of them"):
            model.predict()
