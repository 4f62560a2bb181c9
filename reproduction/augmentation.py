"""Random crops and flips of a whole training set at once, on the device that holds it."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from reproduction.data import Dataset, black

Padding = Literal["black"]
MARGIN = 4  # pixels, as usual for CIFAR-10
_CHUNK = 5_000  # images cropped at once, to bound the memory of the index arrays
_DRAW_STREAM = 2_000_000_011  # added to the seed, so that crops do not repeat the random numbers of weights and order


class Augmentation:
    """Pads each image by 4 pixels, crops it at a random place and flips it with probability a half.

    An epoch sees every image once, so augmenting the set before each epoch augments each image when it is used. The
    border is black, as if images were padded before they are standardized.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        images = dataset.train_inputs
        self.size = images.shape[-1]
        self.padded = pad(images, (MARGIN,) * 4, value=black(dataset.name))
        self.drawn = torch.empty_like(images)
        # On the CPU, so that the draws are the same on every device.
        self.generator = torch.Generator().manual_seed(seed + _DRAW_STREAM)

    def draw(self) -> Tensor:
        """A new augmentation of the set (n, channels, size, size), in the same memory, as a CUDA graph needs."""
        n, device = len(self.drawn), self.drawn.device
        corners = torch.randint(2 * MARGIN + 1, (2, n), generator=self.generator)
        flipped = torch.randint(2, (n,), generator=self.generator).bool()
        steps = torch.arange(self.size)
        rows = corners[0, :, None] + steps
        columns = corners[1, :, None] + torch.where(flipped[:, None], self.size - 1 - steps, steps)
        rows, columns = rows.to(device), columns.to(device)
        for start in range(0, n, _CHUNK):
            some = slice(start, start + _CHUNK)
            images = self.padded[some]
            which = torch.arange(len(images), device=device)[:, None, None]
            # Advanced indices around a slice: their dimensions (n, size, size) come first, the channels last.
            cut = images[which, :, rows[some, :, None], columns[some, None, :]]
            self.drawn[some].copy_(cut.permute(0, 3, 1, 2))
        return self.drawn
