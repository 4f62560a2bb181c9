"""Digits as a contextual bandit: an image comes, one of ten arms is pulled, reward 1 if it is the image's class.

    python examples/bandit.py

One RLS head for each arm on random features of the image. Thompson sampling pulls the arm that is best by heads drawn
from their posteriors, UCB the one that could be best; only the head of the pulled arm learns.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from sepsa import RLS

NOISE = 0.2  # of a reward about its head: how much is explored


def thompson(heads: list[RLS], h: Tensor) -> Tensor:
    return torch.cat([head.sample(h, noise=NOISE) for head in heads])


def ucb(heads: list[RLS], h: Tensor) -> Tensor:
    return torch.cat([mean + std for mean, std in (head.predict(h, return_std=True, noise=NOISE) for head in heads)])


def at_random(heads: list[RLS], h: Tensor) -> Tensor:
    return torch.rand(len(heads))


digits = load_digits()
for score in (thompson, ucb, at_random):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 200), nn.ReLU()).requires_grad_(False)
    heads = [RLS(ridge=1.0).bind(nn.Linear(200, 1)) for _ in range(10)]
    regret = 0
    for k in torch.randperm(len(digits.target)).tolist():
        h = body(torch.tensor(digits.data[k] / 8 - 1, dtype=torch.float32))
        arm = int(score(heads, h).argmax())
        reward = float(digits.target[k] == arm)
        heads[arm].update(h, torch.tensor([reward]))
        regret += 1 - int(reward)
    print(f"{score.__name__}: {regret} of {len(digits.target)} rounds without reward")
