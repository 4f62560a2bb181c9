"""Write tests/data/saved: a small model of every kind that a user can save, and what it predicts, as version 0.2.0
saved them (commit d5d5bd7). tests/states/test_saved.py loads each: a file that is here is never written again.

    python tests/data/make_saved.py NAME ...       writes those that have been added to `CASES`
"""

from __future__ import annotations

import io
import json
import lzma
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import sepsa
from sepsa import RLS, LogisticNewton, OnlineLBFGS, PerOutput, SepSA, SoftmaxNewton
from sepsa.stream.keyed import KeyedLearner
from sepsa.stream.tables import command, forecast, inspection

SAVED = Path(__file__).parent / "saved"
COUNT = (270, 20, 5)  # rows of the three parts: learned before saving, learned after loading, predicted


def rows(part: int, count: int | None = None) -> tuple[Any, Any]:
    """Inputs (n, 3) and targets (n,) of a part."""
    rng = np.random.default_rng(part)
    X = rng.normal(size=(count or COUNT[part], 3)).round(4)
    return X, X @ np.array([1.0, 2.0, -1.0]) + np.sin(2 * X[:, 0]) + 0.1 * rng.normal(size=len(X)).round(4)


def labels(y: Any) -> Any:
    return np.array(["low", "middle", "high"])[np.digitize(y, [-1.0, 1.0])]


class Head(NamedTuple):
    """A solver and its head, saved together."""

    solver: Any
    targets: str = "numbers"
    dtype: torch.dtype = torch.float32

    def make(self) -> Any:
        torch.manual_seed(0)
        linear = nn.Linear(3, 3, dtype=self.dtype)
        return {"linear": linear, "solver": self.solver().bind(linear)}

    def learn(self, model: Any, part: int) -> None:
        X, y = rows(part)
        features = torch.from_numpy(X).to(self.dtype)
        numbers = np.stack([y, -y, X[:, 0]], 1)
        targets = {
            "numbers": torch.from_numpy(numbers).to(self.dtype),
            "labels": torch.from_numpy(numbers.argmax(1)),
            "yes or no": torch.from_numpy(numbers > 0).to(self.dtype),
        }[self.targets]
        for at in range(0, len(X), 5):
            model["solver"].update(features[at : at + 5], targets[at : at + 5])

    def predict(self, model: Any) -> Any:
        with torch.no_grad():
            return model["linear"](torch.from_numpy(rows(2)[0]).to(self.dtype)).numpy()

    def save(self, model: Any, path: Path) -> None:
        sepsa.save(model, path)

    def load(self, path: Path) -> Any:
        model = self.make()
        sepsa.load(path, into=model)
        return model


class Two(nn.Module):
    """A body with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.value, self.policy = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        h = torch.tanh(self.body(x))
        return self.value(h), self.policy(h)


class Training(NamedTuple):
    """A model under SepSA, which passes over 20 rows again and again."""

    options: dict[str, Any]
    solver: Any = None
    targets: str = "numbers"
    by_torch: bool = False

    def make(self) -> Any:
        torch.manual_seed(0)
        several = self.targets == "several"
        model = Two() if several else nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        solver = self.solver() if callable(self.solver) else self.solver
        return SepSA(model, torch.optim.Adam, lr=1e-2, solver=solver, **self.options)

    def learn(self, optimizer: Any, part: int) -> None:
        X, y = rows(0, 20)
        X = torch.from_numpy(X).float()
        numbers = torch.from_numpy(np.stack([y, -y, y * y], 1)).float()
        classes = numbers.argmax(1)
        for at in list(range(0, 20, 5)) * (6 if part == 0 else 1):
            at = slice(at, at + 5)
            targets = {"numbers": numbers[at], "labels": classes[at], "several": (numbers[at, :1], classes[at])}
            optimizer.learn(X[at], targets[self.targets])

    def predict(self, optimizer: Any) -> Any:
        with torch.no_grad():
            outputs = optimizer.model(torch.from_numpy(rows(2)[0]).float())
        return torch.cat(outputs, 1).numpy() if isinstance(outputs, tuple) else outputs.numpy()

    def save(self, optimizer: Any, path: Path) -> None:
        if self.by_torch:
            torch.save({"model": optimizer.model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        else:
            sepsa.save(optimizer, path)

    def load(self, path: Path) -> Any:
        optimizer = self.make()
        if self.by_torch:
            states = torch.load(path)
            optimizer.model.load_state_dict(states["model"])
            optimizer.load_state_dict(states["optimizer"])
        else:
            sepsa.load(path, into=optimizer)
        return optimizer


def frame(X: Any) -> Any:
    import pandas as pd

    colours = np.array(["red", "green", "blue"])[np.digitize(X[:, 2], [-0.5, 0.5])]
    dates = pd.Timestamp("2026-01-01") + pd.to_timedelta(np.arange(len(X)), "h")
    return pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "colour": colours, "date": dates})


def body() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh())


class Estimator(NamedTuple):
    """scikit-learn's estimators; `how` is the method that learns before saving."""

    kind: Any
    options: dict[str, Any]
    how: str = "partial_fit"
    table: Any = None
    pickled: bool = False
    count: int | None = None

    def make(self) -> Any:
        module = {"module": body()} if "module" in self.options else {}
        return self.kind(random_state=0, **self.options | module)

    def learn(self, model: Any, part: int) -> None:
        X, y = rows(part, None if part else self.count or (40 if self.how == "fit" else None))
        y = labels(y) if self.kind is sepsa.SepSAClassifier else y
        getattr(model, self.how if part == 0 else "partial_fit")(self.table(X) if self.table else X, y)

    def predict(self, model: Any) -> Any:
        X = rows(2)[0]
        X = self.table(X) if self.table else X
        return model.predict_proba(X) if hasattr(model, "predict_proba") else np.array(model.predict(X, True))

    def save(self, model: Any, path: Path) -> None:
        if self.pickled:
            path.write_bytes(pickle.dumps(model))
        elif "module" in self.options:
            sepsa.save({"state": model.state_dict()}, path)
        else:
            model.save(path)

    def load(self, path: Path) -> Any:
        if self.pickled:
            return pickle.loads(path.read_bytes())
        if "module" not in self.options:
            return sepsa.load(path)
        model = self.make()
        model.load_state_dict(sepsa.load(path)["state"])
        return model


class River(NamedTuple):
    """River's models, alone and one for each key; also pickled inside a pipeline."""

    kind: str
    options: dict[str, Any]
    keyed: bool = False
    pickled: bool = False

    def make(self) -> Any:
        from river import compose

        import sepsa.river

        model = getattr(sepsa.river, self.kind)(seed=0, **self.options)
        return compose.Discard("c") | model if self.pickled else model

    def samples(self, part: int) -> Any:
        X, y = rows(part)
        names = labels(y).tolist()
        for i, (x, target) in enumerate(zip(X.tolist(), y.tolist(), strict=True)):
            sample = dict(zip("abc", x, strict=True)) | ({"late": x[0] ** 2} if part or i > 200 else {})
            several = {"u": target, "v": -1}
            yield sample, names[i] if "Class" in self.kind else several if "Multi" in self.kind else target

    def learn(self, model: Any, part: int) -> None:
        for i, (x, y) in enumerate(self.samples(part)):
            if isinstance(model, KeyedLearner):
                model.learn_one(("shop", i % 2), x, y)
            else:
                model.learn_one(x, y)

    def predict(self, model: Any) -> Any:
        if isinstance(model, KeyedLearner):
            return np.array([[model.predict_one(("shop", k), x) for k in range(2)] for x, _ in self.samples(2)])
        if self.kind == "SepSAClassifier":
            return np.array([[model.predict_proba_one(x)[c] for c in ("low", "high")] for x, _ in self.samples(2)])
        answers = [model.predict_one(x) for x, _ in self.samples(2)]
        return np.array([list(a.values()) if isinstance(a, dict) else a for a in answers])

    def save(self, model: Any, path: Path) -> None:
        if self.pickled:
            path.write_bytes(pickle.dumps(model))
        elif self.keyed:
            with KeyedLearner(model, path) as learners:
                self.learn(learners, 0)
                learners.commit(position=7)
        else:
            model.save(path)

    def load(self, path: Path) -> Any:
        if self.keyed:
            learners = KeyedLearner(self.make(), path)
            assert learners.position == 7
            return learners
        return pickle.loads(path.read_bytes()) if self.pickled else sepsa.load(path)


class Forecaster(NamedTuple):
    """A forecaster of two series."""

    def make(self) -> Any:
        return sepsa.SepSAForecaster(3, lags=4, seasons=[6], step=3600.0)

    def learn(self, model: Any, part: int) -> None:
        X, _ = rows(part)
        for i, x in enumerate(X, start=0 if part == 0 else COUNT[0]):
            model.learn_one({"u": np.sin(i) + 0.1 * x[0], "v": 5 + 0.1 * x[1]}, {"x": x[2]}, time=3600.0 * i)

    def predict(self, model: Any) -> Any:
        return np.array([list(step.values()) for step in model.forecast(xs=[{"x": 0.0}] * 3)])

    def save(self, model: Any, path: Path) -> None:
        model.save(path)

    def load(self, path: Path) -> Any:
        return sepsa.load(path)


class Command(NamedTuple):
    """What `sepsa stream` and `sepsa forecast` write to --checkpoint; the model is the path of that file."""

    options: dict[str, Any]
    kind: str = "sepsa stream"

    def make(self) -> Path:
        return Path(tempfile.mkdtemp()) / "model.sepsa"

    def learn(self, path: Path, part: int) -> None:
        """Run the command on a table that has grown by this part."""
        lines, at = ["date,a,b,colour,y"], 0
        for each in range(part + 1):
            X, y = rows(each)
            colours = frame(X)["colour"]
            for x, colour, target, name in zip(X, colours, y, labels(y), strict=True):
                at += 1
                target = name if self.options.get("classify") else f"{target:.4f}"
                lines.append(f"2026-01-{1 + at // 24:02}T{at % 24:02}:00,{x[0]:.4f},{x[1]:.4f},{colour},{target}")
        table = path.with_name("t.csv")
        table.write_text("\n".join(lines) + "\n")
        files = {name: path.with_name(f"{name}.csv") for name in ("predictions", "quarantine")}
        if part:
            del files["predictions"]  # the file of the first run is not kept
        if self.kind == "sepsa stream":
            code = command.stream(command.StreamOptions(table, checkpoint=path, **files, **self.options))
        else:
            options = forecast.ForecastOptions(table, checkpoint=path, **files, **self.options)
            code = command.stream(options, forecast.ForecastRun)
        assert code == 0

    def predict(self, path: Path) -> Any:
        if self.kind != "sepsa stream":
            steps = inspection.load_model(path, self.kind)[0].forecaster.forecast()
            return np.array([list(step.values()) for step in steps])
        X, _ = rows(2)
        source, out = path.with_name("ask.csv"), path.with_name("answers.csv")
        source.write_text(frame(X).to_csv(index=False))
        assert command.predict(command.PredictOptions(path, source, out)) == 0
        answers = [line.split(",")[1] for line in out.read_text().splitlines()[1:]]
        return answers if self.options.get("classify") else np.array(answers, float)

    def save(self, model: Path, path: Path) -> None:
        path.write_bytes(model.read_bytes())

    def load(self, path: Path) -> Path:
        return path


REGRESSOR, CLASSIFIER = sepsa.SepSARegressor, sepsa.SepSAClassifier
SMALL: dict[str, Any] = {"hidden_layer_sizes": (4,)}
CASES: dict[str, Any] = {
    "rls.sepsa": Head(RLS),
    "rls-forgetting-double.sepsa": Head(lambda: RLS(ridge=0.5, forgetting=0.98), dtype=torch.float64),
    "rls-float32.sepsa": Head(lambda: RLS(dtype=torch.float32, forgetting=0.99)),
    "rls-auto.sepsa": Head(lambda: RLS(ridge="auto", forgetting="auto")),
    "rls-auto-ridge.sepsa": Head(lambda: RLS(ridge="auto")),
    "softmax.sepsa": Head(lambda: SoftmaxNewton(forgetting=0.98), "labels"),
    "softmax-auto.sepsa": Head(lambda: SoftmaxNewton(ridge="auto"), "labels"),
    "logistic.sepsa": Head(LogisticNewton, "yes or no"),
    "logistic-auto.sepsa": Head(lambda: LogisticNewton(ridge="auto"), "yes or no"),
    "lbfgs.sepsa": Head(lambda: OnlineLBFGS(memory=3)),
    "lbfgs-cross-entropy.sepsa": Head(lambda: OnlineLBFGS(memory=3, loss="cross-entropy"), "labels"),
    "per-output.sepsa": Head(lambda: PerOutput(RLS(forgetting=0.99))),
    "sepsa.sepsa": Training({}, RLS),
    "sepsa-epoch-told.sepsa": Training({"epoch": 20}),
    "sepsa-epoch-noticed.sepsa": Training({}),
    "sepsa-cross-entropy.sepsa": Training({"epoch": 20}, "cross-entropy", "labels"),
    "sepsa-two-heads.sepsa": Training(
        {"head": ["value", "policy"]}, lambda: {"value": RLS(), "policy": SoftmaxNewton()}, "several"
    ),
    "sepsa-by-torch.pt": Training({"epoch": 20}, by_torch=True),
    "regressor.sepsa": Estimator(REGRESSOR, {}),
    "regressor-first-rows.sepsa": Estimator(REGRESSOR, SMALL, count=30),
    "regressor-fourier.sepsa": Estimator(REGRESSOR, SMALL | {"body": "fourier"}),
    "regressor-linear.sepsa": Estimator(REGRESSOR, {"hidden_layer_sizes": (), "body": "fourier"}),
    "regressor-fit.sepsa": Estimator(REGRESSOR, SMALL | {"max_iter": 3}, "fit"),
    "regressor-frame.sepsa": Estimator(REGRESSOR, SMALL | {"body": "fourier"}, table=frame),
    "regressor-module.sepsa": Estimator(REGRESSOR, {"module": True}),
    "regressor-module-fit.sepsa": Estimator(REGRESSOR, {"module": True, "max_iter": 3}, "fit"),
    "classifier.sepsa": Estimator(CLASSIFIER, {}),
    "classifier-fourier.sepsa": Estimator(CLASSIFIER, SMALL | {"body": "fourier"}),
    "classifier-fit-frame.sepsa": Estimator(CLASSIFIER, SMALL | {"max_iter": 3}, "fit", frame),
    "river-regressor.sepsa": River("SepSARegressor", {"hidden": (4,)}),
    "river-classifier.sepsa": River("SepSAClassifier", {"hidden": (4,)}),
    "river-multi-target.sepsa": River("SepSAMultiTargetRegressor", {"hidden": (4,)}),
    "river-regressor-fourier.sepsa": River("SepSARegressor", {"hidden": (4,), "body": "fourier"}),
    "keyed.sqlite": River("SepSARegressor", {"hidden": (4,), "body": "fourier"}, keyed=True),
    "forecaster.sepsa": Forecaster(),
    "stream.sepsa": Command({"target": "y"}),
    "stream-classify-fourier.sepsa": Command({"target": "y", "classify": True, "body": "fourier"}),
    "forecast.sepsa": Command({"target": ["a", "b"], "time": "date", "horizon": 3, "lags": 4}, "sepsa forecast"),
    "regressor.pickle": Estimator(REGRESSOR, SMALL, pickled=True),
    "regressor-fit.pickle": Estimator(REGRESSOR, SMALL | {"max_iter": 3}, "fit", pickled=True),
    "river-pipeline.pickle": River("SepSARegressor", {"hidden": (4,), "body": "fourier"}, pickled=True),
}


def rounded(predictions: Any) -> Any:
    """Nested lists of eight digits: more do not survive another processor."""
    array = np.asarray(predictions)
    return array.tolist() if array.dtype.kind == "U" else np.vectorize(lambda x: float(f"{x:.8g}"))(array).tolist()


def write(name: str) -> None:
    case = CASES[name]
    model = case.make()
    if not name.startswith("keyed"):
        case.learn(model, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        case.save(model, path)
        content = path.read_bytes()
        loaded = case.load(path)
        said = {"before": rounded(case.predict(loaded))}
        case.learn(loaded, 1)
        said["after"] = rounded(case.predict(loaded))
    SAVED.mkdir(exist_ok=True)
    (SAVED / f"{name}.xz").write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    path = SAVED / "predictions.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = said
    out = io.StringIO()
    json.dump({name: known[name] for name in CASES if name in known}, out)
    path.write_text(out.getvalue().replace('}, "', '},\n"') + "\n")
    print(name, len(content), (SAVED / f"{name}.xz").stat().st_size)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write(name)
