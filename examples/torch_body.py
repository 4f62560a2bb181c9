"""A torch body under SepSA behind scikit-learn's partial_fit and River's learn_one: forty lines to copy and change.

python examples/torch_body.py
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_digits
from torch import nn

from sepsa import RLS, SepSA


class TorchClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A model that ends in an `nn.Linear` with an output for each of `classes`, learned in order."""

    def __init__(self, model: nn.Module, classes: list[Any], lr: float = 1e-3) -> None:
        self.model, self.classes, self.lr = model, classes, lr

    def partial_fit(self, X: Any, y: Any, batch: int = 32) -> TorchClassifier:
        if not hasattr(self, "optimizer_"):
            self.optimizer_ = SepSA(self.model, torch.optim.Adam, solver=RLS(ridge="evidence"), lr=self.lr)
        inputs, labels = torch.as_tensor(X, dtype=torch.float32), [self.classes.index(label) for label in y]
        targets = nn.functional.one_hot(torch.tensor(labels), len(self.classes)).float()
        self.model.train()
        for some, wanted in zip(inputs.split(batch), targets.split(batch), strict=True):
            self.optimizer_.learn(some, wanted)
        return self

    @torch.no_grad()
    def predict(self, X: Any) -> list[Any]:
        scores = self.model.eval()(torch.as_tensor(X, dtype=torch.float32))
        return [self.classes[place] for place in scores.argmax(1)]

    def learn_one(self, x: dict[Any, float], y: Any) -> None:  # features in the same order in every row
        self.partial_fit([[*x.values()]], [y])

    def predict_one(self, x: dict[Any, float]) -> Any:
        return self.predict([[*x.values()]])[0]


def main() -> None:
    images, digits = load_digits(return_X_y=True)
    torch.manual_seed(0)
    convolution = nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    network = nn.Sequential(*convolution, nn.Linear(72, 64), nn.ReLU(), nn.Linear(64, 10))
    model = TorchClassifier(network, classes=[*range(10)])
    right = []
    for image, digit in zip(images[:500], digits[:500], strict=True):  # as River does
        x = dict(enumerate(image))
        right.append(model.predict_one(x) == digit)
        model.learn_one(x, digit)
    print(f"accuracy on the last 300 images of the stream: {sum(right[200:]) / 300:.1%}")
    model.partial_fit(images[500:1000], digits[500:1000])  # as scikit-learn does
    print(f"accuracy on images never learned: {model.score(images[1000:], digits[1000:]):.1%}")


if __name__ == "__main__":
    main()
