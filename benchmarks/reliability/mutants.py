"""Which wrong versions of the source the tests notice: each mutant is one wrong line, and names the tests that find it.

    PYTHONPATH=src python benchmarks/reliability/mutants.py  # all mutants, results in mutants.json
    PYTHONPATH=src python benchmarks/reliability/mutants.py --only states/                # those whose name begins so
    PYTHONPATH=src python benchmarks/reliability/mutants.py --tree ../old --label before  # of another checkout

Each mutant is applied to a copy of the tree, and its tests run there until the first failure. A run resumes where the
last one ended, unless `--again`.
Kernels run as plain Python (tests/plain_kernels.py), so nothing is compiled for a mutant. In the end every test that
killed a mutant is run on the source as it is, where it must pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
RESULT = HERE / "mutants.json"
LIMIT = 600  # seconds for the tests of one mutant
PRELOADED = (
    "torch", "numba", "sklearn.linear_model", "pandas", "pyarrow.parquet", "scipy.signal", "pytest", "hypothesis",
    "hypothesis.extra", "river.linear_model", "river.tree", "typer",
)  # fmt: skip


class Tests(NamedTuple):
    """Files of tests, by default all tests in them; `plain` runs kernels as Python."""

    files: Sequence[str]
    chosen: str = ""  # pytest's -k
    plain: bool = False


class Mutant(NamedTuple):
    """`old` occurs once in the file and becomes `new`; the name begins with the folder."""

    name: str
    file: str
    old: str
    new: str
    tests: Tests


RLS = Tests(["tests/heads/test_rls.py"], "block_equals or forgetting_keeps or rotation")
UNLEARN = Tests(["tests/heads/test_rls.py"], "unlearn")
LARGE_ROWS = Tests(["tests/heads/test_exactness.py", "tests/heads/test_rls.py"], "large or captured or exact")
POSTERIOR = Tests(["tests/heads/test_rls.py"], "noise or covariance_of")
ROUNDED = Tests(["tests/heads/test_rls.py", "tests/heads/test_properties.py"], "any_floating or coarse")
REFUSED = Tests(
    ["tests/heads/test_rls.py", "tests/heads/test_checks.py", "tests/heads/test_properties.py"],
    "bad_samples or (test_checks and samples) or (bad and RLS)",
)
IN_LOOPS = Tests(["tests/heads/test_rls.py"], "compiled and (block_equals or forgetting_keeps or rotation)", True)
COMPILED_SET = Tests(["tests/heads/test_rls.py"], "compiled and somebody_else_set", True)
DELTA = Tests(["tests/heads/test_delta.py"])
BIAS = Tests(["tests/heads/test_bias.py"])
LBFGS = Tests(["tests/heads/test_lbfgs.py"])
SOFTMAX = Tests(["tests/heads/test_softmax.py"])
LOGISTIC = Tests(["tests/heads/test_class_evidence.py", "tests/heads/test_logistic.py"])
LARGE = Tests(["tests/heads/test_large_block.py"])
HEALTH = Tests(["tests/heads/test_health.py"])
PER_OUTPUT = Tests(["tests/heads/test_per_output.py"])
STRIDES = Tests(["tests/heads/test_exactness.py", "tests/heads/test_rls.py"], "stride", True)
UNDO = Tests(["tests/heads/test_properties.py"], "rollback or interrupts", True)
PROPERTIES = Tests(["tests/heads/test_properties.py"], "interrupts")
DAMAGED = Tests(["tests/heads/test_checks.py", "tests/breaking/test_states.py"])
OPTIMIZER = Tests(
    [f"tests/training/test_{name}.py" for name in ("optimizer", "all_or_none", "observe", "several_heads")],
    "not compile",
)
MASKS = Tests(["tests/training/test_masks.py"])
PREDICT = Tests(["tests/training/test_predict.py"], "not compiled")
ACCUMULATION = Tests(["tests/training/test_accumulation.py"])
OPERATOR = Tests(["tests/training/test_operator.py"])
CAPTURE = Tests(["tests/training/test_capture.py"])
RANKS = Tests(["tests/ranks/test_distributed.py"], "ranks_learn_as_one")
INTERRUPT = Tests(["tests/test_interrupt.py"])
SCHEMA = Tests(["tests/states/test_schema.py"])
FILES = Tests(["tests/breaking/test_files.py"])
DISK = Tests(["tests/breaking/test_outputs.py"], "second_writer or many_write")
OUTPUTS = Tests(["tests/breaking/test_outputs.py"])
SLIMTIK = Tests(["tests/reproduction/test_slimtik.py"])
ENGINE = Tests(
    ["tests/learner/test_engine.py"], "equals_sepsa or sample_weights or missing or constant or new_input", True
)
ROBUST = Tests(["tests/learner/test_robust.py"], "slow_reference or quantile or rescaled or cosines", True)
EXPERTS = Tests(
    ["tests/learner/test_experts.py"], "slow_reference or ridge_regression or newton_steps or naive_bayes", True
)
FORECAST = Tests(["tests/forecast/test_forecast.py"], "ridge_regression or seasons_are_found", True)
COMMAND = Tests(["tests/shell/test_command.py"], "truncated or numbers_texts_and_dates or categorical or every_way")
RESUME = Tests(
    ["tests/shell/test_command.py", "tests/shell/test_forecast_command.py"], "resumed or changed or last_line"
)
KEYED = Tests(["tests/interfaces/test_keyed.py"], "not killed_process")
INPUTS = Tests(
    ["tests/learner/test_inputs.py", "tests/breaking/test_states.py"],
    "missing_texts or are_encoded or (frame and first)",
)
ESTIMATORS = Tests(
    ["tests/interfaces/test_estimators.py", "tests/learner/test_robust.py", "tests/interfaces/test_river.py"],
    "absence or simplex or losses_fade",
)

MATH = "heads/least_squares/math.py"
RIDGE = "heads/base/ridge.py"
ENTROPY = "heads/cross_entropy/math.py"
QUASI = "heads/quasi_newton.py"
COMPILED = "compiled/least_squares.py"
ALGEBRA = "compiled/linear_algebra.py"
OBSERVATION, OBSERVER = "training/observation.py", "training/observer.py"
ROBUST_KERNEL = "learner/arithmetic/robust.py"
BODY = "learner/arithmetic/body.py"
HEAD = "learner/arithmetic/head.py"
TREES = "learner/experts/tree_growth.py"
NETWORK = "learner/experts/network.py"

MUTANTS = [
    Mutant("math/potter: the gain", MATH, "e_over_g = e / g", "e_over_g = e / (g + 1)", RLS),
    Mutant("math/block: no energy", MATH, "C, scale), W=W, energy=energy)", "C, scale), W=W, energy=state.energy)",
           LARGE),
    Mutant("math/gather: the energy stays", MATH, "lam * state.energy + rise", "state.energy + rise", RLS),
    Mutant("math/fade: the ridge stays", MATH, "state.ridge_left * lam)", "state.ridge_left)", RLS),
    Mutant("math/unlearn: the sign", "heads/least_squares/delta.py", "W - step", "W + step", UNLEARN),
    Mutant("math/unlearn: more than was learned", "heads/least_squares/delta.py",
           " or samples > (1 + tolerance) * seen:", ":", UNLEARN),
    Mutant("math/qr: no prior", MATH, "(scale * state.prior[:, at]).T", "(0 * state.prior[:, at]).T", LARGE_ROWS),
    Mutant("math/qr: never for float32", MATH, "return math.sqrt(PRODUCT_LIMIT)", "return 1e300", LARGE_ROWS),
    Mutant("math/ridge: too few restored", "restoration.py", "math.ceil(need)", "math.floor(need)", RLS),
    Mutant("math/ridge: away from the prior", MATH, "(state.prior[:, at] - state.W[:, at])",
           "(state.W[:, at] - state.prior[:, at])", RLS),
    Mutant("math/ridge: of the bias", RIDGE, "(0.0, _BIAS_RIDGE[dtype])", "(0.0, math.inf)", BIAS),
    Mutant("math/delta: a missing term", "heads/least_squares/delta.py", " - moved.square().sum(0)", "", DELTA),
    Mutant("math/delta: lost digits", "heads/least_squares/delta.py", "if not noise <= _LARGEST_ERROR",
           "if 0 and _LARGEST_ERROR", DELTA),
    Mutant("math/delta: the sign of the pull", "heads/least_squares/delta.py", "Phi @ W.T + E", "Phi @ W.T - E",
           DELTA),
    Mutant("math/quasi-newton: another row", QUASI, "YY[-1] = YY[:, -1]", "YY[0] = YY[:, -1]", LBFGS),
    Mutant("math/quasi-newton: the sign of M", QUASI, "held] = -gamma * inverse.T", "held] = gamma * inverse.T", LBFGS),
    Mutant("math/quasi-newton: one logit", QUASI, "return P * (1 - P) * U", "return P * U", LBFGS),
    Mutant("math/quasi-newton: the damping", QUASI, "y = y + _DELTA *", "y = y - _DELTA *", LBFGS),
    Mutant("math/softmax: weights", ENTROPY, "R = m * P - t", "R = P - t", SOFTMAX),
    Mutant("math/softmax: no inflation", ENTROPY, "tiny)).clamp(min=1)", "tiny)).clamp(max=1)", SOFTMAX),
    Mutant("math/softmax: smoothing", ENTROPY, "smoothing / C * weights", "smoothing * weights", SOFTMAX),
    Mutant("math/softmax: a label too large", ENTROPY, "((y >= 0) & (y < C)).all()", "(y >= 0).all()", SOFTMAX),
    Mutant("math/softmax: the share that fades", ENTROPY, "state.shares + (1 - lam) + U", "state.shares + U", SOFTMAX),
    Mutant("math/softmax: a large block twice", ENTROPY, "A=block.old + block.M", "A=block.old + 2 * block.M", SOFTMAX),
    Mutant("math/softmax: another ridge", ENTROPY, "ridge_left=ridge * share", "ridge_left=ridge", LOGISTIC),
    Mutant("backends/compiled: the root", ALGEBRA, "-1.0 / (g + math.sqrt(g))", "-1.0 / (g + 1.0)", IN_LOOPS),
    Mutant("backends/compiled: a missing term", COMPILED, "energy[o] += q * pull * pull", "pass", IN_LOOPS),
    Mutant("backends/compiled: a swapped index", ALGEBRA, "x[j] -= C[i, j] * c", "x[j] -= C[j, i] * c", IN_LOOPS),
    Mutant("backends/compiled: the cursor stays", COMPILED, "cursor = restored_coordinate(cursor, count, p)",
           "cursor = cursor % p", IN_LOOPS),
    Mutant("backends/compiled: a head that overflows", COMPILED, "if not abs(rounded(W[o, j], single)) < np.inf:",
           "if False:",
           Tests(["tests/heads/test_properties.py"], "RLS and cannot_hold", True)),
    Mutant("backends/compiled: the bias", COMPILED, "read(bias, single, new_W[:, k:])",
           "copy_rows(W[:, k:], new_W[:, k:])", COMPILED_SET),
    Mutant("backends/compiled: strides", "heads/least_squares/compiled.py", "and tensor.is_contiguous()", "",
           STRIDES),
    Mutant("backends/compiled: the snapshot", "heads/least_squares/compiled.py", "self.weight.copy()",
           "self.weight", UNDO),
    Mutant("backends/large: residuals", "heads/least_squares/large_block.py", "padding)) * lam**0.5",
           "padding))", LARGE),
    Mutant("backends/large: energy", "heads/least_squares/large_block.py", "lam * state.energy + new",
           "state.energy + new",
           LARGE),
    Mutant("base/health: dead features", "heads/base/health.py", "ridge_left > 1 - 1e-9", "ridge_left < 1 - 1e-9",
           HEALTH),
    Mutant("base/partial: weight 0", "heads/base/partial_targets.py", "~missing & (weight > 0)", "~missing",
           PER_OUTPUT),
    Mutant("base/partial: the best", "heads/base/partial_targets.py", "(min if key in", "(max if key in", PER_OUTPUT),
    Mutant("base/states: a singular root", "heads/base/state_checks.py", "bool(torch.linalg.lu_factor_ex(",
           "False and bool(torch.linalg.lu_factor_ex(", Tests(["tests/heads/test_checks.py"])),
    Mutant("base/states: the ridge", "heads/least_squares/state.py", "if not bool((left > 0).all()):", "if False:",
           DAMAGED),
    Mutant("base/states: H without pending", "heads/least_squares/state.py",
           "if (pending == 0) != (H is None):", "if False:", DAMAGED),
    Mutant("base/states: shares", "heads/cross_entropy/newton.py", "if not bool((saved[key] > 0).all()):", "if False:",
           DAMAGED),
    Mutant("base/follow: rounding", "heads/base/parameters.py",
           "return W + (held.to(W.dtype) - W.to(held.dtype).to(W.dtype))", "return held.to(W.dtype)", ROUNDED),
    Mutant("base/commit: an interrupt", "heads/base/parameters.py", "    except BaseException:\n        write()\n",
           "    except BaseException:\n", PROPERTIES),
    Mutant("posterior: the noise", "heads/least_squares/rls.py", "spread = 1 + (Phi", "spread = (Phi", POSTERIOR),
    Mutant("posterior: a transpose", "heads/least_squares/rls.py", "(normal @ T)", "(normal @ T.T)", POSTERIOR),
    Mutant("base/checks: no samples", "heads/base/checks.py", "if 0 in shape:", "if False:", REFUSED),
    Mutant("base/checks: negative weights", "heads/base/checks.py",
           "if not bool(((sample_weight >= 0) & (sample_weight < math.inf)).all()):",
           "if not bool((sample_weight < math.inf).all()):", REFUSED),
    Mutant("base/delta: another prior", "heads/least_squares/delta.py",
           " or not torch.equal(delta.prior, initial.cpu()):", ":", DELTA),
    Mutant("training/observer: a lost lock", OBSERVER, " or now.thread != get_ident() else now", " else now",
           OPTIMIZER),
    Mutant("training/observation: twice", OBSERVATION, "if self.learned:", "if False:", OPTIMIZER),
    Mutant("training/observer: a body that moved", OBSERVER, "if self.body_steps != checkpoint.counters[0]:",
           "if False:", OPTIMIZER),
    Mutant("training/observer: statistics", OBSERVER, "buffer.copy_(before)", "pass", OPTIMIZER),
    Mutant("training/epochs: forgets again", "training/epochs.py", "solver.forgets = not self.forgot",
           "solver.forgets = True", ACCUMULATION),
    Mutant("training/observation: rows left out", OBSERVATION,
           "self.observed.nonzero()[:, 0]", "torch.arange(len(flat))", MASKS),
    Mutant("training/observation: a copy of the head", OBSERVATION, "copy.copy_(parameter.detach())", "pass", OPERATOR),
    Mutant("training/observation: the mean", "training/observation.py",
           "weighted_mean(each, weight.reshape(n).to(each.dtype))", "(weight.reshape(n) * each).sum() / n", MASKS),
    Mutant("training/observation: stays frozen", OBSERVATION, "parameter.requires_grad = True", "pass",
           OPTIMIZER),
    Mutant("training/rows: any negative label", "training/rows.py", "else each == IGNORE_INDEX", "else each < 0",
           MASKS),
    Mutant("training/rows: in part", "training/rows.py", "if bool(some.any()):", "if False:", MASKS),
    Mutant("training/prediction: modes", "training/prediction.py", "module.training = mode", "pass", PREDICT),
    Mutant("training/prediction: a lost lock", "training/prediction.py", "if now is not None and switch:",
           "if False:", PREDICT),
    Mutant("training/prediction: what follows", "training/prediction.py",
           " and torch.equal(output.reshape(-1), given.to(output).reshape(-1))", "", PREDICT),
    Mutant("training/ranks: no common start", "training/ranks.py", "if self.started:", "if True:", RANKS),
    Mutant("states/schema: infinite", "states/schema.py", "high: float = LARGEST_FLOAT) -> float:",
           "high: float = math.inf) -> float:", SCHEMA),
    Mutant("states/schema: the dtype", "states/schema.py", "if value.dtype != dtype or not (", "if not (", SCHEMA),
    Mutant("states/schema: a bool", "states/schema.py", "if isinstance(value, bool) or not isinstance(value, (int",
           "if not isinstance(value, (int", SCHEMA),
    Mutant("states/file: the checksum", "states/file.py", 'if zlib.crc32(raw) != entry["crc32"]:', "if False:", FILES),
    Mutant("states/file: a lost lock", "states/file.py", "fcntl.LOCK_EX | fcntl.LOCK_NB",
           "fcntl.LOCK_SH | fcntl.LOCK_NB", DISK),
    Mutant("states/file: a tensor without a name", "states/file.py", "if decoded.tensors:", "if False:", FILES),
    Mutant("states/output: permissions", "states/output.py", "os.fchmod(descriptor, stat.S_IMODE(old.st_mode))", "pass",
           OUTPUTS),
    Mutant("training/saved: negative squares", "training/saved.py",
           "0.0 if name in _NOT_NEGATIVE else -math.inf", "-math.inf",
           Tests(["tests/breaking/test_states.py"])),
    Mutant("states/sealed: a changed entry", "states/sealed.py", "if new.integer(CHECKSUM) != told:", "if False:",
           Tests(["tests/interfaces/test_delayed.py"], "damaged")),
    Mutant("interrupt: forgotten", "interrupt.py", "self.handler(SIGINT, frame)", "pass", INTERRUPT),
    Mutant("interrupt: the second one waits", "interrupt.py", "            self.handler(number, frame)",
           "            pass", INTERRUPT),
    Mutant("optimizer: no way back", "training/observation.py", "self.observer.rollback(self.before, self.reached)",
           "pass", OPTIMIZER),
    Mutant("optimizer: the head in a group", "training/optimizer.py",
           "        refuse_heads(self.model, self.heads, [given] if isinstance(given, Tensor) else list(given))\n", "",
           OPTIMIZER),
    Mutant("states/objects: one head of several", "states/objects.py", "load_into(objects[key], before[key])", "pass",
           OPTIMIZER),
    Mutant("capture: rows", "training/capture.py", "self(inputs[rows], targets[rows])",
           "self(inputs[rows], targets[: len(rows)])", CAPTURE),
    Mutant("capture: two devices", "training/capture.py", "if inputs.device != targets.device:", "if False:", CAPTURE),
    Mutant("slimtik: the sign", "reproduction/slimtik.py", "(EV * S - lam * WU)", "(EV * S + lam * WU)", SLIMTIK),
    Mutant("slimtik: across", "reproduction/slimtik.py", "s -= (lam / tau)", "s += (lam / tau)", SLIMTIK),
    Mutant("slimtik: a bound", "reproduction/slimtik.py", "{-1: total / 2 - bounds[0]", "{-1: total - bounds[0]",
           SLIMTIK),
    Mutant("slimtik: the memory", "reproduction/slimtik.py", "Z)[-self.memory :]", "Z)[-self.memory - 1 :]", SLIMTIK),
    Mutant("stream/engine: huber", ROBUST_KERNEL, "ratio * min(1.0, 4.0 * ratio)", "ratio", ROBUST),
    Mutant("stream/engine: an unlikely run", ROBUST_KERNEL, "unlikely / 3.0", "unlikely", ROBUST),
    Mutant("stream/engine: mostly exact targets", ROBUST_KERNEL, "max(error[k, 0], 0.25 * error[k, 1])",
           "error[k, 0]", ROBUST),
    Mutant("stream/engine: a rescaled column", NETWORK, "U[c * (c - 1) // 2 + r] *= up",
           "U[c * (c - 1) // 2 + r] *= down", ROBUST),
    Mutant("stream/engine: a heavy weight", ROBUST_KERNEL, "max(usual, heavy * (heavy / weight))",
           "heavy", ROBUST),
    Mutant("stream/engine: no slope", BODY, "delta[i] *= slopes_here[i]", "delta[i] *= 1.0", ENGINE),
    Mutant("stream/engine: adam", BODY, "real(1.0 / math.sqrt(1.0 - counts.beta2_power))", "real(1.0)", ENGINE),
    Mutant("stream/engine: the last input", BODY, "while j < width:", "while j < width - 1:", ENGINE),
    Mutant("stream/engine: a missing value", BODY, "if scale == 0.0 or x != x:", "if scale == 0.0:", ENGINE),
    Mutant("stream/engine: a swapped index", HEAD, "u31 * phi[j + 1] + u32", "u31 * phi[j + 2] + u32", ENGINE),
    Mutant("stream/engine: restored in part", NETWORK, "ridge_left[j] = numbers.ridge",
           "ridge_left[j] = 0.9 * numbers.ridge", ENGINE),
    Mutant("stream/engine: the worst head", "learner/arithmetic/candidates.py",
           "math.exp(-strength", "math.exp(0.1 * strength",
           ROBUST),
    Mutant("stream/experts: a split", TREES, "n_left + SHRINK, n - n_left + SHRINK", "n_left + SHRINK, n - n_left",
           EXPERTS),
    Mutant("stream/experts: few rows", TREES, " and n_left >= least and n - n_left >= least:", ":", EXPERTS),
    Mutant("stream/experts: a leaf", TREES, "counts[leaf] = SHRINK", "counts[leaf] = 1e-9",
           EXPERTS),
    Mutant("stream/experts: weights of neighbours", "learner/experts/neighbours.py", "weight = weights[places[i]] /",
           "weight = 1.0 /", EXPERTS),
    Mutant("stream/experts: a nearest one lost", "learner/experts/neighbours.py",
           "minima(keys[lane::LANES], lanes[lane : lane + 1])", "pass", EXPERTS),
    Mutant("stream/experts: bayes", "learner/experts/bayes.py", "share * before * off * off", "share * off * off",
           EXPERTS),
    Mutant("stream/experts: logistic", "learner/experts/logistic.py", "omega * h, b)", "h, b)", EXPERTS),
    Mutant("stream/experts: products", "learner/experts/products.py", "z[pairs[j]] * z[pairs[i]]",
           "z[pairs[j]] * z[pairs[j]]", EXPERTS),
    Mutant("stream/forecast: forgetting", "forecast/kernels/heads.py", "D[n] /= forgetting", "D[n] /= 1.0",
           FORECAST),
    Mutant("stream/forecast: seasons", "forecast/seasons.py", " if correlation[k] >= 0.75 * highest)", ")",
           FORECAST),
    Mutant("stream/tables: a doubled quote", "shell/records.py", "delimiter=separator)",
           "delimiter=separator, doublequote=False)", Tests(["tests/breaking/test_rows.py"], "fuzzed_table")),
    Mutant("stream/tables: a changed table", "shell/records.py",
           'if mark(self._last[len(self._last) - position["tail"][0] :]) != position["tail"]:', "if False:", RESUME),
    Mutant("stream/tables: a last line", "shell/records.py",
           'if self._last[-1:] not in (b"", b"\\r", b"\\n"):', "if False:", RESUME),
    Mutant("stream/tables: a truncated file", "shell/source.py", "(OSError, EOFError, zlib.error)",
           "(OSError, zlib.error)", COMMAND),
    Mutant("stream/tables: a comma", "shell/reading.py", "',\"\\r\\n'", "'\"\\r\\n'", COMMAND),
    Mutant("stream/tables: written twice", "shell/output.py", "        self._file.truncate()\n", "", RESUME),
    Mutant("stream/keyed: a lost lock", "interfaces/keyed.py", "locking_mode = EXCLUSIVE", "locking_mode = NORMAL",
           KEYED),
    Mutant("stream/keyed: an evicted learner", "interfaces/keyed.py", "self._write(self._changed & {oldest})", "pass",
           KEYED),
    Mutant("stream/keyed: the order of rows", "interfaces/keyed.py", "results[np.argsort(order)]", "results[order]",
           KEYED),
    Mutant("stream/keyed: a full disk", "interfaces/keyed.py", "if not self._file.in_transaction:", "if False:", KEYED),
    Mutant("stream/keyed: another learner", "interfaces/keyed.py",
           'if common["settings"] != self._settings:', "if False:", KEYED),
    Mutant("stream/columns: no text", "learner/columns/inputs.py", "in column.texts), -1])", "in column.texts), 0])",
           INPUTS),
    Mutant("stream/columns: the weekday", "learner/columns/inputs.py", "(days + 3) % 7", "(days + 4) % 7", INPUTS),
    Mutant("stream/columns: a missing category", "learner/columns/reader.py", '(categorical and kind != "missing")',
           "categorical", Tests(["tests/shell/test_reader.py"], "category")),
    Mutant("stream: an input one row late", "learner/learner.py", "new.row <= start for", "new.row < start for",
           INPUTS),
    Mutant("stream: indicators", "learner/scales.py", "share < 0.1", "share < 0.9", ESTIMATORS),
    Mutant("stream: the simplex", "learner/calibration.py", "np.maximum(scores - tau, 0.0)", "np.abs(scores - tau)",
           ESTIMATORS),
    Mutant("stream: forgotten losses", "learner/calibration.py", "[1.0, -forgetting]", "[1.0, -1.0]", ESTIMATORS),
]  # fmt: skip


def folder_of(mutant: Mutant) -> str:
    """The folder under which the result counts: of heads/ and stream/ two parts of the path."""
    parts = Path(mutant.file).parent.parts
    return "/".join(parts[:2]) if parts else "sepsa"


class Tree:
    """A copy of a checkout, in which one file at a time is changed."""

    def __init__(self, source: Path, folder: Path) -> None:
        ignored = shutil.ignore_patterns(".git", ".venv", "*.pyc", ".mypy_cache", ".ruff_cache", "site", "results")
        if not folder.exists():
            shutil.copytree(source, folder, ignore=ignored, symlinks=True)
        self.folder = folder

    def path(self, mutant: Mutant) -> Path:
        """The file of the package, or of the paper's experiments beside it."""
        return self.folder / ("" if mutant.file.startswith("reproduction/") else "src/sepsa") / mutant.file

    def misfit(self, mutant: Mutant) -> str:
        """Why the mutant cannot be applied, or nothing."""
        path = self.path(mutant)
        if not path.is_file():
            return f"{mutant.name}: there is no {mutant.file}"
        count = path.read_text(encoding="utf-8").count(mutant.old)
        return "" if count == 1 else f"{mutant.name}: {mutant.old!r} is in {mutant.file} {count} times, not once"

    def killer(self, mutant: Mutant, known: Sequence[str]) -> dict[str, Any]:
        """The first test that fails with the mutant; `known` tests, which have killed it before, come first."""
        path = self.path(mutant)
        text, times = path.read_text(encoding="utf-8"), path.stat()
        try:
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            for test in known:
                if (self.folder / test.partition("::")[0]).is_file():
                    result = self.run(Tests([test], plain=mutant.tests.plain))
                    if result["killed by"] == test:
                        return result
            return self.run(mutant.tests)
        finally:
            path.write_text(text, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def run(self, tests: Tests) -> dict[str, Any]:
        """Run tests in a fork of this process, which has imported other packages already."""
        started = time.monotonic()
        with tempfile.NamedTemporaryFile("r") as told:
            child = os.fork()
            if child == 0:
                os.setsid()
                self.attend(tests, told.name)
            try:
                while not os.waitpid(child, os.WNOHANG)[0]:
                    if time.monotonic() - started > LIMIT:
                        return {"killed by": "the limit of time", "seconds": LIMIT}
                    time.sleep(0.1)
                written = told.read()
            finally:
                with_group(child)
        result = json.loads(written) if written else {"killed by": "a crash of the process"}
        return result | {"seconds": round(time.monotonic() - started, 1)}

    def attend(self, tests: Tests, told: str) -> None:
        """In the child: run pytest, and write which test failed first."""
        quiet = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        os.chdir(self.folder)
        sources = [str(self.folder / "src"), str(self.folder)]
        sys.path[:0] = sources
        os.environ.update(PYTHONPATH=os.pathsep.join(sources), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        sys.dont_write_bytecode = True
        import pytest

        seen = Seen()
        files = [file for file in tests.files if "::" in file or Path(file).exists()]
        plain = ["-p", "plain_kernels"] if tests.plain else []
        options = [*plain, "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        code = pytest.main([*files, *options, *(["-k", tests.chosen] if tests.chosen else [])], plugins=[seen])
        if code not in (0, 1) and seen.failed is None:
            seen.failed = f"an error of the collection ({int(code)})"
        Path(told).write_text(json.dumps({"killed by": seen.failed, "tests run": seen.count}))
        os._exit(0)


class Seen:
    """A plugin of pytest that keeps the first failure."""

    failed: str | None = None
    count = 0

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        settings.register_profile("no shrinking", phases=(Phase.explicit, Phase.generate), database=None)
        settings.load_profile("no shrinking")

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.count += report.when == "call"
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = f"{report.nodeid} (when it was collected)"


def with_group(child: int) -> None:
    """End the processes that a test has left."""
    try:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def table(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Killed of all mutants for each folder and label."""
    counts: dict[str, dict[str, str]] = {}
    for label, found in results.items():
        for folder in (*sorted({folder_of(mutant) for mutant in MUTANTS}), "all"):
            tested = [found[m.name] for m in MUTANTS if m.name in found and folder in (folder_of(m), "all")]
            killed = sum(result["killed by"] is not None for result in tested)
            counts.setdefault(folder, {})[label] = f"{killed} of {len(tested)}"
    return counts


def killers(mutant: Mutant, results: dict[str, dict[str, Any]]) -> list[str]:
    """The tests that have killed a mutant before."""
    known = {result[mutant.name]["killed by"] for result in results.values() if mutant.name in result}
    return sorted(test for test in known if test and "::" in test)


def judge(work: tuple[Mutant, list[str], Path, Path]) -> tuple[str, dict[str, Any]]:
    """The result of a mutant, in the copy of the tree that this process has."""
    mutant, known, source, folder = work
    tree = Tree(source, folder / f"tree {os.getpid()}")
    return mutant.name, {"file": mutant.file} | tree.killer(mutant, known)


def verify(tree: Tree, found: dict[str, Any]) -> list[str]:
    """The tests among those that killed mutants that fail on the source as it is."""
    wrong = []
    for plain in (False, True):
        killers = {found[m.name]["killed by"] for m in MUTANTS if m.name in found and m.tests.plain is plain}
        left = sorted(k for k in killers if k and "::" in k and "(" not in k.partition("[")[0])
        while left:
            result = tree.run(Tests(left, plain=plain))
            if result["killed by"] is None:
                break
            wrong.append(result["killed by"])
            left = [k for k in left if k != result["killed by"]]
            if result["killed by"] not in killers:
                break
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE.parents[1], help="the checkout to test")
    parser.add_argument("--label", default="after", help="under which name the results are kept")
    parser.add_argument("--only", nargs="+", default=[""], help="mutants whose names begin so")
    parser.add_argument("--again", action="store_true", help="test mutants again that have a result")
    parser.add_argument("--jobs", type=int, default=1, help="how many mutants at a time, each in its own copy")
    parser.add_argument("--check", action="store_true", help="only see whether every mutant fits the source")
    options = parser.parse_args()
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names), "names of mutants must differ"
    kept: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    results: dict[str, dict[str, Any]] = kept.get("mutants", {})
    found = results.setdefault(options.label, {})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(options.tree.resolve(), Path(folder, "tree"))
        misfits = {mutant.name: why for mutant in MUTANTS if (why := tree.misfit(mutant))}
        print(*misfits.values(), f"{len(MUTANTS) - len(misfits)} of {len(MUTANTS)} mutants fit", sep="\n", flush=True)
        if options.check:
            return
        for module in PRELOADED:
            with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
                __import__(module)
        wanted = [m for m in MUTANTS if m.name not in misfits and m.name.startswith(tuple(options.only))]
        wanted = [mutant for mutant in wanted if mutant.name not in found or options.again]
        work = [(m, killers(m, results), tree.folder, Path(folder)) for m in wanted]
        with get_context("fork").Pool(options.jobs) as pool:
            for name, result in pool.imap_unordered(judge, work):
                found[name] = result
                print(f"{name}: {result['killed by'] or 'SURVIVED'}", flush=True)
                save(kept, results)
        wrong = verify(tree, found)
    save(kept, results)
    for name in wrong:
        print(f"{name} fails without a mutant too")
    killed = sum(result["killed by"] is not None for result in found.values())
    print(f"{len(found)} mutants, {killed} killed")


def save(kept: dict[str, Any], results: dict[str, dict[str, Any]]) -> None:
    RESULT.write_text(json.dumps(kept | {"by folder": table(results), "mutants": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
