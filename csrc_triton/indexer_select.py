"""Exact top-k of score rows: best first, ties to the lowest index, the same bits on every run.

The k-th largest score is found by bisection over its 32 bits: each step counts the scores that reach a candidate, a
compare and an add an element, with the row in registers. What reaches it moves to the front in index order, and only
those ``topk`` are sorted, by score and then index.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .indexer_score import bound_arguments, visible_range


@triton.jit
def _ordered(scores):
    """An unsigned integer that grows with the score, and is 0 for ``-inf`` alone. ``-0.0`` counts as ``0.0``."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(scores == float("-inf"), 0, ordered)


@triton.jit
def _score_of(ordered):
    """Inverse of ``_ordered``; ``-inf`` for 0."""
    bits = (ordered ^ 0x80000000).to(tl.int32, bitcast=True)
    scores = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(ordered == 0, float("-inf"), scores)


@triton.jit
def _select_kernel(
    scores_ptr, candidate_idxs_ptr, entry_start_ptr, entry_stop_ptr, out_scores_ptr, out_idxs_ptr,
    start_stride_b, start_stride_s, stop_stride_b, stop_stride_s,
    out_stride_b, out_stride_s, out_stride_chunk,
    first_row, out_first_row, rows, P, columns, topk, ratio, query_offset,
    WIDTH: tl.constexpr, TOPK: tl.constexpr,
    HAS_CANDIDATES: tl.constexpr, HAS_START: tl.constexpr, HAS_STOP: tl.constexpr,
):  # fmt: skip
    """Top-k of one chunk of ``WIDTH`` columns of one row, in index order.

    Columns are entries, or (HAS_CANDIDATES) earlier winners with their indices, in index order either way.
    """
    program = tl.program_id(0)
    chunks = tl.cdiv(columns, WIDTH)
    chunk = (program % chunks).to(tl.int64)
    row = (program // chunks % rows).to(tl.int64)
    b = (program // chunks // rows).to(tl.int64)
    column = chunk * WIDTH + tl.arange(0, WIDTH)
    score_row = scores_ptr + (b * rows + row) * columns
    out_offset = b * out_stride_b + (out_first_row + row) * out_stride_s + chunk * out_stride_chunk
    if HAS_CANDIDATES:
        is_real = column < columns
        idxs = tl.load(candidate_idxs_ptr + (b * rows + row) * columns + column, mask=is_real, other=-1)
        readable = idxs >= 0
    else:
        start, stop = visible_range(
            b, first_row + row, True, entry_start_ptr, entry_stop_ptr,
            start_stride_b, start_stride_s, stop_stride_b, stop_stride_s, P, ratio, query_offset, HAS_START, HAS_STOP,
        )  # fmt: skip
        idxs = column.to(tl.int32)
        readable = (column >= start) & (column < stop)  # the slab holds nothing where no tile is visible
    ordered = _ordered(tl.load(score_row + column, mask=readable, other=float("-inf")))
    present = tl.sum((ordered > 0).to(tl.int32), 0)
    wanted = tl.minimum(present, topk)

    # The largest value that `wanted` scores reach; 1 where all of them are wanted.
    threshold = tl.full([], 1, tl.uint32)
    if present > topk:
        threshold = tl.full([], 0, tl.uint32)
        for step in range(0, 32):
            candidate = threshold | (tl.full([], 0x80000000, tl.uint32) >> step)
            reached = tl.sum((ordered >= candidate).to(tl.int32), 0)
            threshold = tl.where(reached >= wanted, candidate, threshold)
    above = (ordered > threshold).to(tl.int32)
    equal = (ordered == threshold).to(tl.int32)
    ties_wanted = wanted - tl.sum(above, 0)
    # Both counts of earlier columns in one scan: WIDTH is below 2**15.
    packed = above + (equal << 16)
    before = tl.cumsum(packed, 0) - packed
    ties_before = before >> 16
    chosen = (above > 0) | ((equal > 0) & (ties_before < ties_wanted))
    slot = (before & 0xFFFF) + tl.minimum(ties_before, ties_wanted)

    out_scores, out_idxs = out_scores_ptr + out_offset, out_idxs_ptr + out_offset
    k = tl.arange(0, TOPK)
    tl.store(out_scores + k, float("-inf"), mask=(k >= wanted) & (k < topk))
    tl.store(out_idxs + k, -1, mask=(k >= wanted) & (k < topk))
    tl.store(out_scores + slot, _score_of(ordered), mask=chosen)
    tl.store(out_idxs + slot, idxs, mask=chosen)


@triton.jit
def _sort_kernel(scores_ptr, idxs_ptr, topk, TOPK: tl.constexpr):
    """Sort a row of winners in place: best first, ties to the lowest index, unused slots last."""
    row = tl.program_id(0).to(tl.int64) * topk
    k = tl.arange(0, TOPK)
    scores = tl.load(scores_ptr + row + k, mask=k < topk, other=float("-inf"))
    idxs = tl.load(idxs_ptr + row + k, mask=k < topk, other=-1)
    # Score above, 31 bits of the complement of the index below, so that one descending sort breaks ties to the lowest
    # index; positive, for the sort compares signed integers. An unused slot is 0 in both parts.
    complement = tl.where(idxs < 0, 0, 0x7FFFFFFF - idxs)
    ranked = tl.sort((_ordered(scores).to(tl.int64) << 31) | complement.to(tl.int64), descending=True)
    ordered = (ranked >> 31).to(tl.uint32)
    idxs = tl.where(ordered == 0, -1, (0x7FFFFFFF - (ranked & 0x7FFFFFFF)).to(tl.int32))
    tl.store(scores_ptr + row + k, _score_of(ordered), mask=k < topk)
    tl.store(idxs_ptr + row + k, idxs, mask=k < topk)


def select_topk(
    scores: Tensor,
    entry_start: Tensor | None,
    entry_stop: Tensor | None,
    ratio: int,
    query_offset: int,
    first_row: int,
    out_scores: Tensor,
    out_idxs: Tensor,
) -> None:
    """Top-k of each row of the ``[B, rows, P]`` slab, in index order, into the outputs' rows from ``first_row`` on."""
    B, rows, P = scores.shape
    topk = out_scores.shape[2]
    bounds = (entry_start, entry_stop)
    candidates, columns = None, P
    while True:
        config = configs.select_config(columns)
        chunks = triton.cdiv(columns, config.width)
        if chunks == 1:
            winners, out_first_row, strides = (out_scores, out_idxs), first_row, (*out_scores.stride()[:2], 0)
        else:
            # A row that no program holds: the winners of each chunk, in index order, are the next round's candidates.
            shape = (B, rows, chunks * topk)
            winners, out_first_row = (scores.new_empty(shape), out_idxs.new_empty(shape)), 0
            strides = (rows * chunks * topk, chunks * topk, topk)
        _select_kernel[(B * rows * chunks,)](
            scores, candidates, *bounds, *winners, *bound_arguments(*bounds), *strides,
            first_row, out_first_row, rows, P, columns, topk, ratio, query_offset,
            WIDTH=config.width, TOPK=triton.next_power_of_2(topk), HAS_CANDIDATES=candidates is not None,
            HAS_START=entry_start is not None, HAS_STOP=entry_stop is not None,
            num_warps=config.num_warps, enable_fp_fusion=True,
        )  # fmt: skip
        if chunks == 1:
            return
        (scores, candidates), columns = winners, chunks * topk


def sort_topk(scores: Tensor, idxs: Tensor) -> None:
    """Sort the rows of the contiguous ``[B, S, topk]`` winners in place."""
    B, S, topk = scores.shape
    config = configs.sort_config(topk)
    _sort_kernel[(B * S,)](scores, idxs, topk, TOPK=config.width, num_warps=config.num_warps, enable_fp_fusion=True)
