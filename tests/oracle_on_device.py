"""The float64 oracle, written with whole tensors so that a GPU evaluates it at real widths. The CPU tests' oracle.py is
the long-hand form of the same definitions."""

import torch
from torch import Tensor


def window_lse(query: Tensor, window_kv: Tensor, sink: Tensor | None, window: int, scale: float) -> Tensor:
    """``[B, S, H]`` of queries at positions 0, 1, ...; a row at a time over its window."""
    query, window_kv = query.double(), window_kv.double()
    rows = []
    for s in range(query.shape[1]):
        keys = window_kv[:, max(0, s - window + 1) : s + 1] if window > 0 else window_kv[:, : s + 1]
        logits = scale * torch.einsum("bhd,bkd->bhk", query[:, s], keys)
        if sink is not None:
            logits = torch.cat([logits, sink.double().expand(logits.shape[0], -1).unsqueeze(-1)], -1)
        rows.append(torch.logsumexp(logits, -1))
    return torch.stack(rows, 1)


def distill_target(
    query: Tensor, pool: Tensor, topk_idxs: Tensor, noncompressed_lse: Tensor | None, joint_lse: Tensor | None, scale
) -> Tensor:
    """``[B, S, K]``, normalised; a row at a time."""
    query, pool = query.double(), pool.double()
    target = torch.zeros(topk_idxs.shape, dtype=torch.float64, device=query.device)
    for b in range(query.shape[0]):
        for s in range(query.shape[1]):
            slots = ((topk_idxs[b, s] >= 0) & (topk_idxs[b, s] < pool.shape[1])).nonzero().squeeze(-1)
            logits = scale * query[b, s] @ pool[b, topk_idxs[b, s, slots].long()].T
            if joint_lse is not None:
                denominator = joint_lse[b, s].double()
            else:
                denominator = torch.logsumexp(logits, -1)
                if noncompressed_lse is not None:
                    denominator = torch.logaddexp(denominator, noncompressed_lse[b, s].double())
            target[b, s, slots] = (logits - denominator.unsqueeze(-1)).clamp(max=0).exp().sum(0)
    return target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def distill_kl(index_scores: Tensor, target: Tensor, topk_idxs: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``[B, S]`` and the ``[B, S, K]`` derivative of their sum, by autograd."""
    scores = index_scores.detach().double().requires_grad_()
    valid = topk_idxs >= 0
    masked = scores.masked_fill(~valid, float("-inf"))
    has_valid = valid.any(-1, keepdim=True)
    p = torch.where(has_valid, torch.where(has_valid, masked, 0.0).softmax(-1), 0.0)
    t = target.double()
    kl = torch.where(valid, t * ((t + eps).log() - (p + eps).log()), 0.0).sum(-1)
    return kl.detach(), torch.autograd.grad(kl.sum(), scores)[0]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())
