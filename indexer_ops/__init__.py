"""Differentiable ops that teach a DeepSeek-V4 lightning indexer which tokens to look at."""

from . import _ops, flops  # noqa: F401  (registers torch.ops.v4idx.*, then its FLOP formulas)
from ._ops import SAC_SAVE_OPS
from .api import distill_kl, distill_loss, distill_target, indexer_topk, window_lse
from .lse import combine_lse

__version__ = "0.1.0"
__all__ = [
    "SAC_SAVE_OPS",
    "combine_lse",
    "distill_kl",
    "distill_loss",
    "distill_target",
    "indexer_topk",
    "window_lse",
]
