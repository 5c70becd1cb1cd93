"""Operands of the indexer ops at small sizes, and bounds of what a query sees."""

import torch

from backends import DEVICE

# Few heads and dims that are no power of two; the largest pool takes more than one tile of the score kernel.
WIDTHS = {
    "odd heads": dict(B=2, S=4, Hi=3, Di=16, P=3, topk=2),
    "48 dims": dict(B=1, S=5, Hi=5, Di=48, P=9, topk=4),
    "tiles": dict(B=1, S=3, Hi=2, Di=16, P=150, topk=17),
    "topk above P": dict(B=1, S=4, Hi=1, Di=32, P=4, topk=7),
}


def operands(B=2, S=11, Hi=3, Di=16, P=5, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    return normal(B, S, Hi, Di), normal(B, P, Di), normal(B, S, Hi)


def bounds(*rows, B=2):
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE).expand(B, -1).contiguous()
