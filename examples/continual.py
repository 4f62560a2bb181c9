"""Random features and an RLS head learn classes one after the other, in one pass, without forgetting.

    python examples/continual.py

At forgetting 1 the head is the ridge regression on all samples so far, in any order: digits 0 and 1 first, then 2 and
3, ... gives the same weights as all digits mixed, and no sample is stored. A head trained by Adam knows only the last
classes.
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from sepsa import RLS

torch.manual_seed(0)
digits = load_digits()
images, labels = torch.tensor(digits.data / 8 - 1, dtype=torch.float32), torch.tensor(digits.target)
mixed = torch.randperm(len(labels))
train, test = mixed[:1300], mixed[1300:]
in_tasks = train[(labels[train] // 2).sort(stable=True).indices]  # 0 and 1, then 2 and 3, ...
body = nn.Sequential(nn.Linear(64, 1000), nn.ReLU()).requires_grad_(False)


def accuracy(head: nn.Linear) -> Tensor:
    return (head(body(images[test])).argmax(1) == labels[test]).float().mean()


start = nn.Linear(1000, 10).state_dict()
for name, order in (("mixed", train), ("task after task", in_tasks)):
    head, by_adam = nn.Linear(1000, 10), nn.Linear(1000, 10)
    head.load_state_dict(start)
    solver, adam = RLS(ridge=10.0).bind(head), torch.optim.Adam(by_adam.parameters())
    for rows in order.split(10):
        solver.update(body(images[rows]), one_hot(labels[rows], 10).float())
        cross_entropy(by_adam(body(images[rows])), labels[rows]).backward()
        adam.step()
        adam.zero_grad()
    print(f"{name}: RLS {accuracy(head):.3f}, Adam {accuracy(by_adam):.3f}")
