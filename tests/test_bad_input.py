"""Bad input, in one table: each row does something wrong and names what the user sees.

`ACTS` does what the table "What happens on bad input" of docs/how-to/reliability.md says. Every part of a row's last
cell in `backquotes` must occur in what the user sees, the error with its class, the warnings, or the lines and the
exit code of the command. To add a row, write it into the page, or into `PLAIN` where it is an error as any other, and a
function under the same words into `ACTS`.
`FURTHER` are mistakes that would train silently wrong, and further errors, with a pattern of what is seen. An error
leaves the model as it was.
"""

import copy
import re
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.pipeline import make_pipeline
from torch import nn
from torch.nn.functional import mse_loss, one_hot

import river_models
import sepsa
from command_line import invoke
from heads.test_properties import SOLVERS as CASES
from sepsa import RLS, SepSA, SoftmaxNewton
from training_loops import Named, batches, in_a_thread

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "reliability.md"


def seen(function, *arguments, unchanged=None, **options):
    """The error and the warnings of a call; after an error `unchanged` returns what it did before."""
    before = unchanged and copy.deepcopy(unchanged())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = ""
        try:
            function(*arguments, **options)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            assert not unchanged or unchanged() == before, "an error has changed the model"
    return "\n".join([told, *(f"{warning.category.__name__}: {warning.message}" for warning in caught)])


# ---------------------------------------------------------------------- PyTorch


class Net:
    """A model with its SepSA, and a batch."""

    def __init__(self, outputs=1, solver=None, then=None, base=torch.optim.SGD, **options):
        torch.manual_seed(0)
        layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs), *([] if then is None else [then])]
        self.model = nn.Sequential(*layers)
        self.optimizer = SepSA(self.model, base, solver=solver and solver(), **{"lr": 1e-3} | options)
        self.X, self.y = torch.randn(8, 3), torch.randn(8, outputs)

    def weights(self):
        return [parameter.tolist() for parameter in self.model.parameters()]

    def learn(self, X=None, y=None, loss_fn=None, times=1):
        X, y = self.X if X is None else X, self.y if y is None else y

        def learn():
            for _ in range(times):
                self.optimizer.learn(X, y, *([] if loss_fn is None else [loss_fn]))

        return seen(learn, unchanged=self.weights)

    def observe(self, loss_fn=None):
        """What a loop with `observe`, and a loss in it, is told."""

        def loop():
            for _ in range(2):
                with self.optimizer.observe(self.y):
                    outputs = self.model(self.X)
                    if loss_fn is not None:
                        loss_fn(outputs, self.y)

        return seen(loop)

    def forget(self, closure=False):
        """What a loop without `observe` is told in three steps."""

        def backward():
            mse_loss(self.model(self.X), self.y).backward()

        def loop():
            for _ in range(3):
                self.optimizer.step(backward if closure else backward())

        return seen(loop)


def missing_feature():
    net = Net()
    net.X[2, 0] = torch.nan
    return net.learn()


def head(solver, outputs=1):
    """A head alone, and rows for it."""
    torch.manual_seed(0)
    linear = nn.Linear(3, outputs, dtype=torch.float64)
    return solver.bind(linear), torch.randn(64, 3, dtype=torch.float64), torch.randn(64, outputs, dtype=torch.float64)


def time_stamps():
    def prediction(batch):
        solver, X, y = head(RLS())
        X[:, 2] = 1.7e12 + 6e4 * torch.arange(64)
        for i in range(0, 64, batch):
            solver.update(X[i : i + batch], y[i : i + batch])
        return solver.predict(X).detach()

    one, many = prediction(1), prediction(64)
    return "exact" if torch.allclose(one, many, rtol=1e-9, atol=1e-9) else f"{(one - many).abs().max()}"


def unlearn_a_huge_row():
    solver, X, y = head(RLS())
    solver.update(X, y)
    solver.update(1e5 * X[:1], y[:1])
    return seen(solver.unlearn, 1e5 * X[:1], y[:1], unchanged=solver.linear.weight.tolist)


def captured_huge_rows():
    solver, X, y = head(RLS())
    solver.prepare_capture()
    before = solver.linear.weight.tolist()
    solver.update_captured(1e8 * X, y)
    assert solver.linear.weight.tolist() == before
    return seen(lambda: solver.steps)


def partial_base(freeze=False):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    model[1:3].requires_grad_(not freeze)
    return seen(SepSA, model, torch.optim.SGD(model[0].parameters(), lr=0.1))


def another_thread_predicts():
    net, alone = Net(), Net()
    for one in (net, alone):
        with one.optimizer.observe(one.y):
            if one is net:
                in_a_thread(lambda: net.model(net.X + 1))
            one.model(one.X)
    return "not learned" if net.weights() == alone.weights() else "learned"


def two_threads_observe():
    net = Net()
    with net.optimizer.observe(net.y):
        told = in_a_thread(net.learn)
        net.model(net.X)
    return told


# ---------------------------------------------------------------------- scikit-learn and River

ROWS = np.random.default_rng(0).normal(size=(60, 3))
FRAME = pd.DataFrame({"city": ["Oslo", "Rome"] * 30, "size": ROWS[:, 0]})


def fitted(X=ROWS):
    return sepsa.SepSARegressor(random_state=0, body="fourier").partial_fit(X, ROWS[:, 0])


def partial_fit(X, y, first=ROWS):
    model = fitted(first)
    return seen(model.partial_fit, X, y, unchanged=lambda: model.predict(first).tolist())


def a_new_text():
    model, new, none = fitted(FRAME), FRAME.assign(city="Lima"), FRAME.assign(city=None)
    assert model.predict(new).tolist() == model.predict(none).tolist()
    model.partial_fit(FRAME.assign(city=["Lima", "Rome"] * 30), ROWS[:, 0] + np.array([9, 0] * 30))
    assert model.predict(new).tolist() != model.predict(none).tolist()
    return "`fit`, `partial_fit`: as a missing value"


def river_model(learned=True, scaler=False):
    from river import preprocessing

    from sepsa.river import SepSARegressor

    model = SepSARegressor(seed=0, body="fourier")
    model = preprocessing.StandardScaler() | model if scaler else model
    for x in ROWS if learned else ():
        model.learn_one(dict(zip("abc", x.tolist(), strict=True)), float(x[0]))
    return model


def very_many_features():
    model, x = river_model(learned=False), dict.fromkeys(range(20_000), 1.0)
    told = seen(model.learn_one, x, 1.0)
    assert model._learner.body.engine.inputs == 256
    assert seen(model.learn_one, x, 1.0) == ""
    return told


def late_label(ids, answered, most=100_000):
    """What a model is told that predicts samples with these identifiers, and gets the target of one of them."""
    model = river_models.Delayed(river_model(), max_open_ids=most)

    def follow():
        for i, each in enumerate(ids):
            model.predict_one({"a": float(i)}, id=each)
        model.learn_one(y=1.0, id=answered)

    return seen(follow, unchanged=lambda: model.predict_one({"a": 1.0}))


# ---------------------------------------------------------------------- forecasters

HOURS = np.arange(8 * 24)
TIMES, WAVE = np.datetime64("2026-01-01") + HOURS.astype("timedelta64[h]"), np.sin(HOURS * np.pi / 12)
DAYS = pd.date_range("2026-01-01", periods=40)
PANEL = pd.concat(
    [pd.DataFrame({"unique_id": u, "ds": DAYS, "y": np.arange(40.0) % 7}) for u in "ab"], ignore_index=True
)


def panel(df, later=None):
    """The forecasts of a panel, or the error at its last frame."""
    with sepsa.SepSAPanelForecaster(sepsa.SepSAForecaster(2, step="day")) as model:
        if later is not None:
            model.fit(df)
        told = seen(model.fit if later is None else model.update, df if later is None else later)
        return told.strip() or model.predict()


def unsorted_panel():
    return "same forecasts" if panel(PANEL.sample(frac=1, random_state=0)).equals(panel(PANEL)) else "other forecasts"


def late_series():
    made = panel(PANEL, pd.DataFrame({"unique_id": ["late"], "ds": DAYS[-1:], "y": [5.0]}))
    return "forecast from its own rows" if made[made.unique_id == "late"].SepSA.tolist() == [5.0, 5.0] else str(made)


def blocks(rows, X=None, horizon=None, **options):
    """A day-ahead forecaster of these hours, and what its prediction is told."""
    model = sepsa.SepSAForecaster(24, every=24, **options).update(WAVE[rows], X, times=TIMES[rows])
    return model, seen(model.predict, horizon)


def missing_hours():
    model, told = blocks(np.delete(HOURS, slice(100, 103)))
    assert (model.rows, str(model.times()[0]), told) == (192, "2026-01-09 00:00:00", "")
    return "missing values"


def unit_of_blocks(factor):
    model, values = sepsa.SepSAForecaster(24, every=24), WAVE + 3
    model.update(np.where(HOURS < 144, values, factor * values), times=TIMES)
    assert model.predict().mean() > 100
    return f"{model._window.model.dropped} implausible values"


# ---------------------------------------------------------------------- shell and files

TABLE = "x,y\n" + "".join(f"{i % 5},{i % 5}\n" for i in range(40))
LONG = TABLE + TABLE.partition("\n")[2] * 49


def sepsa_command(line):
    result = invoke(line.split())
    return f"{result.stderr}exit code {result.exit_code}"


def stream(table, options="", before=None):
    """What `sepsa stream` says, after it has learned the table `before` where one is given."""
    for each in [before] * (before is not None) + [table]:
        Path("t.csv").write_text(each)
        told = sepsa_command(f"stream t.csv --target y --predictions p.csv {options}")
    return told


def misspelled_column():
    stream("speed,height,y\n" + "".join(f"{i % 5},1,{i % 5}\n" for i in range(40)), "--checkpoint m.sepsa")
    Path("new.csv").write_text("sped,height\n1,2\n")
    return sepsa_command("predict m.sepsa new.csv")


def decimal_commas():
    """What `sepsa predict` says of a table with decimal commas, which the model has learned."""
    stream("x;y\n" + "".join(f"{i % 5},5;{i % 5},5\n" for i in range(40)), "--decimal , --checkpoint m.sepsa")
    Path("new.csv").write_text("x;z\n1,5;1\n")
    return sepsa_command("predict m.sepsa new.csv")


def integer_dates():
    Path("t.csv").write_text("month,y\n202511,1\n202512,2\n202601,3\n")
    return sepsa_command("forecast t.csv --target y --time month --horizon 2")


def many_in_another_encoding():
    Path("t.csv").write_bytes(("town,y\n" + "Kraków,1\nWien,2\n" * 40).encode("cp1250"))
    return sepsa_command("stream t.csv --target y --predictions p.csv")


def another_encoding():
    Path("t.csv").write_bytes("town,y\nKraków,1\nWien,2\n".encode("cp1250"))
    return sepsa_command("stream t.csv --target y --predictions p.csv")


def forecast(cells):
    Path("t.csv").write_text("day;y\n" + "".join(cells))
    return sepsa_command("forecast t.csv --target y --time day --horizon 2")


def damaged_checkpoint():
    data = bytearray(fitted().to_bytes())
    data[-5] ^= 1
    return seen(sepsa.SepSARegressor.from_bytes, bytes(data))


def save_nan():
    net = Net()
    sepsa.save(net.optimizer, "m.sepsa")
    net.model[0].weight.data[0, 0] = torch.nan
    return seen(sepsa.save, net.optimizer, "m.sepsa", unchanged=Path("m.sepsa").read_bytes)


ACTS = {
    ("PyTorch", "NaN or Inf in the inputs of a batch"): missing_feature,
    ("PyTorch", "a loop without `observe`"): lambda: Net().forget(),
    ("PyTorch", "time stamps in milliseconds as a feature of the head"): time_stamps,
    ("PyTorch", "a captured step with huge rows"): captured_huge_rows,
    ("PyTorch", "a sigmoid or softmax behind the head"): lambda: Net(then=nn.Sigmoid()).learn(),
    ("PyTorch", "a base instance without some parameters of the body"): lambda: partial_base(),
    ("PyTorch", "a prediction in another thread during `observe`"): another_thread_predicts,
    ("scikit-learn", "Inf in `X`"): lambda: partial_fit(np.array([[1.0, np.inf, 0.0]]), [1.0]),
    ("scikit-learn", "a text that `fit` has not seen"): a_new_text,
    ("scikit-learn", "a text column with another text in every row"): lambda: seen(
        sepsa.SepSARegressor().partial_fit, pd.DataFrame({"id": [f"id{i}" for i in range(64)]}), np.arange(64.0)
    ),
    ("scikit-learn", "thousands of columns"): lambda: seen(
        sepsa.SepSARegressor().partial_fit, np.zeros((2, 5000)), np.zeros(2)
    ),
    ("River", "a running `StandardScaler` before the model"): lambda: seen(river_model, scaler=True),
    ("River", "a dict of 20,000 features"): very_many_features,
    ("River", "a target for an `id` that is not open"): lambda: late_label(["a"], "b"),
    ("`Delayed`", "an `id` that another sample has"): lambda: late_label(["a", "a"], "a"),
    ("`Delayed`", "an `id` that is never answered"): lambda: late_label(["a", "b", "c"], "a", most=2),
    ("forecasting", "a panel whose rows are not sorted"): unsorted_panel,
    ("forecasting", "a panel with a time twice"): lambda: panel(pd.concat([PANEL, PANEL[3:4]])),
    ("forecasting", "a panel without a time"): lambda: panel(PANEL.assign(ds=PANEL.ds.where(PANEL.index != 3))),
    ("forecasting", "rows of a panel that are not new"): lambda: panel(PANEL, PANEL[:3]),
    ("forecasting", "a series that a panel brings late"): late_series,
    ("forecasting", "blocks with missing hours"): missing_hours,
    ("forecasting", "a block far outside all before"): lambda: unit_of_blocks(1000.0),
    ("forecasting", "a block that has begun"): lambda: blocks(HOURS[:-9], horizon=24)[1],
    ("forecasting", "a phase outside of the block"): lambda: seen(sepsa.SepSAForecaster, 24, every=24, start=30),
    ("forecasting", "blocks without the inputs ahead"): lambda: blocks(HOURS, WAVE[:, None], known_ahead=True)[1],
    ("shell", "a row that cannot be used"): lambda: stream(LONG + "1\n2,abc\n") + Path("p.quarantine.csv").read_text(),
    ("shell", "more than a twentieth of the rows that cannot be used"): another_encoding,
    ("shell", "a table in another encoding"): many_in_another_encoding,
    ("shell", "a column of numbers in which a text appears"): lambda: stream(TABLE + "oops,1\n"),
    ("shell", "times that are dates written as integers"): integer_dates,
    ("shell", "another table than the checkpoint's, by its first 4 KB"): lambda: stream(
        TABLE[:-4] + "9,9\n", "--checkpoint m.sepsa", before=TABLE
    ),
    ("shell", "a table that was changed later, before the position of the checkpoint"): lambda: stream(
        LONG[:-4] + "9,9\n", "--checkpoint m.sepsa", before=LONG
    ),
    ("shell", "`sepsa predict` with a misspelled column"): misspelled_column,
    ("shell", "`sepsa predict` with the same decimal commas, without `--decimal`"): decimal_commas,
    ("shell", "a series of one row"): lambda: forecast(["2026-01-31;1\n"]),
    ("files", "a model with NaN, saved over a good one"): save_nan,
    ("files", "a pipeline given to `sepsa.save`"): lambda: seen(sepsa.save, make_pipeline(fitted()), "m.sepsa"),
}

# Rows that stand here and not on the page: plain errors.
PLAIN = (
    ("scikit-learn", "Inf in `X`", "`ValueError`: `infinity`; NaN is a missing value"),
    ("scikit-learn", "thousands of columns", "`ValueError`: `X must have at most 2048 columns, got 5000`"),
    (
        "River",
        "a target for an `id` that is not open",
        "`ValueError`: `id 'b' is not open: no sample was predicted with it`",
    ),
    (
        "`Delayed`",
        "an `id` that another sample has",
        "`ValueError`: `id 'a' is open for another sample: learn its target first, or give another id`",
    ),
    (
        "forecasting",
        "a panel with a time twice",
        "`ValueError`: `series 'a': time must be at least half a step (day) after that of the last row`",
    ),
    (
        "forecasting",
        "a panel without a time",
        "`ValueError`: `df['ds'] must have no missing value, got one in row 3: leave such rows out`",
    ),
    (
        "forecasting",
        "rows of a panel that are not new",
        "`ValueError`: `series 'a': time must be later than that of the last row`",
    ),
    (
        "forecasting",
        "a block that has begun",
        "`ValueError`: `horizon must be at most 9, the rows left of what was forecast every 24 rows`",
    ),
    (
        "forecasting",
        "a phase outside of the block",
        "`ValueError`: `start must be a row of a block, 0 to 23 for every=24, got 30`",
    ),
    (
        "forecasting",
        "blocks without the inputs ahead",
        "`ValueError`: `must hold the exogenous inputs of the 24 rows ahead, as known_ahead=True says, got 0 rows`",
    ),
    (
        "files",
        "a pipeline given to `sepsa.save`",
        "`TypeError`: `save its learner, pipeline[-1], and pickle the other steps, or pickle the whole pipeline`",
    ),
    (
        "shell",
        "times that are dates written as integers",
        "`'month' has dates without marks between their parts, as 202511: give --date-format %Y%m`; `exit code 2`",
    ),
)


def page_rows():
    """Interface, input and result of each row."""
    text = PAGE.read_text(encoding="utf-8").partition("## What happens on bad input\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [*(tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines), *PLAIN]


@pytest.mark.parametrize(("interface", "given", "result"), page_rows())
def test_what_the_table_says_happens(interface, given, result, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if interface in ("River", "`Delayed`"):
        pytest.importorskip("river")
    told = ACTS[interface, given]()
    assert told.count("UserWarning") <= 1
    wanted = re.findall(r"`([^`]+)`", result)
    assert wanted, "a row names what the user sees"
    assert not [part for part in wanted if part not in told], told


def test_every_case_has_its_row():
    assert {(interface, given) for interface, given, _ in page_rows()} == set(ACTS)


# ---------------------------------------------------------------------- mistakes that would train silently wrong


def outer_sepsa(detached=False, part=False):
    inner = Net()
    if detached:
        inner.optimizer.detach()
    outer = nn.Sequential(inner.model, nn.Linear(1, 1))
    return seen(SepSA, outer, torch.optim.SGD((inner.model[0] if part else inner.model).parameters(), lr=0.1))


def frozen_head(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    getattr(model[1], name).requires_grad_(False)
    return seen(SepSA, model, torch.optim.SGD)


def meta_model():
    with torch.device("meta"):
        return seen(SepSA, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), torch.optim.SGD)


def shared_memory(name, whole=False):
    linear = nn.Linear(3, 2)
    values = getattr(linear, name).detach()[:1].expand_as(getattr(linear, name))
    setattr(linear, name, nn.Parameter(values.clone() if whole else values))
    return seen(RLS().bind, linear)


def inference(solver, what):
    linear, x, y = nn.Linear(3, 2), torch.randn(8, 3), one_hot(torch.arange(8) % 2, 2).float()
    bound = solver().bind(nn.Linear(3, 2))
    with torch.inference_mode():
        if what != "a head made there":
            act = {"bind": lambda: solver().bind(linear), "learn": lambda: bound.update(x, y)}
            return seen(act.get(what, lambda: bound.predict(x)))
        linear = nn.Linear(3, 2)
    return seen(solver().bind, linear)


def wrong_head(**options):
    """Of a model in which the last linear layer that it registers is not the last one that it calls."""
    optimizer = SepSA(Named(), torch.optim.SGD, lr=1e-2, **options)

    def loop():
        for inputs, targets in batches(2):
            optimizer.learn(inputs, targets)

    return seen(loop)


class Then(nn.Module):
    """A function after the head."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


def then(function):
    return Net(2, then=Then(function)).observe()


def loss_of(solver, outputs, targets):
    return seen(solver().bind(nn.Linear(3, outputs.shape[1])).loss, outputs, targets)


def labelled(solver):
    net = Net(1, solver and (lambda: solver))
    net.y = torch.ones(8, 1)
    return net.observe()


def of_classes(loss_fn, solver=RLS, times=2):
    return Net(2, solver).learn(y=one_hot(torch.arange(8) % 2, 2).float(), loss_fn=loss_fn, times=times)


class Ridged(torch.optim.SGD):
    def __init__(self, params, ridge, lr):
        super().__init__(params, lr=lr, weight_decay=ridge)


SOLVERS = {name: case.make for name, case in CASES.items()}
LABELS, HOT = torch.zeros(8, dtype=torch.long), torch.zeros(8, 1, dtype=torch.long)
BINARY = r'\A\nUserWarning: [^\n]*first targets of the head .2. are all 0 or 1[^\n]*solver="logistic"[^\n]*\Z'
NOT_THE_HEADS = r"differs from the output of its head '2', \(8, 2\): .* head="
LOGITS = "differs from .*remove a sigmoid or softmax and use solver='logistic' or 'cross-entropy'"
QUIET = r"\A\Z"
# What is done, and a pattern of all that is seen; a warning is seen once, in however many steps.
FURTHER = {
    "a closure without observe": (lambda: Net().forget(closure=True), r"\A\nUserWarning: .*head '2' has learned "
        r"nothing since .*`with optimizer.observe\(targets\)[^\n]*\Z"),
    "a loop that observes": (lambda: Net().observe(), QUIET),
    "a base that owns another's head": (outer_sepsa, "ValueError: .*another SepSA trains the head '2' of this "
        "model, and base would train it"),
    "a base beside another's head": (lambda: outer_sepsa(part=True), QUIET),
    "a base that owns a detached head": (lambda: outer_sepsa(detached=True), QUIET),
    "ridge for the base": (lambda: seen(Net, ridge=10.0), r"TypeError: .*ridge is a setting of the head solver and not "
        r"of SGD: .*solver=RLS\(ridge=10.0\)"),
    "two settings for the base": (lambda: seen(Net, ridge=1, forgetting=0.9), r"RLS\(forgetting=0.9, ridge=1\)"),
    "a base with a ridge of its own": (lambda: repr(Net(base=Ridged, ridge=0.5).optimizer), "weight_decay: 0.5"),
    "a frozen weight": (lambda: frozen_head("weight"), r"ValueError: .*'1.weight' has requires_grad=False.*head"
        r".requires_grad_\(True\)"),
    "a frozen bias": (lambda: frozen_head("bias"), r"'1.bias' has requires_grad=False"),
    "a model without memory": (meta_model, "head '1' is on the meta device and has no weights: load the model first"),
    "a base without frozen parameters": (lambda: partial_base(freeze=True), QUIET),
    "a relu after the head": (lambda: then(torch.relu), NOT_THE_HEADS),
    "a factor after the head": (lambda: then(lambda y: 10 * y), NOT_THE_HEADS),
    "a mean after the head": (lambda: then(lambda y: y.mean(0)), NOT_THE_HEADS),
    "a dict of something else": (lambda: then(lambda y: {"logits": y + 1, "other": y[:1]}), NOT_THE_HEADS),
    "a sigmoid": (lambda: then(torch.sigmoid), LOGITS),
    "a log_softmax": (lambda: then(lambda y: y.log_softmax(-1)), LOGITS),
    "another linear taken for the head": (wrong_head, "differs from the output of its head 'body'"),
    "the right head": (lambda: wrong_head(head="readout"), QUIET),
    "the head's output": (lambda: then(lambda y: y), QUIET),
    "its output, flat": (lambda: then(lambda y: y.flatten()), QUIET),
    "its output in another shape and dtype": (lambda: then(lambda y: y.unsqueeze(1).double()), QUIET),
    "its output in company": (lambda: then(lambda y: (y.sum(), {"logits": y})), QUIET),
    "no tensor": (lambda: then(lambda y: "no tensor"), QUIET),
    **{
        f"a squeezed output, {name}": (lambda solver=solver: Net(1, solver, nn.Flatten(0)).learn(y=torch.rand(8, 1)),
            r"ValueError: .*\(8, 1\), got outputs \(8,\) .*the model squeezed its output; .*unsqueeze")
        for name, solver in SOLVERS.items()
    },
    **{
        f"flat targets, {name}": (lambda solver=solver: loss_of(solver, torch.zeros(8, 1), torch.zeros(8)),
            r"ValueError: .*outputs \(8, 1\) and targets \(8,\): .* targets.unsqueeze\(-1\)")
        for name, solver in SOLVERS.items()
    },
    **{
        f"fewer targets, {name}": (lambda solver=solver: loss_of(solver, torch.zeros(8, 1), torch.zeros(4, 1)),
            r"ValueError: .*got outputs \(8, 1\) and targets \(4, 1\)$")
        for name, solver in SOLVERS.items()
    },
    "a loss that broadcasts": (lambda: Net(then=nn.Flatten(0)).learn(loss_fn=mse_loss), "UserWarning: Using a target "
        r"size \(torch.Size\(\[8, 1\]\)\) that is different to the input size"),
    "a loss of one shape": (
        lambda: Net(then=nn.Flatten(0)).learn(loss_fn=lambda outputs, y: mse_loss(outputs, y.view_as(outputs))), QUIET),
    "labels as numbers": (lambda: Net(1).learn(y=torch.eye(8)[:, :1]), BINARY),
    "labels as numbers, observed": (lambda: labelled(None), BINARY),
    "labels as numbers for a solver that was named": (lambda: labelled("squared"), QUIET),
    "a loss of its own": (lambda: of_classes(mse_loss), QUIET),
    "a loss of classes for classes": (lambda: of_classes(nn.CrossEntropyLoss(), SoftmaxNewton), QUIET),
    "labels for RLS": (lambda: Net(2).learn(y=LABELS), r"TypeError: .*take SepSA\(..., solver=\"cross-entropy\"\), or "
        r"for least squares .*one_hot\(targets, 2\)"),
    "labels in a column for RLS": (lambda: Net(2).learn(y=HOT), r"TypeError: .*solver=\"cross-entropy\"\) and "
        r"targets.squeeze\(1\)"),
    "labels for one output": (lambda: Net(1).learn(y=LABELS), r"TypeError: .*targets.unsqueeze\(-1\).float\(\); for "
        r"labels 0 and 1 take SepSA\(..., solver=\"logistic\"\)"),
    "labels of one output in a column": (lambda: Net(1).learn(y=LABELS[:, None]), r"TypeError: .*targets.float\(\)"
        r"; for labels 0 and 1 take SepSA\(..., solver=\"logistic\"\)"),
    "too many targets": (lambda: Net(2).learn(y=torch.ones(8, 3)), r"ValueError: targets must have shape \(8, 2\) .*"
        r"got \(8, 3\); the head is .*, Linear\(.*out_features=2.*another nn.Linear.*, SepSA\(model, base, head="),
    "too few labels": (lambda: Net(2, SoftmaxNewton).learn(y=LABELS[1:]), r"ValueError: targets must have 8 rows, as "
        r"the features, got shape \(7,\); the head is "),
    "labels in a column": (lambda: Net(2, SoftmaxNewton).learn(y=HOT), r"TypeError: .*targets.squeeze\(1\)"),
    "labels in a column for a loss": (lambda: loss_of(SoftmaxNewton, torch.zeros(8, 3), HOT), "ValueError: .*give "
        r"class labels as targets.squeeze\(1\)"),
    **{
        f"an expanded {name}": (lambda name=name: shared_memory(name),
            rf"ValueError: .*expanded {name} \(strides .*nn.Parameter\(head.{name}.detach\(\).clone")
        for name in ("weight", "bias")
    },
    "a copy of an expanded weight": (lambda: shared_memory("weight", whole=True), QUIET),
    **{
        f"{what} in inference mode, {name}": (lambda name=name, what=what: inference(SOLVERS[name], what), words)
        for name in ("RLS", "SoftmaxNewton", "LogisticNewton")
        for what, words in {
            "bind": r"RuntimeError: .*cannot bind its head inside torch.inference_mode\(\).*torch.no_grad",
            "a head made there": r"ValueError: .*a weight that was made in torch.inference_mode\(\).*head.weight = ",
            "learn": r"RuntimeError: .*cannot learn inside torch.inference_mode\(\)",
            "predict": QUIET,
        }.items()
    },
    "a ridge without digits": (lambda: seen(RLS, ridge=1e-320), "ValueError: ridge must be at least 1e-100, got "
        "1e-320: use 1e-12 for almost no regularization"),
    "unlearn of a huge row": (unlearn_a_huge_row, "ValueError: .*too few digits of the rest are left"),
    "observe in two threads at once": (two_threads_observe, "RuntimeError: .*hold a lock"),
    "a damaged checkpoint": (damaged_checkpoint, "CheckpointError: .*the checksum of tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", FURTHER)
def test_a_mistake_is_named_with_its_cure(what):
    act, words = FURTHER[what]
    told = act()
    assert re.search(words, told), told
    assert told.count("UserWarning") <= 1
    assert torch.overrides._len_torch_function_stack() == 0
