"""SepSA in transformers' Trainer: a subclass of a few lines, for a BERT-style and for a GPT-style classifier.

    python examples/transformers_trainer.py

Needs `pip install transformers accelerate`. The models are small and made from configurations: nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import sepsa

PAD = 0


class SepSATrainer(Trainer):
    """A Trainer for `optimizers=(SepSA(...), None)`: the head learns in training, not in evaluation."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], **options: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, **options)
        with sepsa.observe(model, self.head_targets(inputs)):
            return super().compute_loss(model, inputs, **options)

    def head_targets(self, inputs: dict[str, Any]) -> Tensor:
        labels: Tensor = inputs["labels"]
        return labels


class LastTokenTrainer(SepSATrainer):
    """A `SepSATrainer` for models that apply the head to all tokens and use the last one that is not padding."""

    def head_targets(self, inputs: dict[str, Any]) -> Tensor:
        tokens, labels = inputs["input_ids"], inputs["labels"]
        last = (torch.arange(tokens.shape[1], device=tokens.device) * (tokens != PAD)).argmax(1)
        return torch.full_like(tokens, -100).scatter_(1, last[:, None], labels[:, None])


class Sequences(Dataset):
    """Return token sequences whose class is the most frequent of the first three words of the vocabulary."""

    def __init__(self, count: int = 256) -> None:
        g = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, 20, (count, 12), generator=g)
        self.labels = torch.stack([(self.tokens == k).sum(1) for k in (1, 2, 3)], 1).argmax(1)
        length = torch.randint(8, 13, (count, 1), generator=g)
        self.tokens[torch.arange(12) >= length] = PAD

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        row = self.tokens[k]
        return {"input_ids": row, "attention_mask": (row != PAD).long(), "labels": self.labels[k]}


def bert() -> nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=20,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=16,
            num_labels=3,
        )
    )


def gpt() -> nn.Module:
    return GPT2ForSequenceClassification(
        GPT2Config(vocab_size=20, n_positions=16, n_embd=32, n_layer=2, n_head=2, num_labels=3, pad_token_id=PAD)
    )


MODELS = {"BERT": (bert, SepSATrainer, "classifier"), "GPT": (gpt, LastTokenTrainer, "score")}


def trainer(name: str, folder: str, head: bool = True, seed: int = 0, **options: Any) -> Trainer:
    """Return SepSA on the head with AdamW on the body, or AdamW on all parameters."""
    make, kind, head_name = MODELS[name]
    torch.manual_seed(seed)
    model, data = make(), Sequences()
    settings = {
        "output_dir": folder, "use_cpu": True, "per_device_train_batch_size": 32, "num_train_epochs": 3,
        "learning_rate": 1e-3, "seed": seed, "report_to": [], "disable_tqdm": True, "save_strategy": "no",
        "logging_steps": 4, "dataloader_pin_memory": False,
    }  # fmt: skip
    arguments = TrainingArguments(**settings | options)
    if not head:
        plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return Trainer(model, arguments, train_dataset=data, optimizers=(plain, None))
    solver = sepsa.SoftmaxNewton()
    optimizer = sepsa.SepSA(
        model, torch.optim.AdamW, head=head_name, solver=solver, lr=1e-3, samples_per_epoch=len(data)
    )
    return kind(model, arguments, train_dataset=data, optimizers=(optimizer, None))


def main() -> None:
    for name in MODELS:
        for head in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                run = trainer(name, folder, head, logging_strategy="no")
                result = run.train()
            print(f"{name}, {'SepSA' if head else 'AdamW'}: mean training loss {result.training_loss:.4f}")


if __name__ == "__main__":
    main()
