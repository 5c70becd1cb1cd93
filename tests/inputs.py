"""Makers of inputs: what a causal indexer selects, attention operands, memory that betrays a stray read."""

import random
from types import SimpleNamespace

import torch
from torch import Tensor

from backends import DEVICE

POISON_ROWS = 3


def causal_topk_idxs(
    B: int,
    S: int,
    P: int,
    K: int,
    *,
    ratio: int = 2,
    query_offset: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.int32,
) -> Tensor:
    """``[B, S, K]`` distinct entries of those that a row may see; where they are few, ``-1`` anywhere in the row."""
    shuffler = random.Random(seed)
    rows = []
    for _ in range(B):
        for s in range(S):
            visible = max(0, min(P, (query_offset + s + 1) // ratio))
            chosen = shuffler.sample(range(visible), min(visible, K))
            row = chosen + [-1] * (K - len(chosen))
            shuffler.shuffle(row)
            rows.append(row)
    return torch.tensor(rows, dtype=dtype, device=DEVICE).view(B, S, K)


def attention_inputs(
    B: int = 2,
    S: int = 6,
    H: int = 3,
    D: int = 16,
    T: int | None = None,
    P: int = 5,
    K: int = 4,
    *,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    seed: int = 0,
) -> SimpleNamespace:
    """Operands of every op at one set of sizes; ``scale`` is left off the usual ``D**-0.5`` so that it shows."""
    generator = torch.Generator().manual_seed(seed)
    T = S if T is None else T
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    return SimpleNamespace(
        query=normal(B, S, H, D),
        window_kv=normal(B, T, D),
        sink=normal(H, dtype=lse_dtype),
        pool=normal(B, P, D),
        topk_idxs=causal_topk_idxs(B, S, P, K, seed=seed, dtype=index_dtype),
        index_scores=2 * normal(B, S, K),
        noncompressed_lse=2 * normal(B, S, H, dtype=lse_dtype),
        grad_kl=normal(B, S, dtype=lse_dtype),
        scale=1.5 * D**-0.5,
    )


def target_of(topk_idxs: Tensor, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """``[B, S, K]`` normalised weights, 0 on empty slots and in some valid ones."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(topk_idxs.shape, generator=generator, dtype=torch.float64).to(topk_idxs.device)
    weight = torch.where((topk_idxs >= 0) & (weight > 0.2), weight, 0.0)
    return (weight / weight.sum(-1, keepdim=True).clamp(min=1e-30)).to(dtype)


def amid_poison(tensor: Tensor) -> Tensor:
    """The same values inside a larger buffer that is NaN before and after dim 1, so that a stray read shows."""
    shape = list(tensor.shape)
    shape[1] += 2 * POISON_ROWS
    buffer = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
    inside = buffer[:, POISON_ROWS : POISON_ROWS + tensor.shape[1]]
    inside.copy_(tensor)
    return inside


def as_transposed_view(tensor: Tensor) -> Tensor:
    """The same ``[B, S, H, D]`` values stored as ``[B, H, S, D]``."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def with_strided_last_dim(tensor: Tensor) -> Tensor:
    """The same values with another dim fastest in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
