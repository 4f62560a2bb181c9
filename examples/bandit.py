"""Digits as a contextual bandit: see an image, pull one of ten arms, get reward 1 if the arm is the image's class.

    python examples/bandit.py

One head with an output for each arm, on random features of the image. Thompson sampling pulls the arm that is best for
weights drawn from their posterior, UCB the arm with the largest upper confidence bound; only the output of the pulled
arm learns.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from sepsa import RLS, PerOutput

ROUNDS = 600
NOISE = 0.2  # standard deviation of a reward about its mean; it sets how much is explored


def thompson(head: PerOutput[RLS], h: Tensor) -> Tensor:
    return head.sample(h, noise=NOISE)


def ucb(head: PerOutput[RLS], h: Tensor) -> Tensor:
    mean, std = head.predict(h, return_std=True, noise=NOISE)
    return mean + std


def at_random(head: PerOutput[RLS], h: Tensor) -> Tensor:
    return torch.rand(10)


digits = load_digits()
for score in (thompson, ucb, at_random):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 100), nn.ReLU()).requires_grad_(False)
    head = PerOutput(RLS(ridge=1.0, bias_ridge="ridge")).bind(nn.Linear(100, 10))
    regret = 0
    for k in torch.randperm(len(digits.target))[:ROUNDS].tolist():
        h = body(torch.tensor(digits.data[k] / 8 - 1, dtype=torch.float32))
        arm = int(score(head, h).argmax())
        rewards = torch.full((10,), torch.nan)  # not observed, except for one arm
        rewards[arm] = float(digits.target[k] == arm)
        head.update(h, rewards)
        regret += int(digits.target[k] != arm)
    print(f"{score.__name__}: {regret} of {ROUNDS} rounds without reward")
