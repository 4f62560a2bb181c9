"""What looks like a mistake and is none: other dtypes, numbers of NumPy, a model without its optimizer, a log."""

from __future__ import annotations

import pickle
import subprocess

import numpy as np
import pytest
import torch
from torch import nn

import sepsa
from sepsa import RLS, OnlineLBFGS, SelfTuning, SepSA, SoftmaxNewton


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))


def batch(n=8, seed=1):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=g), torch.randn(n, 2, generator=g)


@pytest.mark.parametrize("base", [torch.optim.Adam, torch.optim.RMSprop])
def test_another_dtype_in_mid_run_is_followed(base):
    model, twin = network(), network()
    optimizer, other = (SepSA(m, base, lr=1e-2) for m in (model, twin))
    for k in range(3):
        optimizer.learn(*batch(seed=k))
        other.learn(*batch(seed=k))
    model.double()
    for k in range(3, 6):
        inputs, targets = batch(seed=k)
        optimizer.learn(inputs.double(), targets.double())
        other.learn(inputs, targets)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.dtype == torch.float64
        torch.testing.assert_close(p.float(), q, rtol=1e-4, atol=1e-5)


def test_numpy_numbers_are_numbers(tmp_path):
    def build():
        base = {"lr": np.float32(0.125), "momentum": np.float64(0.5), "nesterov": np.True_}
        return SepSA(network(), torch.optim.SGD, solver=RLS(ridge=np.float32(2), forgetting=np.float16(0.5)), **base)

    optimizer = build()
    optimizer.head_fraction = np.float32(0.5)
    optimizer.param_groups[0]["lr"] = np.float32(0.25)  # as a scheduler may set it
    optimizer.learn(*batch())
    path = tmp_path / "checkpoint.sepsa"
    sepsa.save(optimizer, path, keep=np.int64(2))
    loaded = sepsa.load(path, into=build())
    assert loaded.solver.ridge == 2
    assert loaded.solver.forgetting == 0.5
    assert loaded.head_fraction == 0.5
    assert loaded.param_groups[0]["lr"] == 0.25
    assert OnlineLBFGS(memory=np.int32(3)).memory == 3
    assert SoftmaxNewton(label_smoothing=np.float32(0.5)).label_smoothing == 0.5


# ---------------------------------------------------------------------- detach


@pytest.mark.parametrize("solver", [RLS, lambda: SelfTuning.of(RLS, forgetting=1.0)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of its TorchScript and its compiler
def test_a_detached_model_is_free_of_us(solver, tmp_path):
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2, solver=solver())
    optimizer.learn(*batch())
    free = optimizer.detach()
    assert b"sepsa" not in pickle.dumps(model)
    inputs = batch()[0]
    torch.testing.assert_close(torch.jit.script(model)(inputs), model(inputs))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(inputs), model(inputs))
    with pytest.raises(RuntimeError, match=r"no longer trains the head '2': .* or detach\(\) was called"):
        optimizer.learn(*batch())
    with free:  # and back again
        pass
    optimizer.learn(*batch())
    with optimizer.detach():
        saved = pickle.dumps(model)
    assert b"sepsa" not in saved
    optimizer.learn(*batch())
    assert optimizer.solver.steps == 3
    assert b"sepsa" in pickle.dumps(model)


def test_a_detached_model_loads_where_sepsa_is_not_installed(tmp_path, preloaded_bin):
    model = network()
    optimizer = SepSA(model, torch.optim.SGD, lr=1e-2)
    optimizer.learn(*batch())
    optimizer.detach()
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys; sys.modules['sepsa'] = None\nimport torch\n"
        f"print(torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.ones(1, 6)).tolist())"
    )
    done = subprocess.run([preloaded_bin / "python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(model(torch.ones(1, 6)).tolist())
