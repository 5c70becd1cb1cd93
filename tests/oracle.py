"""What the ops compute, by hand: Python loops over float64, written from the definitions and from no other code."""

import math

import torch
from torch import Tensor

NOTHING = float("-inf")


def _float64(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().to("cpu", torch.float64)


def log_sum_exp(values: list[float]) -> float:
    maximum = max(values, default=NOTHING)
    if maximum == NOTHING:
        return NOTHING
    return maximum + math.log(math.fsum(math.exp(value - maximum) for value in values))


def window_lse(
    query: Tensor,
    window_kv: Tensor,
    sink: Tensor | None,
    doc_start: Tensor | None,
    window: int,
    scale: float,
    query_offset: int = 0,
) -> Tensor:
    """``[B, S, H]``: log-sum-exp of the visible window keys and the sink."""
    query, window_kv, sink = _float64(query), _float64(window_kv), _float64(sink)
    B, S, H, _ = query.shape
    out = torch.empty(B, S, H, dtype=torch.float64)
    for b in range(B):
        for s in range(S):
            position = query_offset + s
            first = 0 if doc_start is None else int(doc_start[b, s])
            visible = [
                j
                for j in range(window_kv.shape[1])
                if first <= j <= position and (window <= 0 or j > position - window)
            ]
            for h in range(H):
                keys = window_kv[b, visible] if window_kv.dim() == 3 else window_kv[b, visible, h]
                logits = (scale * (keys @ query[b, s, h])).tolist()
                out[b, s, h] = log_sum_exp(logits if sink is None else [*logits, float(sink[h])])
    return out


def distill_target(
    query: Tensor,
    pool: Tensor,
    topk_idxs: Tensor,
    noncompressed_lse: Tensor | None,
    joint_lse: Tensor | None,
    scale: float,
    normalize: bool = True,
) -> Tensor:
    """``[B, S, K]``: attention over the selected entries, summed over heads."""
    query, pool = _float64(query), _float64(pool)
    noncompressed_lse, joint_lse = _float64(noncompressed_lse), _float64(joint_lse)
    (B, S, H, _), P, K = query.shape, pool.shape[1], topk_idxs.shape[2]
    has_lse = noncompressed_lse is not None or joint_lse is not None
    floor = torch.finfo(torch.float32).tiny if has_lse else 1e-10
    out = torch.zeros(B, S, K, dtype=torch.float64)
    for b in range(B):
        for s in range(S):
            index = topk_idxs[b, s].tolist()
            slots = [k for k in range(K) if 0 <= index[k] < P]
            entries = pool[b, [index[k] for k in slots]]
            for h in range(H):
                logits = (scale * (entries @ query[b, s, h])).tolist()
                if joint_lse is not None:
                    denominator = float(joint_lse[b, s, h])
                elif noncompressed_lse is not None:
                    denominator = log_sum_exp([*logits, float(noncompressed_lse[b, s, h])])
                else:
                    denominator = log_sum_exp(logits)
                for k, logit in zip(slots, logits):
                    out[b, s, k] += math.exp(min(logit - denominator, 0.0))
            if normalize:
                out[b, s] /= max(math.fsum(out[b, s].tolist()), floor)
    return out


def student(scores: list[float], valid: list[bool]) -> list[float]:
    """Softmax over the valid slots of one row; all zero where none of them has a finite score."""
    total = log_sum_exp([score for score, is_valid in zip(scores, valid) if is_valid])
    if total == NOTHING:
        return [0.0] * len(scores)
    return [math.exp(score - total) if is_valid else 0.0 for score, is_valid in zip(scores, valid)]


def distill_kl(index_scores: Tensor, target: Tensor, topk_idxs: Tensor, eps: float = 1e-10) -> Tensor:
    """``[B, S]``: divergence of the student from the target."""
    scores, target = _float64(index_scores), _float64(target)
    B, S, K = scores.shape
    out = torch.zeros(B, S, dtype=torch.float64)
    for b in range(B):
        for s in range(S):
            valid = [index >= 0 for index in topk_idxs[b, s].tolist()]
            p = student(scores[b, s].tolist(), valid)
            if not any(p):
                continue
            t = target[b, s].tolist()
            out[b, s] = math.fsum(t[k] * (math.log(t[k] + eps) - math.log(p[k] + eps)) for k in range(K) if valid[k])
    return out


def distill_kl_gradient(
    grad_kl: Tensor, index_scores: Tensor, target: Tensor, topk_idxs: Tensor, eps: float = 1e-10
) -> Tensor:
    """``[B, S, K]``: ``grad_kl * (p*A - t*w)`` with ``w = p/(p+eps)`` and ``A = sum_k t*w``."""
    grad_kl, scores, target = _float64(grad_kl), _float64(index_scores), _float64(target)
    B, S, K = scores.shape
    out = torch.zeros(B, S, K, dtype=torch.float64)
    for b in range(B):
        for s in range(S):
            valid = [index >= 0 for index in topk_idxs[b, s].tolist()]
            p, t = student(scores[b, s].tolist(), valid), target[b, s].tolist()
            weighted = [t[k] * p[k] / (p[k] + eps) if valid[k] else 0.0 for k in range(K)]
            total = math.fsum(weighted)
            for k in range(K):
                if valid[k]:
                    out[b, s, k] = float(grad_kl[b, s]) * (p[k] * total - weighted[k])
    return out


def is_valid_row(index_scores: Tensor, topk_idxs: Tensor, P: int) -> Tensor:
    """``[B, S]``: the row has a slot that is valid and has a score above ``-inf``."""
    return ((topk_idxs >= 0) & (topk_idxs < P) & (index_scores > NOTHING)).any(-1).cpu()


def distill_loss_rows(
    index_scores: Tensor,
    topk_idxs: Tensor,
    query: Tensor,
    pool: Tensor,
    noncompressed_lse: Tensor | None,
    joint_lse: Tensor | None,
    scale: float,
    eps: float = 1e-10,
) -> Tensor:
    """``[B, S]``: target, then KL over slots inside the pool."""
    target = distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale)
    inside = torch.where(topk_idxs < pool.shape[1], topk_idxs, -1)
    return distill_kl(index_scores, target, inside, eps)


def reduced(
    kl: Tensor, valid_rows: Tensor, reduction: str, row_weight: Tensor | None = None, divisor: float = 1.0
) -> Tensor:
    """The four reductions of a ``[B, S]`` loss."""
    weight = torch.ones_like(kl) if row_weight is None else _float64(row_weight)
    if reduction == "none":
        return kl * weight
    total = (kl * weight).sum()
    if reduction == "sum":
        return total / divisor
    if reduction == "mean":
        return total / kl.numel()
    counted = weight[valid_rows].sum()
    return total / counted if counted > 0 else torch.zeros((), dtype=torch.float64)
