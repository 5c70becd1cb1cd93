"""The indexer of a CSA layer through ``indexer_ops.indexer_topk``: its own submodules, no dense scores.

``transformers``' ``DeepseekV4Indexer`` forms ``[B, S, Hi, P]`` products and ``[B, S, P]`` scores, and returns indices
alone. Queries, keys and head weights here come from the same submodules with the same rounding, keys go into the same
cache, and one op scores and selects.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4

from ...api import indexer_topk
from ...modules import pool_overlapping_windows


class Selection(NamedTuple):
    """What an indexer selected out of ``entries`` pool entries, and how it scored that."""

    index_scores: Tensor  # [B, S, K] float32, differentiable in the indexer's parameters
    topk_idxs: Tensor  # [B, S, K] int32 or int64, -1 where empty
    entries: int


def has_filled_cache(cache, layer_idx: int) -> bool:
    """Whether an earlier call left tokens of this layer in the cache."""
    return cache is not None and cache.layers[layer_idx].buffer_kv["indexer"] is not None


def select(
    indexer: deepseek_v4.DeepseekV4Indexer,
    hidden_states: Tensor,
    q_residual: Tensor,
    position_ids: Tensor,
    cache,
    layer_idx: int,
) -> Selection:
    """What ``indexer`` selects, for a sequence that starts here; ``cache`` is None or holds nothing yet."""
    batch, length, _ = hidden_states.shape
    keys = _index_keys(indexer, hidden_states, None if cache is None else cache.layers[layer_idx])
    cos, sin = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    q = indexer.q_b_proj(q_residual).view(batch, length, -1, indexer.head_dim)
    q = deepseek_v4.apply_rotary_pos_emb(q, cos, sin, unsqueeze_dim=2)
    scaling = indexer.scorer.weights_scaling * indexer.scorer.softmax_scale
    weights = indexer.scorer.weights_proj(hidden_states).float() * scaling
    entries = keys.shape[1]
    index_scores, topk_idxs = indexer_topk(
        q,
        keys.to(q.dtype),  # autocast may leave them in float32, and the fused op takes one dtype
        weights,
        entry_stop=((position_ids + 1) // indexer.compress_rate).expand(batch, length),
        topk=min(indexer.index_topk, entries),
        ratio=indexer.compress_rate,
    )
    return Selection(index_scores, topk_idxs, entries)


def _index_keys(indexer: deepseek_v4.DeepseekV4Indexer, hidden_states: Tensor, cache_layer) -> Tensor:
    """Keys of the pool entries, ``[B, P, Di]``."""
    values, gates = indexer.kv_proj(hidden_states), indexer.gate_proj(hidden_states)
    ratio = indexer.compress_rate
    batch, entries = values.shape[0], values.shape[1] // ratio
    if cache_layer is None:
        values, gates = values[:, : entries * ratio], gates[:, : entries * ratio]
    else:
        values, gates, _ = cache_layer.store_compression_weights("indexer", values, gates)
    values = values.view(batch, entries, ratio, 2 * indexer.head_dim)
    gates = gates.view(batch, entries, ratio, 2 * indexer.head_dim) + indexer.position_bias
    if cache_layer is not None and entries > 0:
        cache_layer.update_overlap_state("indexer", values, gates, indexer.head_dim)
    keys = indexer.kv_norm(pool_overlapping_windows(values, gates))
    positions = (torch.arange(entries, device=keys.device) * ratio).expand(batch, -1)
    cos, sin = indexer.rotary_emb(keys, position_ids=positions, layer_type=indexer.rope_layer_type)
    keys = deepseek_v4.apply_rotary_pos_emb(keys.unsqueeze(1), cos, sin).squeeze(1)
    return keys if cache_layer is None else cache_layer.update_compressor_states("indexer", keys)
