"""A convolutional body under scikit-learn's interface: you write the body, the estimator adds the head.

python examples/torch_body.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from sepsa import SepSAClassifier


def main() -> None:
    images, digits = load_digits(return_X_y=True)
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 64),
        nn.ReLU(),
    )
    model = SepSAClassifier(module=body, random_state=0)
    before = model.prequential(images[:1000], digits[:1000])  # one pass, each image predicted before it is learned
    print(f"accuracy on the last 500 images of the stream: {(before[500:] == digits[500:1000]).mean():.1%}")
    print(f"accuracy on images never learned: {model.score(images[1000:], digits[1000:]):.1%}")


if __name__ == "__main__":
    main()
