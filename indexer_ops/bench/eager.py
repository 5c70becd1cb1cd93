"""What people write today: bfloat16 gathers and einsums. The lowest rungs of the ladder.

The loss goes over chunks of 512 rows, for its gathered entries; the indexer takes 4,096 rows at once, the faster way
while its ``[B, S, Hi, P]`` products fit.

Each chunk is a function of tensors of fixed shapes, so that ``torch.compile`` compiles it once for all chunks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import Case

LOSS_ROWS = 512
INDEX_ROWS = 4096
EPS = 1e-10


def loss_rows(
    index_scores: Tensor,
    topk_idxs: Tensor,
    query: Tensor,
    position: Tensor,
    window_kv: Tensor,
    pool: Tensor,
    sink: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """KL ``[1, n]`` of ``n`` consecutive rows at ``position``, window log-sum-exp and target included."""
    with torch.no_grad():
        n = query.shape[1]
        key = position[0] - window + 1 + torch.arange(n + window - 1, device=query.device)
        logits = scale * torch.einsum("bnhd,btd->bnht", query, window_kv[:, key.clamp(min=0)])
        visible = (key >= 0) & (key <= position.unsqueeze(1)) & (key > position.unsqueeze(1) - window)
        logits = logits.float().masked_fill(~visible.unsqueeze(1), float("-inf"))
        lse = torch.logaddexp(logits.logsumexp(-1), sink)

        valid = topk_idxs >= 0
        entries = pool[0, topk_idxs.clamp(min=0)]  # [1, n, K, D]
        logits = scale * torch.einsum("bnhd,bnkd->bnhk", query, entries)
        logits = logits.float().masked_fill(~valid.unsqueeze(2), float("-inf"))
        joint = torch.logaddexp(lse, logits.logsumexp(-1))
        target = (logits - joint.unsqueeze(-1)).exp().sum(2)
        target = target / target.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    scores = index_scores.masked_fill(~valid, torch.finfo(torch.float32).min)
    student = scores.softmax(-1)
    return (target * ((target + EPS).log() - (student + EPS).log())).sum(-1)


def index_rows(q: Tensor, k: Tensor, weights: Tensor, position: Tensor, topk: int, ratio: int) -> tuple[Tensor, Tensor]:
    """Scores and indices of the best ``topk`` entries, ``[1, n, topk]``, for ``n`` rows at ``position``."""
    products = torch.einsum("bnhd,bpd->bnhp", q, k).relu()
    scores = torch.einsum("bnhp,bnh->bnp", products, weights).float()
    entry = torch.arange(k.shape[1], device=q.device)
    scores = scores.masked_fill((entry + 1) * ratio > position.unsqueeze(1) + 1, float("-inf"))
    scores = F.pad(scores, (0, max(0, topk - k.shape[1])), value=float("-inf"))
    best, idxs = scores.topk(topk, -1)
    return best, torch.where(best == float("-inf"), -1, idxs).int()


def loss(case: Case, index_scores: Tensor, topk_idxs: Tensor, rows_function: Callable = loss_rows) -> Tensor:
    """KL rows ``[1, S]``, a chunk at a time."""
    rows = []
    for start in range(0, case.S, LOSS_ROWS):
        part = slice(start, min(case.S, start + LOSS_ROWS))
        position = torch.arange(part.start, part.stop, device=case.query.device)
        operands = (index_scores[:, part], topk_idxs[:, part], case.query[:, part], position)
        shared = (case.window_kv, case.pool, case.sink, case.preset.scale, case.preset.window)
        rows.append(rows_function(*operands, *shared))
    return torch.cat(rows, 1)


def indexer(case: Case, rows_function: Callable = index_rows) -> tuple[Tensor, Tensor]:
    """Scores and indices ``[1, S, K]``, a chunk at a time."""
    parts = []
    for start in range(0, case.S, INDEX_ROWS):
        part = slice(start, min(case.S, start + INDEX_ROWS))
        position = torch.arange(part.start, part.stop, device=case.q.device)
        operands = (case.q[:, part], case.k, case.weights[:, part], position)
        parts.append(rows_function(*operands, case.preset.K, case.preset.ratio))
    scores, idxs = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
    return scores, idxs
