"""Learners by key: a limit of memory changes no bit, and a killed process resumes from its last commit."""

import datetime
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest

import river_models
from breaking.damage import same
from sepsa import SepSAClassifier, SepSARegressor
from sepsa.checkpoint import CheckpointError
from sepsa.interfaces.keyed import KeyedLearner
from sepsa.states import file


def estimator(**settings):
    return SepSARegressor(hidden_layer_sizes=(), random_state=0, **settings)


def rows(keys, count, seed=0):
    """Keys at random, and for each a linear relationship of its own."""
    rng = np.random.default_rng(seed)
    names, X = rng.integers(keys, size=count), rng.normal(size=(count, 3))
    truth = np.random.default_rng(1).normal(size=(keys, 3))
    return names, X, (X * truth[names]).sum(1)


def blocks(names, X, y, size):
    for at in range(0, len(X), size):
        yield names[at : at + size], X[at : at + size], y[at : at + size]


@pytest.mark.parametrize(
    ("keys", "each"), [(30, 10), pytest.param(10_000, 1_000, marks=pytest.mark.long)], ids=["small", "10,000 keys"]
)
def test_a_limit_of_memory_changes_no_prediction(keys, each):
    with KeyedLearner(estimator(), in_memory=keys // 10) as few, KeyedLearner(estimator(), in_memory=keys) as all_:
        for block in blocks(*rows(keys, keys * each), size=keys * each // 5):
            np.testing.assert_array_equal(few.prequential(*block), all_.prequential(*block))
            assert len(few._learners) == keys // 10
        assert len(few) == len(all_) == keys
        names, X, _ = rows(keys, keys, seed=2)
        np.testing.assert_array_equal(few.predict(names, X), all_.predict(names, X))


def test_samples_one_by_one_with_models_of_river():
    names, X, y = rows(6, 120)
    start, *alone = (river_models.SepSARegressor(hidden=(), seed=0) for _ in range(7))
    with KeyedLearner(start, in_memory=2) as keyed:
        for key, x, target in zip(names.tolist(), X.tolist(), y.tolist(), strict=True):
            sample = dict(zip("abc", x, strict=True))
            assert keyed.predict_one(key, sample) == alone[key].predict_one(sample)
            keyed.learn_one(key, sample, target)
            alone[key].learn_one(sample, target)


def test_a_new_key_begins_where_the_common_learner_is():
    _, X, _ = rows(1, 300)
    y = X @ [1.0, 2.0, 3.0]
    start = estimator().partial_fit(X, y)
    with KeyedLearner(start) as keyed:
        np.testing.assert_array_equal(keyed.predict(["new"], X[:1]), start.predict(X[:1]))
        assert "new" not in keyed
        before = start.predict(X[:1])
        keyed.prequential(["new"] * 50, X[:50], -y[:50])
        np.testing.assert_array_equal(start.predict(X[:1]), before)
        assert keyed.predict(["new"], X[:1]) != before
        keyed.start.partial_fit(X[:50], -y[:50])
        np.testing.assert_array_equal(keyed["another"].predict(X[:1]), start.predict(X[:1]))


def test_keys_of_several_types_and_classes_that_differ():
    keys = [1, True, 1.0, "1", (1, "a"), None]
    with KeyedLearner(SepSAClassifier(hidden_layer_sizes=(), random_state=0), in_memory=2) as keyed:
        for _ in range(2):
            told = keyed.prequential(keys, np.ones((6, 2)), [f"class {i}" * (i + 1) for i in range(6)])
        assert told.tolist() == [f"class {i}" * (i + 1) for i in range(6)]
        assert len(keyed) == 6
        assert {(type(key), key) for key in keyed} == {(type(key), key) for key in keys}
        assert "1" in keyed
        assert 2 not in keyed
        for key, scalar in ((1, np.int64(1)), (1.0, np.float32(1)), (True, np.True_), ("1", np.str_("1"))):
            assert keyed[scalar] is keyed[key]
        assert keyed[np.int8(1), np.str_("a")] is keyed[1, "a"]


def test_rows_of_frames_and_of_sparse_matrices_as_the_estimators_take_them():
    pandas, sparse = pytest.importorskip("pandas"), pytest.importorskip("scipy.sparse")
    names, X, y = rows(3, 60)
    keys = names.tolist()
    texts = pandas.DataFrame({"a": X[:, 0], "b": np.where(X[:, 1] > 0, "up", "down")})
    for table, of in ((texts, texts.iloc), (sparse.coo_array(X), sparse.csr_array(X))):
        with KeyedLearner(estimator()) as keyed:
            told = keyed.prequential(keys, table, y)
            for key in range(3):
                own = np.flatnonzero(names == key)
                np.testing.assert_array_equal(told[own], estimator().prequential(of[own], y[own]))
            np.testing.assert_array_equal(keyed.predict(keys[:1], of[:1]), keyed[keys[0]].predict(of[:1]))


def test_new_keys_have_no_experts_unless_they_were_asked_for():
    X = np.ones((1, 2))
    for start, experts in (({}, False), ({"body": "experts"}, True)):
        with KeyedLearner(SepSARegressor(random_state=0, **start)) as keyed:
            keyed.prequential(["a"], X, [1.0])
            assert ("experts" in keyed["a"].chosen_) == experts
            assert keyed.start.get_params()["body"] == start.get("body", "auto")


def test_what_is_refused(tmp_path):
    path = tmp_path / "keyed"
    for start, options, words in (
        ({}, {}, r"start must be a model of sepsa.river.*got dict"),
        (estimator(), {"in_memory": 0}, "in_memory must be an integer of at least 1, got 0"),
        (SepSARegressor(random_state=np.random.RandomState(0)), {}, r"to be saved, got numpy\.random"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            KeyedLearner(start, **options)
    with KeyedLearner(estimator(), path) as keyed:
        with pytest.raises(ValueError, match="one key for each row of X, at least one: got 1 for 2"):
            keyed.prequential(["a"], np.ones((2, 3)), np.ones(2))
        with pytest.raises(ValueError, match="must be strings, numbers"):
            keyed[object()]
        keyed.prequential(["a"], np.ones((1, 3)), np.ones(1))
        keyed.commit()
        with pytest.raises(CheckpointError, match="another process uses it"):  # which would miss what is in memory here
            KeyedLearner(estimator(), path)
    with pytest.raises(CheckpointError, match=r"holds learners .*'ridge': 10.0.* and start is .*'ridge': 2.0"):
        KeyedLearner(estimator(ridge=2.0), path)
    with KeyedLearner(estimator(), path) as keyed:
        assert list(keyed) == ["a"]
    path.write_bytes(b"no database" * 100)
    with pytest.raises(CheckpointError, match="not a file of a KeyedLearner"):
        KeyedLearner(estimator(), path)


@pytest.fixture
def database(tmp_path):
    """A file with the learners of two keys, of which one fits into memory; and a function that runs SQL on it."""
    path = tmp_path / "keyed"
    with KeyedLearner(estimator(), path, in_memory=1) as keyed:
        keyed.prequential(["a", "b"], np.ones((2, 3)), np.ones(2))
        keyed.commit(2)

    def sql(statement, *values):
        connection = sqlite3.connect(path)
        with connection:
            connection.execute(statement, values)
        connection.close()

    return path, sql


def test_a_damaged_learner_is_refused_and_others_are_not(database, monkeypatch):
    path, sql = database
    with KeyedLearner(estimator(), path) as keyed:
        state = keyed["a"].to_bytes()
    monkeypatch.setattr(file, "FORMAT", 2)
    newer = estimator().partial_fit(np.ones((1, 3)), np.ones(1)).to_bytes()
    monkeypatch.undo()
    for damaged, why in (
        (b"no state", "damaged or not a checkpoint"),
        (state[:-1], "tensors should have"),
        (newer, "has format 2, written by sepsa .*: upgrade"),
    ):
        sql("UPDATE learners SET state = ? WHERE key = '\"a\"'", damaged)
        with KeyedLearner(estimator(), path) as keyed:
            assert "a" in keyed
            with pytest.raises(CheckpointError, match=f'keyed is damaged at "a" of its table learners: .*{why}'):
                keyed.predict(["b", "a"], np.ones((2, 3)))
            with pytest.raises(CheckpointError, match='damaged at "a"'):
                keyed.prequential(["a"], np.ones((1, 3)), np.ones(1))
            keyed.prequential(["b"], np.ones((1, 3)), np.ones(1))
            keyed.commit()
            assert sorted(keyed) == ["a", "b"]
    sql("UPDATE common SET state = ?", b"no state")
    with pytest.raises(CheckpointError, match="damaged at 1 of its table common"):
        KeyedLearner(estimator(), path)
    path.write_bytes(path.read_bytes()[:4096])  # a page of several
    with pytest.raises(CheckpointError, match=r"malformed|cannot be opened"):
        KeyedLearner(estimator(), path)


def test_a_file_of_something_else_or_of_a_newer_format_is_refused_and_left_as_it_is(database, tmp_path):
    path, sql = database
    sql("PRAGMA user_version = 2")
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="has format 2, and this sepsa reads up to 1: upgrade sepsa"):
        KeyedLearner(estimator(), path)
    assert path.read_bytes() == before
    own = tmp_path / "own"
    connection = sqlite3.connect(own)
    connection.execute("CREATE TABLE orders (id INTEGER)")
    connection.close()
    before = own.read_bytes()
    with pytest.raises(CheckpointError, match="own is a database and not a file of a KeyedLearner: choose another"):
        KeyedLearner(estimator(), own)
    assert own.read_bytes() == before


def test_a_full_disk_leaves_the_last_commit_and_nothing_else_is_used(tmp_path):
    """breaking/test_kills.py kills the process instead."""
    parts, start = list(blocks(*rows(30, 300), 10)), estimator().partial_fit(*rows(1, 20)[1:])
    with KeyedLearner(start, tmp_path / "few", in_memory=3) as few:
        for number, part in enumerate(parts[:3]):
            few.prequential(*part)
            few.commit(number + 1)
        few._file.execute("PRAGMA max_page_count = 1")  # of the size that it has
        lost = "open it again and continue from its position, 3; what was learned since that commit is lost"
        with pytest.raises(CheckpointError, match=r"few cannot be written \(.*full\): free space .*and " + lost):
            few.prequential(*rows(30, 300))
        # SQLite has undone the transaction, and with it the learners that were evicted.
        with pytest.raises(CheckpointError, match="could not be written before, .*" + lost):
            few.prequential(*parts[3])
        with pytest.raises(CheckpointError, match=lost):
            few.commit(30)
    with KeyedLearner(estimator(), tmp_path / "few", in_memory=3) as few, KeyedLearner(start) as all_:
        assert few.position == 3
        for part in parts[3:]:
            few.prequential(*part)
        for part in parts:
            all_.prequential(*part)
        assert same(*([(key, each[key].state_dict()) for key in sorted(each)] for each in (few, all_)))


@pytest.mark.parametrize("key", [float("nan"), np.nan, pd.NA, pd.NaT, np.datetime64("NaT")], ids=repr)
def test_a_missing_key_is_refused(key):
    with KeyedLearner(estimator()) as keyed:
        with pytest.raises(ValueError, match=r"a key or an id must not be missing, got .*: leave such rows out"):
            keyed.prequential(["a", key], np.ones((2, 3)), [1.0, 2.0])
        assert list(keyed) == []


def test_dates_are_keys(tmp_path):
    day = datetime.date(2026, 3, 1)
    with KeyedLearner(estimator(), tmp_path / "keys") as keyed:
        keyed.prequential([day, pd.Timestamp(day), np.datetime64("2026-03-01", "ns")], np.ones((3, 3)), [1.0, 2.0, 3.0])
        keyed.commit()
    with KeyedLearner(estimator(), tmp_path / "keys") as keyed:
        assert list(keyed) == [day, datetime.datetime(2026, 3, 1)]
        for i in range(2):  # nanoseconds are no datetime
            keyed.prequential([np.datetime64(i, "ns"), np.timedelta64(i, "ns"), i], np.ones((3, 3)), [1.0, 2.0, 3.0])
        assert len(keyed) == 8
        assert all(key in keyed for key in keyed)


def test_texts_in_nested_lists_are_an_error_that_names_a_frame():
    X, y = [[1.0, "x"], [2.0, "y"]], [1.0, 2.0]
    said = "X must hold numbers where it is no DataFrame, got the text 'x': put texts into a DataFrame"
    with KeyedLearner(SepSARegressor(body="fourier")) as keyed:
        with pytest.raises(ValueError, match=said):
            keyed.prequential(["a", "a"], X, y)
        with pytest.raises(ValueError, match=said):
            SepSARegressor(body="fourier").partial_fit(X, y)
        assert len(keyed.prequential(["a", "a"], pd.DataFrame(X), y)) == 2


def test_another_thread_is_refused():
    with KeyedLearner(estimator()) as keyed, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(keyed.predict, ["a"], np.ones((1, 3)))
        with pytest.raises(sqlite3.ProgrammingError, match="thread"):
            answer.result()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        keyed.commit()
