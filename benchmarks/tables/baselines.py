"""What simple predictions attain on the paper's regressions: the mean of the training targets, and a linear model.

    SEPSA_DATA=... python benchmarks/tables/baselines.py

Writes baselines.json: mean squared test errors with the paper's splits, beside which results/table3.json is read. The
linear model is least squares on all training rows.
"""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss

from benchmarks.measure import write
from reproduction.data import REGRESSIONS, TITLES, load


def main() -> None:
    result = {}
    for name in REGRESSIONS:
        data = load(name)
        train, test = (torch.nn.functional.pad(x, (0, 1), value=1.0) for x in (data.train_inputs, data.test_inputs))
        weights = torch.linalg.lstsq(train.double(), data.train_targets.double(), driver="gelsd").solution
        mean = data.train_targets.mean(0).expand_as(data.test_targets)
        result[TITLES[name]] = {
            "mean of the targets": mse_loss(mean, data.test_targets).item(),
            "linear model": mse_loss(test.double() @ weights, data.test_targets.double()).item(),
        }
        print(TITLES[name], result[TITLES[name]])
    write(__file__, result)


if __name__ == "__main__":
    main()
