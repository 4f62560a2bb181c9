"""What River's running scalers before the learner cost: the mean absolute error of predictions made before learning.

    python benchmarks/streams/scalers.py

Writes scalers.json: `sepsa.river.SepSARegressor` with default settings on raw features and behind each scaler, over 3
seeds, on TrumpApproval, whose features have trends, and on Friedman, whose features have none.
"""

from __future__ import annotations

import statistics
import warnings

from river import datasets, evaluate, metrics, preprocessing

from benchmarks.measure import write
from sepsa.river import SepSARegressor

SEEDS = 3
STREAMS = {"TrumpApproval": datasets.TrumpApproval(), "Friedman": list(datasets.synth.Friedman(seed=0).take(3000))}
SCALERS = {
    "raw": None,
    "StandardScaler": preprocessing.StandardScaler,
    "AdaptiveStandardScaler": preprocessing.AdaptiveStandardScaler,
    "MinMaxScaler": preprocessing.MinMaxScaler,
    "RobustScaler": preprocessing.RobustScaler,
}


def main() -> None:
    warnings.filterwarnings("ignore", "the first rows look like the output of a running scaler")
    result = {}
    for name, stream in STREAMS.items():
        result[name] = {
            scaler: statistics.fmean(
                evaluate.progressive_val_score(
                    stream,
                    SepSARegressor(seed=seed) if scale is None else scale() | SepSARegressor(seed=seed),
                    metrics.MAE(),
                ).get()
                for seed in range(SEEDS)
            )
            for scaler, scale in SCALERS.items()
        }
        print(name, {scaler: round(error, 3) for scaler, error in result[name].items()})
    write(__file__, {"seeds": SEEDS} | result)


if __name__ == "__main__":
    main()
