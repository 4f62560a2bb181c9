"""The page to play with (docs/play.md) computes what the library computes: 50 steps in a browser against Python."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sepsa import RLS, SepSA

SCRIPT = Path(__file__).parents[1] / "docs" / "play" / "play.js"
SEED = 2026
GRID = torch.tensor([[-1.0], [-0.5], [0.0], [0.5], [1.0]], dtype=torch.float64)


def network() -> nn.Sequential:
    """The network of the page: its numbers come from the linear congruential generator of play.js."""
    state = SEED

    def draw() -> float:
        nonlocal state
        state = 48271 * state % 2147483647
        return 2 * state / 2147483647 - 1

    parameters = []
    for j in range(12):
        slope = 4 + 2 * draw()
        parameters.append([slope, -slope * ((2 * j + 1) / 12 - 1 + 0.1 * draw()), 0.3 * draw()])
    drawn = torch.tensor(parameters, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    with torch.no_grad():
        model[0].weight.copy_(drawn[:, :1])
        model[0].bias.copy_(drawn[:, 1])
        model[2].weight.copy_(drawn[:, 2:].T)
        model[2].bias.zero_()
    return model


def traced(samples, rate, ridge, forgetting):
    """What `trace` of play.js returns, by the library."""
    plain, ours = network(), network()
    adam = torch.optim.Adam(plain.parameters(), lr=rate)
    optimizer = SepSA(ours, torch.optim.Adam, solver=RLS(ridge=ridge, forgetting=forgetting), lr=rate)
    rows = []
    for x, y in torch.tensor(samples, dtype=torch.float64)[:, :, None, None].unbind():
        adam.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        adam.step()
        optimizer.learn(x, y)
        mean, std = optimizer.predict(GRID, return_std=True)
        rows.append({"adam": plain(GRID)[:, 0].tolist(), "sepsa": mean[:, 0].tolist(), "deviation": std[:, 0].tolist()})
    return rows


@pytest.mark.parametrize(("ridge", "forgetting"), [(0.1, 1.0), (1.0, 0.95)])
def test_the_page_computes_what_the_library_computes(tmp_path, ridge, forgetting):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine, in which the page is run")
    rng = np.random.default_rng(0)
    samples = [[x, float(np.sin(4 * x))] for x in rng.uniform(-1, 1, 50).tolist()]
    settings = {"seed": SEED, "rate": 0.01, "ridge": ridge, "forgetting": forgetting}
    page = tmp_path / "check.html"
    page.write_text(
        f"<pre id=out></pre><script>{SCRIPT.read_text()}</script><script>"
        f"out.textContent = JSON.stringify(trace({json.dumps(samples)}, {json.dumps(settings)}))</script>"
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    told = subprocess.run([browser, *options, page.as_uri()], capture_output=True, text=True, check=True).stdout
    shown = json.loads(html.unescape(re.search(r"<pre id=\"?out\"?>(.*?)</pre>", told, re.DOTALL)[1]))
    for here, there in zip(traced(samples, 0.01, ridge, forgetting), shown, strict=True):
        for name, values in here.items():
            # Relative to the predictions, which are about 1: both sides are float64, and 50 steps of Adam multiply the
            # last digit by far less than a million.
            np.testing.assert_allclose(there[name], values, rtol=1e-6, atol=1e-6, err_msg=name)
