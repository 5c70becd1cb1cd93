"""Scores and exact top-k of the lightning indexer, a slab of queries at a time."""

import torch
from torch import Tensor

from . import configs
from .common import with_contiguous_last_dim
from .indexer_backward import indexer_topk_backward as indexer_topk_backward
from .indexer_score import index_scores
from .indexer_select import select_topk, sort_topk


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    entry_start: Tensor | None,
    entry_stop: Tensor | None,
    topk: int,
    ratio: int,
    query_offset: int,
) -> tuple[Tensor, Tensor]:
    """``[B, S, Hi, Di]`` q, ``[B, P, Di]`` k, ``[B, S, Hi]`` weights to ``[B, S, topk]`` scores and int32 indices."""
    B, S, Hi, Di = q.shape
    P = k.shape[1]
    scores = q.new_empty((B, S, topk), dtype=torch.float32)
    idxs = q.new_empty((B, S, topk), dtype=torch.int32)
    if B * S * P * topk == 0:
        return scores.fill_(float("-inf")), idxs.fill_(-1)
    q, k = with_contiguous_last_dim(q), with_contiguous_last_dim(k)
    rows = min(S, max(1, configs.SLAB_BYTES // (4 * B * P)))
    slab = q.new_empty(B * rows * P, dtype=torch.float32)
    for first_row in range(0, S, rows):
        size = min(rows, S - first_row)
        part = slab[: B * size * P].view(B, size, P)
        index_scores(q, k, weights, entry_start, entry_stop, ratio, query_offset, first_row, part)
        select_topk(part, entry_start, entry_stop, ratio, query_offset, first_row, scores, idxs)
    sort_topk(scores, idxs)
    return scores, idxs
