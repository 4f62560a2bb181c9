"""Every kind of model that a user can train and save, behind one interface: make, learn rows, predict, save, load.

Tests of saved states go through this table: damage, interruptions, kills.
"""

from __future__ import annotations

import copy
import pickle
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import river_models
import sepsa
from sepsa import RLS, LogisticNewton, OnlineLBFGS, PerOutput, SepSA, SoftmaxNewton
from sepsa.interfaces.keyed import KeyedLearner
from sepsa.shell import command, forecast, inspection, messages
from sepsa.shell.options import ForecastOptions, PredictOptions, StreamOptions

ASKED = slice(1990, 1995)  # rows that are only predicted


@cache
def stream() -> tuple[Any, Any]:
    """Inputs (2000, 3) and targets (2000,)."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 3)).round(4)
    return X, X @ np.array([1.0, 2.0, -1.0]) + np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=len(X)).round(4)


def labels(y: Any) -> Any:
    return np.array(["low", "middle", "high"])[np.digitize(y, [-1.0, 1.0])]


def frame(X: Any) -> Any:
    """Numbers, texts and dates."""
    colours = np.array(["red", "green", "blue"])[np.digitize(X[:, 2], [-0.5, 0.5])]
    dates = pd.Timestamp("2026-01-01") + pd.to_timedelta(np.arange(len(X)), "h")
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "colour": colours, "date": dates})


def texts(X: Any) -> Any:
    """Numbers, and texts of which there are more than get an indicator at once."""
    return pd.DataFrame({"a": X[:, 0], "name": [f"n{abs(int(40 * x))}" for x in X[:, 1]]})


class Kind:
    """What the kinds have in common: a model with a state, saved by `sepsa.save` or pickled."""

    pickled: bool = False

    def module(self, model: Any) -> nn.Module | None:
        """The module whose weights are beside the state."""
        return None

    def state(self, model: Any) -> Any:
        return copy.deepcopy(model.state_dict())

    def restore(self, model: Any, state: Any) -> None:
        model.load_state_dict(state)

    def save(self, model: Any, path: Path, position: Any = None) -> None:
        if self.pickled:
            path.write_bytes(pickle.dumps(model))
        else:
            sepsa.save(model, path, position=position)

    def load(self, path: Path) -> Any:
        return pickle.loads(path.read_bytes()) if self.pickled else sepsa.load(path)

    def again(self, model: Any, folder: Path) -> Any:
        """The model after it was saved and loaded."""
        self.save(model, folder / "again")
        return self.load(folder / "again")


@dataclass
class Head(Kind):
    """A solver and its head, saved together."""

    solver: Any
    targets: str = "numbers"
    dtype: torch.dtype = torch.float32

    def make(self) -> Any:
        torch.manual_seed(0)
        linear = nn.Linear(3, 3, dtype=self.dtype)
        return {"linear": linear, "solver": self.solver().bind(linear)}

    def module(self, model: Any) -> nn.Module:
        return model["linear"]  # type: ignore[no-any-return]

    def learn(self, model: Any, start: int, stop: int) -> None:
        X, y = stream()
        numbers = np.stack([y, -y, X[:, 0]], 1)
        features = torch.from_numpy(X).to(self.dtype)
        targets = {
            "numbers": torch.from_numpy(numbers).to(self.dtype),
            "labels": torch.from_numpy(numbers.argmax(1)),
            "yes or no": torch.from_numpy(numbers > 0).to(self.dtype),
        }[self.targets]
        for at in range(start, stop, 5):
            model["solver"].update(features[at : min(at + 5, stop)], targets[at : min(at + 5, stop)])

    def predict(self, model: Any) -> Any:
        with torch.no_grad():
            return model["linear"](torch.from_numpy(stream()[0][ASKED]).to(self.dtype)).numpy()

    def state(self, model: Any) -> Any:
        return copy.deepcopy(model["solver"].state_dict())

    def restore(self, model: Any, state: Any) -> None:
        model["solver"].load_state_dict(state)

    def load(self, path: Path) -> Any:
        return sepsa.load(path, into=self.make())


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.policy = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.body(x))
        return self.value(h), self.policy(h)


@dataclass
class Training(Kind):
    """A network under SepSA, which passes over 20 rows again and again; `whole_run` saves also a random state."""

    options: dict[str, Any] = field(default_factory=dict)
    solver: Any = None
    targets: str = "numbers"
    base: Any = torch.optim.Adam
    by_torch: bool = False
    whole_run: bool = False

    def make(self) -> Any:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        if self.whole_run:
            model.insert(2, nn.Dropout(0.2))
        solver = self.solver() if callable(self.solver) else self.solver
        options = {"lr": 1e-2} | self.options
        optimizer = SepSA(TwoHeads() if self.targets == "several" else model, self.base, solver=solver, **options)
        if self.whole_run:
            optimizer.head_fraction = 0.5
        return optimizer

    def module(self, model: Any) -> nn.Module:
        return model.model  # type: ignore[no-any-return]

    def learn(self, model: Any, start: int, stop: int) -> None:
        X, y = stream()
        numbers = np.stack([y, -y, y * y], 1)
        for at in range(start // 5, stop // 5):
            rows = slice(at % 4 * 5, at % 4 * 5 + 5)
            some, classes = torch.from_numpy(numbers[rows]).float(), torch.from_numpy(numbers[rows].argmax(1))
            targets: Any = {"numbers": some, "labels": classes, "several": (some[:, :1], classes)}[self.targets]
            model.learn(torch.from_numpy(X[rows]).float(), targets)

    def predict(self, model: Any) -> Any:
        outputs = copy.deepcopy(model.model).eval()(torch.from_numpy(stream()[0][ASKED]).float())
        return (torch.cat(outputs, 1) if isinstance(outputs, tuple) else outputs).detach().numpy()

    def save(self, model: Any, path: Path, position: Any = None) -> None:
        if self.by_torch:
            torch.save({"model": model.model.state_dict(), "optimizer": model.state_dict()}, path)
        else:
            whole = {"optimizer": model, "random": torch.get_rng_state()} if self.whole_run else model
            sepsa.save(whole, path, position=position)

    def load(self, path: Path) -> Any:
        model = self.make()
        if self.by_torch:
            states = torch.load(path)
            model.model.load_state_dict(states["model"])
            model.load_state_dict(states["optimizer"])
        elif self.whole_run:
            torch.set_rng_state(sepsa.load(path, into={"optimizer": model})["random"])
        else:
            sepsa.load(path, into=model)
        return model


@dataclass
class Estimator(Kind):
    """scikit-learn's estimators; with "fit", the first rows are learned by it, the others by partial_fit."""

    kind: Any
    options: dict[str, Any] = field(default_factory=dict)
    how: str = "partial_fit"
    table: Any = None
    outputs: int = 1
    pickled: bool = False

    def make(self) -> Any:
        return self.kind(random_state=0, **self.options)

    def learn(self, model: Any, start: int, stop: int) -> None:
        X, y = (part[start:stop] for part in stream())
        y = labels(y) if self.kind is sepsa.SepSAClassifier else y if self.outputs == 1 else np.stack([y, -y], 1)
        getattr(model, self.how if start == 0 else "partial_fit")(self.table(X) if self.table else X, y)

    def prequential(self, model: Any, X: Any, y: Any, start: int = 0) -> list[Any]:
        X = self.table(np.pad(X, [(start, 0), (0, 0)]))[start:] if self.table else X
        if self.kind is sepsa.SepSARegressor:
            return list(model.prequential(X, y).tolist())
        proba = model.prequential(X, y, method="predict_proba")
        return [
            {label: p for label, p in zip(model.classes_.tolist(), row, strict=True) if p} for row in proba.tolist()
        ]

    def predict(self, model: Any) -> Any:
        X = stream()[0][ASKED]
        X = self.table(X) if self.table else X
        return model.predict_proba(X) if hasattr(model, "predict_proba") else np.array(model.predict(X, True))


@dataclass
class River(Kind):
    """River's models; with `keys` so many in a KeyedLearner, of which one is in memory."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    keys: int = 0
    pickled: bool = False
    late: int = 200  # the row from which on there is one more feature
    open_ids: int = 0  # the number of rows after which a target arrives

    def make(self) -> Any:
        model = getattr(river_models, self.kind)(seed=0, **self.options)
        model = river_models.Delayed(model) if self.open_ids else model
        return KeyedLearner(model, Path(tempfile.mkdtemp()) / "keyed.sqlite", in_memory=1) if self.keys else model

    def samples(self, start: int, stop: int) -> Any:
        X, y = stream()
        for i in range(start, stop):
            x = dict(zip(("a", ("b", 1), 3), X[i].tolist(), strict=True)) | ({"late": i % 7} if i > self.late else {})
            target = float(y[i])
            several = {"u": target, "v": -target}
            yield x, str(labels(target)) if "Class" in self.kind else several if "Multi" in self.kind else target

    def learn(self, model: Any, start: int, stop: int) -> None:
        for i, (x, y) in enumerate(self.samples(start, stop), start):
            if not self.open_ids:
                model.learn_one(*([("shop", i % self.keys)] if self.keys else []), x, y)
                continue
            model.predict_one(x, id=i)
            for _, earlier in self.samples(max(0, i - self.open_ids), i - self.open_ids + 1):
                model.learn_one(y=earlier, id=i - self.open_ids)
        if self.keys:
            model.commit(stop)

    def prequential(self, model: Any, X: Any, y: Any, start: int = 0) -> list[Any]:
        """With keys, every second row has another one."""
        told, ask = [], "predict_proba_one" if "Class" in self.kind and not self.keys else "predict_one"
        for i, (x, target) in enumerate(zip(X.tolist(), y.tolist(), strict=True)):
            key = [("shop", i % self.keys)] if self.keys else []
            target = {"u": target, "v": -target} if "Multi" in self.kind else target
            told.append(getattr(model, ask)(*key, dict(enumerate(x))))
            model.learn_one(*key, dict(enumerate(x)), target)
        return told

    def predict(self, model: Any) -> Any:
        asked = [x for x, _ in self.samples(ASKED.start, ASKED.stop)]
        if self.keys:
            return np.array([[model.predict_one(("shop", key), x) for key in range(self.keys)] for x in asked])
        if "Class" in self.kind:  # asked for probabilities it takes in the rows that wait
            model = copy.deepcopy(model)
            return np.array([list(model.predict_proba_one(x).values()) for x in asked])
        answers = [model.predict_one(x) for x in asked]
        return np.array([list(answer.values()) if isinstance(answer, dict) else answer for answer in answers])

    def state(self, model: Any) -> Any:
        return {str(key): model[key].state_dict() for key in model} if self.keys else super().state(model)

    def save(self, model: Any, path: Path, position: Any = None) -> None:
        if self.keys:
            model.close()
            path.write_bytes(Path(model._path).read_bytes())
        else:
            super().save(model, path, position)

    def load(self, path: Path) -> Any:
        if self.keys:
            return KeyedLearner(getattr(river_models, self.kind)(seed=0, **self.options), path, in_memory=1)
        return super().load(path)


@dataclass
class Forecaster(Kind):
    """A forecaster of two series with an input."""

    options: dict[str, Any] = field(default_factory=lambda: {"lags": 4, "seasons": [6]})

    def make(self) -> Any:
        return sepsa.SepSAForecaster(3, step=3600.0, **self.options)

    def learn(self, model: Any, start: int, stop: int) -> None:
        for i, x in enumerate(stream()[0][start:stop], start):
            model.learn_one({"u": np.sin(i) + 0.1 * x[0], "v": 5 + 0.1 * x[1]}, {"x": x[2]}, time=3600.0 * i)

    def prequential(self, model: Any, X: Any, y: Any, start: int = 0) -> list[Any]:
        return list(model.prequential(y, X[:, :1]).tolist())

    def predict(self, model: Any) -> Any:
        return np.array([list(step.values()) for step in model.forecast(xs=[{"x": 0.0}] * len(model.times()))])


@dataclass
class Command(Kind):
    """`sepsa stream` and `sepsa forecast`: the model is the path of the file that they write to --checkpoint."""

    options: dict[str, Any]
    kind: str = "sepsa stream"

    def make(self) -> Path:
        return Path(tempfile.mkdtemp()) / "model.sepsa"

    def lines(self, stop: int) -> list[str]:
        """A table of numbers, texts and dates, with rows that cannot be used."""
        X, y = stream()
        texts, written = frame(X)["colour"], ["date,a,b,colour,y"]
        for i in range(stop):
            day, hour = divmod(i, 24)
            month, day = divmod(day, 28)
            target = str(labels(y[i])) if self.options.get("classify") else f"{y[i]:.4f}"
            time = f"2026-{1 + month:02}-{1 + day:02}T{hour:02}:00"
            cells = [time, *(f"{v:.4f}" for v in X[i, :2]), texts[i], target]
            if self.kind == "sepsa forecast":
                pass  # all rows can be used
            elif i % 97 == 5:
                cells = cells[: 1 + i % 4]
            elif i % 89 == 7:
                cells[-1] = ""
            elif i % 71 == 3:
                cells[1 + i % 2] = ""
            elif i % 41 == 11:
                cells[3] = f'"of {i},\n{i} lines"'
            written.append(",".join(cells))
        return written

    def learn(self, model: Path, start: int, stop: int) -> None:
        """Run the command on a table that has grown to `stop` rows."""
        table = model.with_name("t.csv")
        table.write_text("\n".join(self.lines(stop)) + "\n")
        files = {name: model.with_name(f"{name}.csv") for name in ("predictions", "quarantine")}
        if start and not files["predictions"].exists():  # of a saved file the model alone is kept
            files["predictions"] = model.with_name("further.csv")
        if self.kind == "sepsa stream":
            code = command.stream(StreamOptions(table, checkpoint=model, **files, **self.options))
        else:
            options = ForecastOptions(table, checkpoint=model, **files, **self.options)
            code = forecast.forecast(options)
        assert code in (messages.FINISHED, messages.LEFT_OUT)

    def prequential(self, model: Path, X: Any, y: Any, start: int = 0) -> list[Any]:
        """By `sepsa stream`: the lines of the predictions, with probabilities of the classes by name."""
        table, out = model.with_name("t.csv"), model.with_name("predictions.csv")
        rows = frame(np.pad(X, [(start, 0), (0, 0)]))[start:].assign(y=y)
        rows.to_csv(table, index=False, mode="a", header=not table.exists())
        more = {"probabilities": True} if self.options.get("classify") else {}
        before = len(out.read_text().splitlines()) if out.exists() else 1
        options = StreamOptions(table, checkpoint=model, predictions=out, **self.options | more)
        assert command.stream(options) == 0
        return out.read_text().splitlines()[before:]

    def predict(self, model: Path) -> Any:
        loaded = inspection.load_model(model, self.kind)[0]
        if self.kind != "sepsa stream":
            return np.array([list(step.values()) for step in loaded.forecaster.forecast()])
        source, out = model.with_name("ask.csv"), model.with_name("answers.csv")
        source.write_text(frame(stream()[0][ASKED]).to_csv(index=False))
        assert command.predict(PredictOptions(source, model=model, predictions=out)) == 0
        answers = [line.split(",")[1] for line in out.read_text().splitlines()[1:]]
        return answers if self.options.get("classify") else np.array(answers, float)

    def state(self, model: Path) -> Any:
        loaded, position = inspection.load_model(model, self.kind)
        files = [model.with_name(f"{name}.csv") for name in ("predictions", "quarantine")]
        return loaded.state_dict(), position["table"], [path.read_bytes() for path in files if path.exists()]

    def save(self, model: Path, path: Path, position: Any = None) -> None:
        path.write_bytes(model.read_bytes())

    def load(self, path: Path) -> Path:
        return path

    def again(self, model: Path, folder: Path) -> Path:
        return model  # each run of the command has saved and will load it


REGRESSOR, CLASSIFIER = sepsa.SepSARegressor, sepsa.SepSAClassifier
SMALL: dict[str, Any] = {"hidden_layer_sizes": (4,)}
FOURIER: dict[str, Any] = SMALL | {"body": "fourier"}
CASES: dict[str, Any] = {
    "rls.sepsa": Head(RLS),
    "rls-forgetting-double.sepsa": Head(lambda: RLS(ridge=0.5, forgetting=0.98), dtype=torch.float64),
    "rls-float32.sepsa": Head(lambda: RLS(dtype=torch.float32, forgetting=0.99)),
    "rls-evidence.sepsa": Head(lambda: RLS(ridge="evidence")),
    "softmax.sepsa": Head(lambda: SoftmaxNewton(forgetting=0.98), "labels"),
    "softmax-evidence.sepsa": Head(lambda: SoftmaxNewton(ridge="evidence"), "labels"),
    "logistic.sepsa": Head(LogisticNewton, "yes or no"),
    "logistic-evidence.sepsa": Head(lambda: LogisticNewton(ridge="evidence"), "yes or no"),
    "lbfgs.sepsa": Head(lambda: OnlineLBFGS(memory=3)),
    "lbfgs-cross-entropy.sepsa": Head(lambda: OnlineLBFGS(memory=3, loss="cross-entropy"), "labels"),
    "per-output.sepsa": Head(lambda: PerOutput(RLS(forgetting=0.99))),
    "sepsa.sepsa": Training(solver=RLS),
    "sepsa-run.sepsa": Training(solver=lambda: RLS(forgetting=0.99), whole_run=True),
    "sepsa-lbfgs.sepsa": Training(solver=OnlineLBFGS),
    "sepsa-epoch-told.sepsa": Training({"samples_per_epoch": 20}),
    "sepsa-cross-entropy.sepsa": Training({"samples_per_epoch": 20}, "cross-entropy", "labels"),
    "sepsa-two-heads.sepsa": Training(
        {"head": ["value", "policy"]}, lambda: {"value": RLS(), "policy": SoftmaxNewton()}, "several"
    ),
    "sepsa-by-torch.pt": Training({"samples_per_epoch": 20}, by_torch=True),
    "regressor.sepsa": Estimator(REGRESSOR),
    "regressor-fourier.sepsa": Estimator(REGRESSOR, FOURIER),
    "regressor-gaps.sepsa": Estimator(REGRESSOR, FOURIER, table=lambda X: np.where(X > 1.5, np.nan, X)),
    "regressor-linear.sepsa": Estimator(REGRESSOR, {"hidden_layer_sizes": (), "body": "fourier"}),
    "regressor-two-targets.sepsa": Estimator(REGRESSOR, FOURIER, outputs=2),
    "regressor-fit.sepsa": Estimator(REGRESSOR, SMALL | {"max_iter": 3}, "fit"),
    "regressor-frame.sepsa": Estimator(REGRESSOR, FOURIER, table=frame),
    "regressor-texts.sepsa": Estimator(REGRESSOR, FOURIER, table=texts),
    "classifier.sepsa": Estimator(CLASSIFIER),
    "classifier-fourier.sepsa": Estimator(CLASSIFIER, FOURIER | {"forgetting": 0.99}),
    "classifier-fit-frame.sepsa": Estimator(CLASSIFIER, SMALL | {"max_iter": 3}, "fit", frame),
    "river-regressor.sepsa": River("SepSARegressor", {"hidden": (4,)}),
    "river-regressor-fourier.sepsa": River("SepSARegressor", {"hidden": (4,), "body": "fourier"}),
    "river-classifier.sepsa": River("SepSAClassifier", {"hidden": (4,)}),
    "river-open-ids.sepsa": River("SepSARegressor", {"hidden": (4,), "body": "fourier"}, open_ids=5),
    "river-multi-target.sepsa": River("SepSAMultiTargetRegressor", {"hidden": (4,)}),
    "keyed.sqlite": River("SepSARegressor", {"hidden": (4,), "body": "fourier"}, keys=2),
    "forecaster.sepsa": Forecaster(),
    "forecaster-blocks.sepsa": Forecaster({"every": 3, "known_ahead": True}),
    "stream.sepsa": Command({"target": "y"}),
    "stream-classify-fourier.sepsa": Command({"target": "y", "classify": True, "body": "fourier"}),
    "forecast.sepsa": Command({"target": ("a", "b"), "time": "date", "horizon": 3, "lags": 4}, "sepsa forecast"),
    "regressor.pickle": Estimator(REGRESSOR, SMALL, pickled=True),
    "regressor-fit.pickle": Estimator(REGRESSOR, SMALL | {"max_iter": 3}, "fit", pickled=True),
    "river-regressor-fourier.pickle": River("SepSARegressor", {"hidden": (4,), "body": "fourier"}, pickled=True),
}
