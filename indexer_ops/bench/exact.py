"""The loss and the indexer on a few rows in float64, straight from their definitions."""

import torch
from torch import Tensor

from .eager import EPS
from .inputs import Case


def loss(case: Case, rows: Tensor, joint_lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """KL ``[n]`` and the gradient ``[n, K]`` of their sum in the index scores, for ``rows`` ``[n]``."""
    preset = case.preset
    query, idxs = case.query[0, rows].double(), case.topk_idxs[0, rows]
    valid = idxs >= 0
    selected = preset.scale * torch.einsum("nhd,nkd->nhk", query, case.pool[0, idxs.clamp(min=0)].double())
    selected = selected.masked_fill(~valid.unsqueeze(1), float("-inf"))
    if joint_lse is None:
        key = rows.unsqueeze(1) - torch.arange(preset.window, device=rows.device)  # [n, window]
        window = preset.scale * torch.einsum("nhd,nwd->nhw", query, case.window_kv[0, key.clamp(min=0)].double())
        window = window.masked_fill((key < 0).unsqueeze(1), float("-inf"))
        sink = case.sink.double().expand(len(rows), -1).unsqueeze(-1)
        joint = torch.cat([window, sink, selected], -1).logsumexp(-1)
    else:
        joint = joint_lse[0, rows].double()
    mass = (selected - joint.unsqueeze(-1)).exp().sum(1)
    target = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    scores = case.index_scores.detach()[0, rows].double().requires_grad_()
    masked = scores.masked_fill(~valid, torch.finfo(torch.float64).min)
    student = masked.softmax(-1)
    kl = torch.where(valid, target * ((target + EPS).log() - (student + EPS).log()), 0.0).sum(-1)
    return kl.detach(), torch.autograd.grad(kl.sum(), scores)[0]


def index_scores(case: Case, rows: Tensor) -> Tensor:
    """``[n, P]``: of every entry, ``-inf`` where a row does not see it."""
    products = torch.einsum("nhd,pd->nhp", case.q.detach()[0, rows].double(), case.k.detach()[0].double()).relu()
    scores = torch.einsum("nhp,nh->np", products, case.weights.detach()[0, rows].double())
    entry = torch.arange(case.P, device=rows.device)
    return scores.masked_fill((entry + 1) * case.preset.ratio > rows.unsqueeze(1) + 1, float("-inf"))


def indexer_gradients(case: Case, rows: Tensor, idxs: Tensor, grad_scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of q ``[n, Hi, Di]``, k ``[P, Di]`` and weights ``[n, Hi]``, where ``rows`` selected ``idxs`` ``[n, K]``."""
    q, weights = (t.detach()[0, rows].double().requires_grad_() for t in (case.q, case.weights))
    k = case.k.detach()[0].double().requires_grad_()
    products = torch.einsum("nhd,nkd->nhk", q, k[idxs.clamp(min=0)]).relu()
    scores = torch.where(idxs >= 0, torch.einsum("nhk,nh->nk", products, weights), 0.0)
    return torch.autograd.grad(scores, (q, k, weights), grad_scores.double())
