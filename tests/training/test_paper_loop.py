"""SepSA follows the paper's loop, written independently in reference.py, step for step."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.functional import mse_loss

from reference import PaperLoop
from sepsa import RLS, SepSA


def diabetes():
    X, y = load_diabetes(return_X_y=True)
    return (X - X.mean(0)) / X.std(0), y[:, None]


@pytest.mark.parametrize("lr", [1e-2, 1e-3, 1e-4])
def test_online_on_diabetes_in_float64(lr):
    X, Y = diabetes()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Linear(50, 1)).double()
    head = torch.cat([model[2].weight, model[2].bias[:, None]], 1).detach().numpy().T
    loop = PaperLoop(model[0].weight.detach().numpy(), model[0].bias.detach().numpy(), head, lr, 1e-5)
    optimizer = SepSA(model, torch.optim.Adam, solver=RLS(bias_ridge="ridge"), lr=lr, weight_decay=1e-5)
    for k in np.random.default_rng(0).permutation(len(X)):
        x, y = torch.as_tensor(X[k : k + 1]), torch.as_tensor(Y[k : k + 1])
        with optimizer.observe(y):
            loss = mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        truth = loop.step(X[k], Y[k])
        # The error left after a Newton step can be tiny beside the target it comes from.
        assert loss.item() == pytest.approx(truth, rel=1e-8, abs=1e-8 * float(Y[k, 0]) ** 2)
        np.testing.assert_allclose(model[0].weight.detach(), loop.U, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(model[0].bias.detach(), loop.c, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(model[2].weight.detach()[0], loop.alpha[:-1, 0], rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(model[2].bias.detach()[0], loop.alpha[-1, 0], rtol=1e-8, atol=1e-8)
