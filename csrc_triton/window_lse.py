"""Log-sum-exp over the sliding window and the sink.

One program holds ``queries x heads`` rows of logits against one tile of keys. Where all heads share the keys, the rows
are the heads of one query (or of several, where heads are few), so that a key is read once for all of them; where each
head has keys of its own, the rows are neighbouring queries of one head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .common import dot_precision, exp_of_difference, finite_or_zero, with_contiguous_last_dim


@triton.jit
def _tile_logits(
    query_rows, row_is_real, key_rows, key_is_real, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr,
    ALL_ROWS_REAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``scale * query . key``, ``[ROWS, KEYS]``; rows of keys that are not real are not read."""
    dim = tl.arange(0, DIM)
    logits = tl.zeros([ROWS, KEYS], tl.float32)
    for d in range(0, D, DIM):
        # [ROWS, DIM]
        if ALL_ROWS_REAL:
            query = tl.load(query_rows[:, None] + (d + dim)[None, :])
        else:
            query = tl.load(query_rows[:, None] + (d + dim)[None, :], mask=row_is_real[:, None], other=0.0)
        # [DIM, KEYS]
        keys = tl.load(key_rows[None, :] + (d + dim)[:, None], mask=key_is_real[None, :], other=0.0)
        logits = tl.dot(query, keys, logits, input_precision=PRECISION)
    return logits * scale


@triton.jit
def _joined(maximum, total, logits):
    """Running maximum and sum of exponentials, with the ``[ROWS, KEYS]`` logits of one more tile."""
    new_maximum = tl.maximum(maximum, tl.max(logits, 1))
    shift = finite_or_zero(new_maximum)
    total = total * exp_of_difference(maximum, shift) + tl.sum(exp_of_difference(logits, shift[:, None]), 1)
    return new_maximum, total


@triton.jit
def _window_lse_kernel(
    query_ptr, keys_ptr, sink_ptr, doc_start_ptr, lse_ptr,
    query_stride_b, query_stride_s, query_stride_h, keys_stride_b, keys_stride_t, keys_stride_h,
    doc_stride_b, doc_stride_s,
    S, T, H, query_offset, scale,
    WINDOW: tl.constexpr, D: tl.constexpr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    ALL_ROWS_REAL: tl.constexpr, HAS_SINK: tl.constexpr, HAS_DOC_START: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = QUERIES * HEADS
    # Programs are fewer than 2**31; a division of 64-bit integers takes a subroutine.
    program = tl.program_id(0)
    head_blocks = tl.cdiv(H, HEADS)
    query_blocks = tl.cdiv(S, QUERIES)
    head_block = program % head_blocks
    b = (program // head_blocks // query_blocks).to(tl.int64)
    # Late queries see the most keys: start them first.
    query_block = query_blocks - 1 - (program // head_blocks) % query_blocks

    row = tl.arange(0, ROWS)
    s = (query_block * QUERIES).to(tl.int64) + row // HEADS
    h = head_block.to(tl.int64) * HEADS + row % HEADS
    real = (s < S) & (h < H)
    position = query_offset + s
    # First and last key that each row sees, and that any row of the program may see.
    earliest = tl.zeros([ROWS], tl.int64)
    if WINDOW > 0:
        earliest = tl.maximum(position - WINDOW + 1, 0)
    if HAS_DOC_START:
        doc_start = tl.load(doc_start_ptr + b * doc_stride_b + s * doc_stride_s, mask=s < S, other=0)
        earliest = tl.maximum(earliest, doc_start.to(tl.int64))
    latest = tl.minimum(position, T - 1)
    first_position = query_offset + (query_block * QUERIES).to(tl.int64)
    end_key = tl.minimum(first_position + QUERIES, T)

    query_rows = query_ptr + b * query_stride_b + s * query_stride_s + h * query_stride_h
    # HEADS is 1 where keys are per head, and the stride 0 where they are shared.
    key_base = keys_ptr + b * keys_stride_b + head_block.to(tl.int64) * HEADS * keys_stride_h
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if WINDOW > 0 and WINDOW + QUERIES - 1 <= KEYS:
        # The window of every row lies in one tile. A loop of one turn took half as long again on an H200.
        key = first_position - WINDOW + 1 + tl.arange(0, KEYS)
        logits = _tile_logits(
            query_rows, real, key_base + key * keys_stride_t, (key >= 0) & (key < end_key), scale,
            ROWS, KEYS, D, DIM, ALL_ROWS_REAL, PRECISION,
        )  # fmt: skip
        visible = (key[None, :] >= earliest[:, None]) & (key[None, :] <= latest[:, None])
        maximum, total = _joined(maximum, total, tl.where(visible, logits, float("-inf")))
    else:
        first_key = tl.maximum(first_position - WINDOW + 1, 0) if WINDOW > 0 else first_position * 0
        for start in range(first_key, end_key, KEYS):
            key = start + tl.arange(0, KEYS)
            logits = _tile_logits(
                query_rows, real, key_base + key * keys_stride_t, key < end_key, scale,
                ROWS, KEYS, D, DIM, ALL_ROWS_REAL, PRECISION,
            )  # fmt: skip
            visible = (key[None, :] >= earliest[:, None]) & (key[None, :] <= latest[:, None])
            maximum, total = _joined(maximum, total, tl.where(visible, logits, float("-inf")))
    if HAS_SINK:
        sink = tl.load(sink_ptr + h, mask=h < H, other=0.0).to(tl.float32)
        maximum, total = _joined(maximum, total, sink[:, None])
    # Nothing visible and no sink: maximum is -inf and stays the answer.
    lse = maximum + tl.log(tl.where(total > 0, total, 1.0))
    tl.store(lse_ptr + (b * S + s) * H + h, lse, mask=real)


def window_lse(
    query: Tensor,
    window_kv: Tensor,
    sink: Tensor | None,
    doc_start: Tensor | None,
    window: int,
    scale: float,
    query_offset: int,
) -> Tensor:
    """``[B, S, H, D]`` queries against ``[B, T, D]`` or ``[B, T, H, D]`` keys to ``[B, S, H]`` float32, natural log."""
    B, S, H, D = query.shape
    T = window_kv.shape[1]
    lse = query.new_empty((B, S, H), dtype=torch.float32)
    if B * S * H * T == 0:
        return lse.fill_(float("-inf")) if sink is None else lse.copy_(sink.expand(B, S, H))
    per_head_keys = window_kv.dim() == 4
    if per_head_keys and (H == 1 or window_kv.stride(2) == 0):
        window_kv, per_head_keys = window_kv[:, :, 0], False  # an expanded view of shared keys
    query, window_kv = with_contiguous_last_dim(query), with_contiguous_last_dim(window_kv)
    config = configs.window_config(H, D, per_head_keys, query.element_size())
    grid = B * triton.cdiv(S, config.queries) * triton.cdiv(H, config.heads)
    _window_lse_kernel[(grid,)](
        query, window_kv, sink if sink is None else sink.contiguous(), doc_start, lse,
        *query.stride()[:3], *window_kv.stride()[:2], window_kv.stride(2) if per_head_keys else 0,
        *((0, 0) if doc_start is None else doc_start.stride()),
        S, T, H, query_offset, scale,
        WINDOW=window, D=D, QUERIES=config.queries, HEADS=config.heads, KEYS=config.keys, DIM=config.dim,
        ALL_ROWS_REAL=S % config.queries == 0 and H % config.heads == 0,
        HAS_SINK=sink is not None, HAS_DOC_START=doc_start is not None,
        PRECISION=dot_precision(query.dtype, configs.architecture(query.device)),
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    return lse
