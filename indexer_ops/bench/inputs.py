"""Operands like those of training: bfloat16 activations, causal top-k indices with empty slots."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..lse import combine_lse
from .presets import Preset

# Elements of one slab of scores: at 128K queries the whole [S, P] would be 17 GB.
SLAB_ELEMENTS = 2**26


@dataclass(frozen=True)
class Case:
    """One length of one preset, batch 1; ``leaf`` tensors require a gradient."""

    preset: Preset
    S: int
    P: int
    query: Tensor  # [1, S, H, D]
    window_kv: Tensor  # [1, S, D]
    pool: Tensor  # [1, P, D]
    sink: Tensor  # [H]
    topk_idxs: Tensor  # [1, S, K] int32
    index_scores: Tensor  # leaf [1, S, K]
    joint_lse: Tensor  # [1, S, H]
    q: Tensor  # leaf [1, S, Hi, Di]
    k: Tensor  # leaf [1, P, Di]
    weights: Tensor  # leaf [1, S, Hi]
    grad_kl: Tensor  # [1, S]: of the mean over rows
    grad_scores: Tensor  # [1, S, K]: what reaches the indexer where it is measured alone


def make_case(preset: Preset, S: int, indices: str, seed: int, device: torch.device) -> Case:
    """Random operands of length ``S``, the same for the same seed on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)

    H, D, K, Hi, Di = preset.H, preset.D, preset.K, preset.Hi, preset.Di
    P = S // preset.ratio
    query, window_kv, pool, sink = normal(1, S, H, D), normal(1, S, D), normal(1, P, D), normal(H, dtype=torch.float32)
    topk_idxs = selected_entries(S, P, K, preset.ratio, indices, generator, device)
    return Case(
        preset=preset,
        S=S,
        P=P,
        query=query,
        window_kv=window_kv,
        pool=pool,
        sink=sink,
        topk_idxs=topk_idxs,
        index_scores=normal(1, S, K, dtype=torch.float32).requires_grad_(),
        joint_lse=joint_lse(query, window_kv, pool, sink, topk_idxs, preset),
        q=normal(1, S, Hi, Di).requires_grad_(),
        k=normal(1, P, Di).requires_grad_(),
        weights=(normal(1, S, Hi) * (Hi * Di) ** -0.5).requires_grad_(),
        grad_kl=torch.full((1, S), 1 / S, device=device),
        grad_scores=normal(1, S, K, dtype=torch.float32) / S,
    )


def selected_entries(
    S: int, P: int, K: int, ratio: int, indices: str, generator: torch.Generator, device: torch.device
) -> Tensor:
    """``[1, S, K]`` int32: the best ``K`` by random scores, of the entries a query sees (``causal``) or of all."""
    idxs = torch.full((1, S, K), -1, dtype=torch.int32, device=device)
    entry = torch.arange(P, device=device)
    rows = max(1, SLAB_ELEMENTS // max(1, P))
    for start in range(0, S, rows):
        stop = min(S, start + rows)
        scores = torch.rand(stop - start, P, device=device, generator=generator)
        if indices == "causal":
            position = torch.arange(start, stop, device=device).unsqueeze(1)
            scores.masked_fill_((entry + 1) * ratio > position + 1, float("-inf"))
        best, chosen = scores.topk(min(K, P), -1)
        idxs[0, start:stop, : min(K, P)] = torch.where(best == float("-inf"), -1, chosen).int()
    return idxs


@torch.no_grad()
def joint_lse(
    query: Tensor, window_kv: Tensor, pool: Tensor, sink: Tensor, topk_idxs: Tensor, preset: Preset
) -> Tensor:
    """``[1, S, H]`` over window, sink and selected entries: what an attention forward would hand over."""
    _, S, H, _ = query.shape
    lse = torch.empty(1, S, H, device=query.device)
    rows = max(1, SLAB_ELEMENTS // (preset.K * preset.D))
    for start in range(0, S, rows):
        part = slice(start, min(S, start + rows))
        queries, idxs = query[0, part].float(), topk_idxs[0, part]
        selected = preset.scale * torch.einsum("nhd,nkd->nhk", queries, pool[0, idxs.clamp(min=0)].float())
        selected = selected.masked_fill((idxs < 0).unsqueeze(1), float("-inf"))
        first = max(0, part.start - preset.window + 1)
        key = torch.arange(first, part.stop, device=query.device)
        position = torch.arange(part.start, part.stop, device=query.device).unsqueeze(1)
        visible = (key <= position) & (key > position - preset.window)
        window = preset.scale * torch.einsum("nhd,td->nht", queries, window_kv[0, first : part.stop].float())
        window = window.masked_fill(~visible.unsqueeze(1), float("-inf"))
        lse[:, part] = combine_lse(window.logsumexp(-1).unsqueeze(0), sink, selected.logsumexp(-1).unsqueeze(0))
    return lse
