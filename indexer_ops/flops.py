"""FLOP formulas of the private ops for ``torch.utils.flop_counter.FlopCounterMode``.

As in that mode, one multiply-add is two operations and only matrix products count, so the elementwise KL counts
nothing. Selected entries alone are counted (``K`` slots a query, empty ones included: a formula sees shapes, not
values), window keys at most ``window`` a query.
"""

import torch
from torch.utils.flop_counter import register_flop_formula


@register_flop_formula(torch.ops.v4idx._window_lse)
def _window_lse(query_shape, window_kv_shape, sink, doc_start, window, scale, query_offset, strict, out_val=None, **_):
    B, S, H, D = query_shape
    T = window_kv_shape[1]
    # Row s sees the keys up to position query_offset + s, the last `window` of them.
    keys = sum(_visible_keys(query_offset + s, window, T) for s in range(S))
    return 2 * B * H * D * keys


def _visible_keys(position: int, window: int, T: int) -> int:
    first = max(0, position - window + 1) if window > 0 else 0
    return max(0, min(position, T - 1) - first + 1)


@register_flop_formula(torch.ops.v4idx._distill_target)
def _distill_target(query_shape, pool_shape, topk_idxs_shape, *_, out_val=None, **__):
    B, S, H, D = query_shape
    return 2 * B * S * H * D * topk_idxs_shape[2]


@register_flop_formula(torch.ops.v4idx._distill_loss)
def _distill_loss(index_scores_shape, topk_idxs_shape, query_shape, *_, out_val=None, **__):
    B, S, H, D = query_shape
    return 2 * B * S * H * D * topk_idxs_shape[2]


@register_flop_formula(
    [
        torch.ops.v4idx._distill_kl,
        torch.ops.v4idx._distill_kl_backward,
        torch.ops.v4idx._distill_loss_backward,
    ]
)
def _elementwise(*_, out_val=None, **__):
    return 0


@register_flop_formula(torch.ops.v4idx._indexer_topk)
def _indexer_topk(q_shape, k_shape, weights_shape, entry_start, entry_stop, topk, ratio, query_offset, *_, **__):
    B, S, Hi, Di = q_shape
    P = k_shape[1]
    # Bounds are values, which a formula does not see: with them every entry counts.
    visible = S * P if entry_stop is not None else sum(min(P, (query_offset + s + 1) // ratio) for s in range(S))
    return 2 * B * Hi * Di * visible


@register_flop_formula(torch.ops.v4idx._indexer_topk_backward)
def _indexer_topk_backward(grad_scores_shape, q_shape, k_shape, weights_shape, idxs_shape, output_mask, *_, **__):
    B, S, Hi, Di = q_shape
    needs_q, needs_k, _ = output_mask
    # The products are recomputed, then each gradient is one more.
    return (1 + needs_q + needs_k) * 2 * B * S * Hi * Di * idxs_shape[2]
