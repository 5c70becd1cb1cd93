"""The eager composite of the lightning indexer: scores, selection and gradient, formula by formula.

``I[t,p] = sum_h weights[t,h] * relu(q[t,h] . k[p])`` (DeepSeek-V3.2, section 2.1, eq. 1; DeepSeek-V4, section 2.3.1,
eqs. 15 to 17). Rounding points and chunks as in reference.py.
"""

import torch
from torch import Tensor

from . import reference
from .reference import checkpointed, chunks, compute_dtype, is_traced, without_autocast


def visible_entries(
    entry_start: Tensor | None, entry_stop: Tensor | None, P: int, ratio: int, position: Tensor
) -> Tensor:
    """``[B or 1, n, P]``: entry p is visible to position t iff ``(p+1)*ratio <= t+1``, or lies within the bounds."""
    entry = torch.arange(P, device=position.device)
    stop = (position + 1).unsqueeze(0) // ratio if entry_stop is None else entry_stop
    visible = entry < stop.unsqueeze(-1)
    return visible if entry_start is None else visible & (entry >= entry_start.unsqueeze(-1))


def dense_index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """``I[t,p] = sum_h weights[t,h] * relu(q[t,h] . k[p])`` for ``[b, n]`` rows. ``[b, n, P]``."""
    return (torch.einsum("bnhd,bpd->bnhp", q, k).relu() * weights.unsqueeze(-1)).sum(2)


def _topk_rows(q, k, weights, entry_start, entry_stop, topk, ratio, position, dtype) -> tuple[Tensor, Tensor]:
    P = k.shape[1]
    scores = dense_index_scores(q.to(dtype), k.to(dtype), weights.to(dtype))
    scores = scores.masked_fill(~visible_entries(entry_start, entry_stop, P, ratio, position), float("-inf"))
    # A pool smaller than topk still gives topk columns.
    scores = torch.nn.functional.pad(scores, (0, topk), value=float("-inf"))
    best, idxs = scores.sort(dim=-1, descending=True, stable=True)  # stable: ties stay in index order
    best, idxs = best[..., :topk], idxs[..., :topk]
    return best, torch.where(best.detach() == float("-inf"), -1, idxs).int()


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    entry_start: Tensor | None,
    entry_stop: Tensor | None,
    topk: int,
    ratio: int,
    query_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """The ``topk`` best visible entries of each query, best first, and their scores. Each ``[B, S, topk]``."""
    dtype = compute_dtype(q, k, weights)
    B, S, Hi, Di = q.shape
    P = k.shape[1]
    with without_autocast(q):
        if B * S * P * topk == 0:
            # Still a function of its inputs, as where there is something to select.
            nothing = q.flatten(2).sum(-1, dtype=dtype) * 0 + weights.sum(-1, dtype=dtype) * 0 + k.sum(dtype=dtype) * 0
            unused = nothing.unsqueeze(-1).expand(B, S, topk)
            return unused.masked_fill(torch.ones_like(unused, dtype=torch.bool), float("-inf")), torch.full(
                (B, S, topk), -1, dtype=torch.int32, device=q.device
            )
        position = query_offset + torch.arange(S, device=q.device)
        itemsize = torch.finfo(dtype).bits // 8
        # Products, their relu and its gradient for every head; then the sort's values and 64-bit indices.
        row_bytes = itemsize * (4 * Hi * P + 8 * (P + topk))
        if is_traced(q) or B * S * row_bytes <= reference.TRANSIENT_BYTES:
            return _topk_rows(q, k, weights, entry_start, entry_stop, topk, ratio, position, dtype)
        batches = []
        for b in range(B):
            batch = slice(b, b + 1)
            parts = []
            for start, stop in chunks(S, row_bytes):
                rows = slice(start, stop)
                bounds = (None if bound is None else bound[batch, rows] for bound in (entry_start, entry_stop))
                arguments = (
                    q[batch, rows],
                    k[batch],
                    weights[batch, rows],
                    *bounds,
                    topk,
                    ratio,
                    position[rows],
                    dtype,
                )
                parts.append(checkpointed(_topk_rows, *arguments))
            batches.append([torch.cat(tensors, 1) for tensors in zip(*parts)])
        scores, idxs = (torch.cat(tensors) for tensors in zip(*batches))
        return scores, idxs


@torch.no_grad()
def indexer_topk_backward(
    grad_scores: Tensor, q: Tensor, k: Tensor, weights: Tensor, idxs: Tensor, output_mask: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in closed form over the selected entries, with ``g = ds * weights[h] * 1[q.k > 0]``: ``dq += g*k``,
    ``dk[p] += g*q``, ``dweights[h] += ds * relu(q.k)``. An empty tensor for what ``output_mask`` does not ask for."""
    dtype = compute_dtype(q, k, weights)
    B, S, Hi, Di = q.shape
    K, P = idxs.shape[2], k.shape[1]
    dq, dweights = (torch.zeros_like(t, dtype=dtype) for t in (q, weights))
    dk = torch.zeros_like(k, dtype=dtype)
    itemsize = torch.finfo(dtype).bits // 8
    with without_autocast(q):
        for b in range(B if K * P else 0):
            for start, stop in chunks(S, itemsize * (4 * Hi * K + 3 * K * Di + 2 * Hi * Di)):
                rows = (b, slice(start, stop))
                valid = (idxs[rows] >= 0) & (idxs[rows] < P)
                entry = torch.where(valid, idxs[rows], 0).long()
                entries, query = k[b, entry].to(dtype), q[rows].to(dtype)  # [n, K, Di], [n, Hi, Di]
                products = torch.einsum("nhd,nkd->nhk", query, entries)
                grad = torch.where(valid, grad_scores[rows].to(dtype), 0.0)
                dweights[rows] = torch.einsum("nhk,nk->nh", products.relu(), grad)
                gradient = torch.where(products > 0, grad.unsqueeze(1) * weights[rows].to(dtype).unsqueeze(-1), 0.0)
                dq[rows] = torch.einsum("nhk,nkd->nhd", gradient, entries)
                contribution = torch.einsum("nhk,nhd->nkd", gradient, query)
                dk[b].index_add_(0, entry.flatten(), contribution.flatten(0, 1))
    gradients = zip((dq, dk, dweights), (q, k, weights), output_mask)
    return tuple(gradient.to(t.dtype) if needed else t.new_empty((0,)) for gradient, t, needed in gradients)
