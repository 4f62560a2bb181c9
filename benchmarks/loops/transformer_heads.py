"""Small BERT- and GPT-style classifiers from configurations: a SepSA head beside AdamW on all, after the same steps.

    python benchmarks/loops/transformer_heads.py

Writes transformer_heads.json: the cross-entropy over the training set at the end, for 5 seeds, by a plain loop and by
transformers' Trainer, as examples/transformers_trainer.py writes it. Both methods see the same batches and learning
rate, 1e-3, which nobody tuned. A learning problem of our own: nothing is downloaded.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import sepsa
from benchmarks.measure import write

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import transformers_trainer as recipe

SEEDS, EPOCHS, BATCH = range(5), 3, 32


@torch.no_grad()
def training_loss(model: Any) -> float:
    model.eval()
    data = recipe.Sequences()
    outputs = model(input_ids=data.tokens, attention_mask=(data.tokens != recipe.PAD).long())
    return cross_entropy(outputs.logits, data.labels).item()


def by_trainer(name: str, head: bool, seed: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = recipe.trainer(name, folder, head, seed, num_train_epochs=EPOCHS, logging_strategy="no")
        run.train()
    return training_loss(run.model)


def by_loop(name: str, head: bool, seed: int) -> float:
    make, kind, head_name = recipe.MODELS[name]
    torch.manual_seed(seed)
    model = make()
    if head:
        optimizer: Any = sepsa.SepSA(model, torch.optim.AdamW, head=head_name, solver=sepsa.SoftmaxNewton(), lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(EPOCHS):
        for batch in DataLoader(recipe.Sequences(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed)):
            if head:
                with optimizer.observe(kind.head_targets(None, batch)):
                    loss = model(**batch).loss
            else:
                loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return training_loss(model)


def main() -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for name in recipe.MODELS:
        for way, train in (("a plain loop", by_loop), ("Trainer", by_trainer)):
            losses = {
                method: [train(name, head, seed) for seed in SEEDS]
                for method, head in (("SepSA", True), ("AdamW", False))
            }
            lower = sum(a < b for a, b in zip(losses["SepSA"], losses["AdamW"], strict=True))
            result[f"{name}, {way}"] = {"losses": losses, "seeds with a lower loss": lower}
            means = ", ".join(f"{m} {statistics.fmean(v):.4f} ± {statistics.stdev(v):.4f}" for m, v in losses.items())
            print(f"{name}, {way}: {means}; SepSA lower with {lower} of {len(SEEDS)} seeds")
    write(__file__, {"cases": result})


if __name__ == "__main__":
    main()
