"""Index scores of a slab of queries against every visible entry; and which entries are visible.

``score[s, p] = sum_h weights[s, h] * relu(q[s, h] . k[p])``. One program is a tile of queries and entries and walks
over the heads: the tile of keys is read once, and a head's products never leave the registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .common import dot_precision


@triton.jit
def visible_range(
    b, s, row_is_real, entry_start_ptr, entry_stop_ptr, start_stride_b, start_stride_s, stop_stride_b, stop_stride_s,
    P, ratio, query_offset, HAS_START: tl.constexpr, HAS_STOP: tl.constexpr,
):  # fmt: skip
    """First visible entry and the one past the last, clamped to the pool; equal where nothing is visible."""
    if HAS_STOP:
        stop = tl.load(entry_stop_ptr + b * stop_stride_b + s * stop_stride_s, mask=row_is_real, other=0).to(tl.int64)
    else:
        stop = (query_offset + s + 1) // ratio
    stop = tl.where(row_is_real, tl.minimum(tl.maximum(stop, 0), P), 0)
    start = stop * 0
    if HAS_START:
        start = tl.load(entry_start_ptr + b * start_stride_b + s * start_stride_s, mask=row_is_real, other=0).to(
            tl.int64
        )
        start = tl.minimum(tl.maximum(start, 0), stop)
    return start, stop


@triton.jit
def _score_kernel(
    q_ptr, k_ptr, weights_ptr, entry_start_ptr, entry_stop_ptr, scores_ptr,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_p, weights_stride_b, weights_stride_s, weights_stride_h,
    start_stride_b, start_stride_s, stop_stride_b, stop_stride_s,
    first_row, rows, P, Hi, ratio, query_offset,
    Di: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, ENTRIES: tl.constexpr,
    HAS_START: tl.constexpr, HAS_STOP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows ``first_row`` to ``first_row + rows`` of each batch into the ``[B, rows, P]`` slab; visible tiles alone."""
    program = tl.program_id(0)
    query_blocks = tl.cdiv(rows, QUERIES)
    entry_blocks = tl.cdiv(P, ENTRIES)
    entry_block = (program % entry_blocks).to(tl.int64)
    b = (program // entry_blocks // query_blocks).to(tl.int64)
    # Late queries see the most entries: start them first.
    query_block = (query_blocks - 1 - (program // entry_blocks) % query_blocks).to(tl.int64)
    row = query_block * QUERIES + tl.arange(0, QUERIES)
    s = first_row + row
    real = row < rows
    start, stop = visible_range(
        b, s, real, entry_start_ptr, entry_stop_ptr, start_stride_b, start_stride_s, stop_stride_b, stop_stride_s,
        P, ratio, query_offset, HAS_START, HAS_STOP,
    )  # fmt: skip
    # Rows that see nothing must not widen the range.
    sees = start < stop
    first_visible = tl.min(tl.where(sees, start, P), 0)
    end_visible = tl.max(tl.where(sees, stop, 0), 0)
    p = entry_block * ENTRIES + tl.arange(0, ENTRIES)
    if (entry_block * ENTRIES < end_visible) & ((entry_block + 1) * ENTRIES > first_visible):
        dim = tl.arange(0, DIM)
        # [DIM, ENTRIES]
        keys = tl.load(
            k_ptr + b * k_stride_b + p[None, :] * k_stride_p + dim[:, None],
            mask=(p < P)[None, :] & (dim < Di)[:, None],
            other=0.0,
        )
        query_rows = q_ptr + b * q_stride_b + s[:, None] * q_stride_s + dim[None, :]
        weight_rows = weights_ptr + b * weights_stride_b + s * weights_stride_s
        query_mask = real[:, None] & (dim < Di)[None, :]
        scores = tl.zeros([QUERIES, ENTRIES], tl.float32)
        for h in range(0, Hi):
            # [QUERIES, DIM]
            query = tl.load(query_rows + h * q_stride_h, mask=query_mask, other=0.0)
            weight = tl.load(weight_rows + h * weights_stride_h, mask=real, other=0.0).to(tl.float32)
            products = tl.dot(query, keys, input_precision=PRECISION)
            scores += weight[:, None] * tl.maximum(products, 0.0)
        out = scores_ptr + (b * rows + row[:, None]) * P + p[None, :]
        tl.store(out, scores, mask=real[:, None] & (p < P)[None, :])


def bound_arguments(entry_start: Tensor | None, entry_stop: Tensor | None) -> tuple[int, int, int, int]:
    """Strides of the two optional ``[B, S]`` bounds."""
    return (
        *((0, 0) if entry_start is None else entry_start.stride()),
        *((0, 0) if entry_stop is None else entry_stop.stride()),
    )


def index_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    entry_start: Tensor | None,
    entry_stop: Tensor | None,
    ratio: int,
    query_offset: int,
    first_row: int,
    scores: Tensor,
) -> None:
    """Fill the ``[B, rows, P]`` slab ``scores`` for queries from ``first_row`` on, where entries are visible."""
    _, _, Hi, Di = q.shape
    B, rows, P = scores.shape
    architecture = configs.architecture(q.device)
    config = configs.score_config(architecture, Di, q.element_size())
    grid = B * triton.cdiv(rows, config.queries) * triton.cdiv(P, config.entries)
    _score_kernel[(grid,)](
        q, k, weights, entry_start, entry_stop, scores,
        *q.stride()[:3], *k.stride()[:2], *weights.stride(), *bound_arguments(entry_start, entry_stop),
        first_row, rows, P, Hi, ratio, query_offset,
        Di=Di, DIM=max(16, triton.next_power_of_2(Di)), QUERIES=config.queries, ENTRIES=config.entries,
        HAS_START=entry_start is not None, HAS_STOP=entry_stop is not None,
        PRECISION=dot_precision(q.dtype, architecture),
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
