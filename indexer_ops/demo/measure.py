"""How good a selection is: pure functions on tensors, without gradient.

Symbols as everywhere: ``B, S`` batch and query tokens, ``H, D`` heads and head dim, ``T`` window keys, ``P`` pool
entries, ``K`` selected entries a query. A row *counts* if it sees more than ``K`` entries: the others keep them all.
"""

import torch
from torch import Tensor

from ..reference import window_lse


def visible_entries(S: int, P: int, ratio: int, device: torch.device | None = None) -> Tensor:
    """``[S, P]`` bool: entry p compresses ``ratio`` tokens and is visible to position t iff ``(p+1)*ratio <= t+1``."""
    position = torch.arange(S, device=device)
    entry = torch.arange(P, device=device)
    return (entry + 1) * ratio <= position.unsqueeze(1) + 1


@torch.no_grad()
def joint_attention(
    query: Tensor, window_kv: Tensor, pool: Tensor, sink: Tensor, visible: Tensor, scale: float, window: int
) -> Tensor:
    """Head-summed attention to every visible pool entry, ``[B, S, P]``: what it would be if nothing were left out.

    One softmax over the last ``window`` keys, the sink and *all* visible entries. ``query`` is ``[B, S, H, D]``,
    ``window_kv`` ``[B, T, D]``, ``pool`` ``[B, P, D]``, ``sink`` ``[H]``, ``visible`` ``[S, P]``.
    """
    logits = scale * torch.einsum("bshd,bpd->bshp", query.float(), pool.float())
    logits = logits.masked_fill(~visible.unsqueeze(1), float("-inf"))
    rest = window_lse(query, window_kv, sink, None, window, scale).unsqueeze(-1)  # [B, S, H, 1]
    return torch.cat([rest, logits], -1).softmax(-1)[..., 1:].sum(2)


def oracle_selection(attention: Tensor, topk: int) -> Tensor:
    """The ``topk`` entries of each row with the most attention, ``[B, S, topk]``; meaningful in rows that count."""
    return attention.topk(topk, dim=-1).indices


def selection_mask(topk_idxs: Tensor, P: int) -> Tensor:
    """``[B, S, P]`` bool, true for selected entries; an index outside ``[0, P)`` is an empty slot."""
    slots = torch.where((topk_idxs >= 0) & (topk_idxs < P), topk_idxs, P)
    mask = torch.zeros(*topk_idxs.shape[:-1], P + 1, dtype=torch.bool, device=topk_idxs.device)
    return mask.scatter_(-1, slots, True)[..., :P]


def counting_rows(visible: Tensor, topk: int) -> Tensor:
    """``[S]`` bool: rows that see more than ``topk`` entries, so that selecting means leaving some out."""
    return visible.sum(-1) > topk


def chance(visible: Tensor, topk: int) -> float:
    """Expected recall of a random selection: ``topk / visible``, averaged over the rows that count."""
    counts = visible.sum(-1)[counting_rows(visible, topk)]
    return (topk / counts.double()).mean().item()


def recall(selected: Tensor, oracle: Tensor, rows: Tensor) -> Tensor:
    """Share of the oracle's entries that were selected, averaged over ``rows``; ``[B, S, P]`` masks, ``[S]`` rows."""
    hits = (selected & oracle).sum(-1) / oracle.sum(-1).clamp(min=1)
    return hits[:, rows].mean()


def captured_mass(attention: Tensor, selected: Tensor, rows: Tensor) -> Tensor:
    """Attention mass of the selected entries over that of all visible ones, both summed over ``rows``."""
    return (attention * selected)[:, rows].sum() / attention[:, rows].sum()
