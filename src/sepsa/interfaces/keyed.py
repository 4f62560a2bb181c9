"""Learners by key, one for each sensor, customer or shop: the last used ones in memory, all of them in one file."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sepsa.interrupt import DeferredInterrupt
from sepsa.states.file import CheckpointError
from sepsa.states.objects import Saves, class_name, fitted, from_bytes, parameters, to_bytes
from sepsa.states.plain import packed, unpack_label
from sepsa.validation import at_least

if TYPE_CHECKING:
    from typing import Self

KIND, FORMAT = 0x5EB5A, 1  # SQLite's application_id and user_version of our files
NEW = (
    "CREATE TABLE learners (key TEXT PRIMARY KEY, state BLOB NOT NULL)",
    "CREATE TABLE common (key INTEGER PRIMARY KEY, state BLOB NOT NULL)",
    f"PRAGMA application_id = {KIND}",
    f"PRAGMA user_version = {FORMAT}",
)


class KeyedLearner:
    """One learner for each key of a stream: a model of `sepsa.river`, an estimator with `partial_fit`, a forecaster.

    Choose it where a stream has a key and the relationship differs between keys. The learners that were used last are
    in memory; the others are in the file and are loaded with the same bits, so that `in_memory` changes no prediction.
    `commit` writes all changes in one transaction: a process that is killed resumes from the last commit by opening the
    same path. An error inside a call may leave some keys of that call learned; the last commit is unchanged. One
    process and one thread use a file at a time, until `close`.

    Args:
        start: The learner of which every new key gets a copy. One that has learned rows of all keys gives new keys a
            better start; it may learn on meanwhile. Where it has learned nothing yet, its `body="auto"` means
            "fourier" here, the network alone, in a quarter of the memory that experts take: they need about 130 kB a
            key. For one that has learned, set `body="fourier"` yourself.
        path: The SQLite file of the learners; None for a temporary one.
        in_memory: Largest number of learners in memory.

    Attributes:
        start: The learner of new keys.
        position: The position of the last commit, or None.

    See also:
        `sepsa.engines.kafka.learn`, which reads a topic into a `KeyedLearner`.

    Examples:
        >>> from sepsa.river import SepSARegressor
        >>> from sepsa.interfaces.keyed import KeyedLearner
        >>> with KeyedLearner(SepSARegressor(seed=0)) as learners:
        ...     for step in range(100):
        ...         learners.learn_one("shop 1", {"a": step % 5}, 10.0)
        ...         learners.learn_one("shop 2", {"a": step % 5}, 20.0)
        ...     [round(learners.predict_one(key, {"a": 2})) for key in learners]
        [10, 20]
    """

    def __init__(self, start: Any, path: str | os.PathLike[str] | None = None, *, in_memory: int = 1000) -> None:
        if not isinstance(start, Saves) or not hasattr(start, "state_dict"):
            raise TypeError(
                "start must be a model of sepsa.river, such as SepSARegressor or SepSAForecaster, got "
                f"{type(start).__name__}"
            )
        self.start: Any = start
        self.position: Any = None
        self.in_memory = at_least("in_memory", in_memory, 1)
        self._settings = [class_name(start), parameters(start)]
        to_bytes({"settings": self._settings})  # raises an error for a parameter that cannot be saved
        self._learners: OrderedDict[str, Any] = OrderedDict()  # the last used one last
        self._changed: set[str] = set()  # those in memory that differ from the file
        self._path = path
        # SQLite's name for a temporary file is empty.
        self._file = sqlite3.connect("" if path is None else path, timeout=1.0, isolation_level=None)
        try:
            self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        """Lock the file, and continue with its common learner and its position."""
        try:
            self._file.execute("PRAGMA locking_mode = EXCLUSIVE")  # also between a commit and the next change
            self._file.execute("BEGIN IMMEDIATE")
            kind, version, tables = (
                self._file.execute(query).fetchone()[0]
                for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
            )
            for statement in () if tables else NEW:
                self._file.execute(statement)
        except sqlite3.Error as error:
            raise CheckpointError(
                f"{self._path} cannot be opened ({error}): another process uses it, or it is not a file of a "
                "KeyedLearner"
            ) from None
        if tables and kind != KIND:
            raise CheckpointError(f"{self._path} is a database and not a file of a KeyedLearner: choose another path")
        if version > FORMAT:
            raise CheckpointError(
                f"{self._path} has format {version}, and this sepsa reads up to {FORMAT}: upgrade sepsa to open it"
            )
        if (common := self._read("common", 1)) is not None:
            if common["settings"] != self._settings:
                raise CheckpointError(
                    f"{self._path} holds learners {common['settings']}, and start is {self._settings}: give one like it"
                )
            self.start, self.position = common["start"] or self.start, common["position"]

    # ------------------------------------------------------------------ learners

    def __getitem__(self, key: Hashable) -> Any:
        """The learner of this key, to learn with; a copy of `start` for a new key. Ask for it again after using other
        keys.
        """
        name = packed(key)
        self._changed.add(name)
        found = self._find(name)
        return self._keep(name, self._new()) if found is None else found

    def _new(self) -> Any:
        """A learner for a new key: a copy of `start`, without experts unless they were asked for or have learned."""
        new = copy.deepcopy(self.start)
        model = getattr(new, "model", new)  # of a Delayed
        if getattr(model, "body", None) == "auto" and not getattr(model, "chosen_", True):
            model.body = "fourier"
        return new

    def __contains__(self, key: Hashable) -> bool:
        name = packed(key)
        stored = "SELECT 1 FROM learners WHERE key = ?"
        return name in self._learners or self._file.execute(stored, (name,)).fetchone() is not None

    def __iter__(self) -> Iterator[Hashable]:
        for name in sorted(self._names()):
            yield unpack_label(json.loads(name))

    def __len__(self) -> int:
        return len(self._names())

    def _names(self) -> set[str]:
        """The keys of all learners, in the file and in memory."""
        stored = {name for (name,) in self._file.execute("SELECT key FROM learners")}
        return stored | {name for name, learner in self._learners.items() if fitted(learner)}

    def get(self, key: Hashable) -> Any:
        """Return the learner of this key, to predict with; None for a new key.

        Args:
            key: The key.
        """
        return self._find(packed(key))

    def _find(self, name: str) -> Any:
        """The learner of a known key, now the last used one; None for a new key."""
        if name in self._learners:
            self._learners.move_to_end(name)
            return self._learners[name]
        stored = self._read("learners", name)
        return None if stored is None else self._keep(name, stored)

    def _keep(self, name: str, learner: Any) -> Any:
        """Put a learner into memory, and move the least recently used ones to the file where there are too many."""
        self._learners[name] = learner
        while len(self._learners) > self.in_memory:
            oldest = next(iter(self._learners))
            self._write(self._changed & {oldest})
            del self._learners[oldest]
        return learner

    def _read(self, table: str, key: str | int) -> Any:
        """What a table of the file has under this key, or None."""
        self._check()
        try:
            found = self._file.execute(f"SELECT state FROM {table} WHERE key = ?", (key,)).fetchone()
            return None if found is None else from_bytes(found[0])
        except sqlite3.ProgrammingError:  # closed, or used by another thread
            raise
        except (sqlite3.DatabaseError, CheckpointError) as error:
            raise CheckpointError(f"{self._path} is damaged at {key} of its table {table}: {error}") from error

    def _write(self, names: Iterable[str]) -> None:
        """Write these learners to the file, as a part of the next commit."""
        self._check()
        for name in sorted(names):
            if name in self._learners and fitted(self._learners[name]):
                with self._writing():
                    self._file.execute(
                        "INSERT INTO learners VALUES (?, ?) ON CONFLICT(key) DO UPDATE SET state = excluded.state",
                        (name, to_bytes(self._learners[name])),
                    )
            self._changed.discard(name)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Say of an error of the file what becomes of the rows since the last commit, and how to go on."""
        try:
            yield
        except sqlite3.ProgrammingError:  # closed, or used by another thread
            raise
        except sqlite3.Error as error:
            again = "commit again" if self._file.in_transaction else self._LOST.format(self.position)
            raise CheckpointError(
                f"{self._path or 'the temporary file'} cannot be written ({error}): "
                f"free space where its disk is full, and {again}"
            ) from error

    _LOST = "open it again and continue from its position, {!r}; what was learned since that commit is lost"

    def _check(self) -> None:
        """Refuse to go on after an error at which SQLite has undone the transaction, and evicted learners with it."""
        if not self._file.in_transaction:
            raise CheckpointError(
                f"{self._path} could not be written before, by an error such as a full disk: "
                + self._LOST.format(self.position)
            )

    # ------------------------------------------------------------------ rows

    def learn_one(
        self,
        key: Hashable,
        x: dict[Any, Any] | None = None,
        y: Any = None,
        w: float = 1.0,
        *,
        time: Any = None,
    ) -> None:
        """Let the key's model of `sepsa.river` learn one sample, or the key's forecaster one row.

        Args:
            key: The key; a new one gets a copy of `start`.
            x: Features by name; of a forecaster the exogenous inputs, or None.
            y: The target; of a forecaster the values of the row.
            w: The sample's weight, for models that take one.
            time: The time of the row of a forecaster.
        """
        if hasattr(self.start, "forecast"):
            self[key].learn_one(y, x, time=time)
        else:
            self[key].learn_one(x, y, w)

    def forecast(self, key: Hashable, horizon: int | None = None, xs: Any = None) -> list[Any]:
        """Forecast the next rows of a key by its forecaster.

        Args:
            key: The key; a new one is forecast by `start` and not added.
            horizon: Number of rows; None for all that the forecaster learns.
            xs: Exogenous inputs of these rows, as far as they are known.

        Returns:
            What the forecaster returns.
        """
        return (self.get(key) or self.start).forecast(horizon, xs)

    def predict_one(self, key: Hashable, x: dict[Any, Any]) -> Any:
        """Predict one sample by the key's model of `sepsa.river`.

        Args:
            key: The key; a new one is predicted by `start` and not added.
            x: Features by name.

        Returns:
            What the model predicts.
        """
        return (self.get(key) or self.start).predict_one(x)

    def prequential(self, keys: Iterable[Hashable], X: ArrayLike, y: ArrayLike) -> NDArray[Any]:
        """Predict rows, then learn them, each by the estimator of its key.

        Args:
            keys: The key of each row. The rows of one key are learned in order, by one call of its `prequential`.
            X: Inputs (n, features): an array, a DataFrame or a sparse matrix.
            y: Targets (n,) or (n, outputs).

        Returns:
            The predictions made before learning, in the order of the rows.
        """
        targets = np.asarray(y)
        return self._by_key(keys, X, lambda key, own, some: self[key].prequential(own, targets[some]))

    def predict(self, keys: Iterable[Hashable], X: ArrayLike) -> NDArray[Any]:
        """Predict rows, each by the estimator of its key.

        Args:
            keys: The key of each row; a new one is predicted by `start` and not added.
            X: Inputs (n, features): an array, a DataFrame or a sparse matrix.

        Returns:
            The predictions, in the order of the rows.
        """
        return self._by_key(keys, X, lambda key, own, _: (self.get(key) or self.start).predict(own))

    def _by_key(
        self, keys: Iterable[Hashable], X: Any, of_rows: Callable[[Hashable, Any, list[int]], Any]
    ) -> NDArray[Any]:
        """The results of `of_rows` for a key, its rows of X and their numbers, in the order of the rows."""
        from sklearn.utils import _safe_indexing, indexable
        from sklearn.utils.validation import _num_samples

        (table,) = indexable(X)
        groups: dict[str, tuple[Hashable, list[int]]] = {}
        for row, key in enumerate(keys.tolist() if isinstance(keys, np.ndarray) else keys):
            groups.setdefault(packed(key), (key, []))[1].append(row)
        order = [row for _, rows in groups.values() for row in rows]
        if len(order) != _num_samples(table) or not order:
            raise ValueError(
                f"keys must name one key for each row of X, at least one: got {len(order)} for {_num_samples(table)}"
            )
        results = np.concatenate([of_rows(key, _safe_indexing(table, rows), rows) for key, rows in groups.values()])
        return results[np.argsort(order)]

    # ------------------------------------------------------------------ the file

    def commit(self, position: Any = None) -> None:
        """Write all changes since the last commit, completely or not at all.

        Args:
            position: Any plain value, such as an offset, which is written in the same transaction; None keeps the last
                one.
        """
        position = self.position if position is None else position
        common = {
            "settings": self._settings,
            "start": self.start if fitted(self.start) else None,
            "position": position,
        }
        self._write(self._changed)
        with self._writing(), DeferredInterrupt():
            self._file.execute("INSERT OR REPLACE INTO common VALUES (1, ?)", (to_bytes(common),))
            self._file.execute("COMMIT")
            self._file.execute("BEGIN IMMEDIATE")
            self.position = position

    def clear(self) -> None:
        """Remove all learners, as a part of the next commit."""
        self._check()
        with self._writing(), DeferredInterrupt():
            self._file.execute("DELETE FROM learners")
            self._learners.clear()
            self._changed.clear()

    def close(self) -> None:
        """Close the file. What was learned since the last commit is lost."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
