"""The check of the theorem: the truth it compares with is true, and the method comes to it."""

import json

import numpy as np
import pytest
import torch
from rich.console import Console

from reproduction import convergence
from reproduction.convergence import APART, OVERLAPPING, Realization


def test_the_gap_is_the_risk_less_that_of_the_noise():
    x, body, head = convergence.optimum(APART)
    y = head(body(x)).detach()
    with torch.no_grad():
        body.places += 0.1
        outputs = head(body(x))
        risk = sum(convergence.half_square(outputs, y + sign * convergence.NOISE).item() for sign in (-1, 1)) / 2
        gap = convergence.half_square(outputs, y).item()
    assert gap == pytest.approx(risk - convergence.NOISE**2 / 2)


@pytest.mark.parametrize("spacing", [APART, OVERLAPPING])
def test_kappa_is_that_of_the_true_hessian(spacing):
    x, body, head = convergence.optimum(spacing)
    model = torch.nn.Sequential(body, head)
    y = model(x).detach()
    p = convergence.BUMPS + 1

    def risk(w):
        weights = {"1.weight": w[None, : p - 1], "1.bias": w[p - 1 : p], "0.places": w[p:]}
        return convergence.half_square(torch.func.functional_call(model, weights, (x,)), y)

    best = torch.cat([head.weight[0], head.bias, body.places]).detach()
    H = torch.autograd.functional.hessian(risk, best)
    scale = torch.block_diag(torch.linalg.inv(H[:p, :p]), convergence.D * torch.eye(p - 1, dtype=H.dtype))
    smallest = torch.linalg.eigvals(scale @ H).real.min().item()
    assert convergence.kappa(spacing) == pytest.approx(smallest, rel=1e-6)
    assert (smallest > 0.5) == (spacing == APART)


def test_the_gradient_vanishes():
    norms, gaps = convergence.follow(Realization(APART, 600, 0))
    assert len(norms) == len(convergence.marks(600))
    assert norms[-1] < norms[0] / 10
    assert gaps[-1] < gaps[0] / 100
    assert min(gaps) > 0
    assert (norms, gaps) == convergence.follow(Realization(APART, 600, 0))


def test_slopes_are_found_again():
    k = np.array(convergence.marks(10_000), dtype=float)
    noise = np.random.default_rng(0).lognormal(0, 0.3, (40, len(k)))
    middle, low, high = convergence.slope(k, 5 / k * noise)
    assert low < -1.0 < high
    assert middle == pytest.approx(-1.0, abs=0.05)
    assert high - low < 0.2


def test_the_file_holds_what_the_report_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(convergence, "QUICK_STEPS", 60)
    monkeypatch.setattr(convergence, "QUICK_SEEDS", 2)
    monkeypatch.setattr(convergence, "HEAD_SIZES", (4, 8))
    monkeypatch.setattr(convergence, "BODY_INPUTS", (2, 4))
    console = Console(quiet=True)
    convergence.run(tmp_path, 1, True, console)
    file = tmp_path / "convergence.json"
    found = json.loads(file.read_text())
    for part in (found, found["overlapping"]):
        for name in ("gradient_norm", "objective_gap"):
            assert len(part[name]["mean"]) == len(part[name]["low"]) == len(part[name]["high"]) == len(part["k"])
        assert set(part["slope"]) == {"gradient", "objective"}
        assert part["slope"]["gradient"][1] <= part["slope"]["gradient"][0] <= part["slope"]["gradient"][2]
    assert found["seeds"] == 2
    assert [row["p"] for row in found["cost"]["p"]] == [4, 8]
    assert [row["q"] for row in found["cost"]["q"]] == [147, 245]
    before = file.stat().st_mtime_ns
    convergence.run(tmp_path, 1, True, console)
    assert file.stat().st_mtime_ns == before
