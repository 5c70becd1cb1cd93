"""The lightning indexer long-hand in float64: one query, one head, one entry at a time, without the package."""

import math

import torch
from torch import Tensor

UNUSED = -1


def visible_entries(s: int, b: int, P: int, ratio: int, query_offset: int, entry_start, entry_stop) -> list[int]:
    """Entries that query s of batch b may select, in order."""
    entries = []
    for p in range(P):
        if entry_stop is None:
            seen = (p + 1) * ratio <= query_offset + s + 1
        else:
            seen = p < int(entry_stop[b, s])
        if entry_start is not None and p < int(entry_start[b, s]):
            seen = False
        if seen:
            entries.append(p)
    return entries


def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """``[B, S, P]`` float64, visibility aside."""
    q, k, weights = (tensor.detach().cpu().double() for tensor in (q, k, weights))
    scores = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            products = q[b, :, h] @ k[b].T
            scores[b] += weights[b, :, h].unsqueeze(-1) * torch.where(products > 0, products, 0.0)
    return scores


def indexer_topk(
    q, k, weights, topk, ratio, query_offset=0, entry_start=None, entry_stop=None
) -> tuple[Tensor, Tensor]:
    """The best ``topk`` visible entries, ``[B, S, topk]`` scores and indices: a full sort, ties to the lowest."""
    B, S, P = q.shape[0], q.shape[1], k.shape[1]
    every = index_scores(q, k, weights)
    scores = torch.full((B, S, topk), -math.inf, dtype=torch.float64)
    idxs = torch.full((B, S, topk), UNUSED, dtype=torch.int64)
    for b in range(B):
        for s in range(S):
            seen = visible_entries(s, b, P, ratio, query_offset, entry_start, entry_stop)
            best = sorted(seen, key=lambda p: (-float(every[b, s, p]), p))[:topk]
            for slot, p in enumerate(best):
                scores[b, s, slot], idxs[b, s, slot] = every[b, s, p], p
    return scores, idxs


def gradients(grad_scores: Tensor, q: Tensor, k: Tensor, weights: Tensor, idxs: Tensor) -> tuple[Tensor, ...]:
    """dq, dk and dweights in float64, given which entries were selected."""
    q, k, weights, slope = (tensor.detach().cpu().double() for tensor in (q, k, weights, grad_scores))
    dq, dk, dweights = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(weights)
    for b, s, slot in torch.cartesian_prod(*(torch.arange(size) for size in idxs.shape)).view(-1, 3).tolist():
        p = int(idxs[b, s, slot])
        if not 0 <= p < k.shape[1]:
            continue
        for h in range(q.shape[2]):
            product = float(q[b, s, h] @ k[b, p])
            if product > 0:
                dq[b, s, h] += slope[b, s, slot] * weights[b, s, h] * k[b, p]
                dk[b, p] += slope[b, s, slot] * weights[b, s, h] * q[b, s, h]
                dweights[b, s, h] += slope[b, s, slot] * product
    return dq, dk, dweights
