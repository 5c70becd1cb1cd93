"""Attention over the selected entries, summed over heads: the target of the distillation.

A gathered entry serves every head of its query, so one program is one query and a block of heads. *Held*: all selected
logits of those heads stay in registers, so the denominator costs no second pass. *Tiled*: where a row does not fit, one
launch writes the log-sum-exp of each tile, a small one joins them, and a third recomputes the logits against the joint
denominator. Given the joint log-sum-exp, the third is all there is.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .common import dot_precision, exp_of_difference, finite_or_zero, with_contiguous_last_dim

# The two floors of the sum: see indexer_ops/reference.py. Spelled here too, for kernels import nothing from above.
JOINT_FLOOR = torch.finfo(torch.float32).tiny
SELECTED_ONLY_FLOOR = 1e-10


@triton.jit
def _batch_and_query(row, S):
    """Divided in 32 bits (rows are fewer than 2**31, and 64-bit division is slow), returned in 64 for the offsets.

    Late queries have the most valid entries: they start first.
    """
    return (row // S).to(tl.int64), (S - 1 - row % S).to(tl.int64)


@triton.jit
def _valid_entries(
    idxs_ptr, b, s, k, idxs_stride_b, idxs_stride_s, pool_ptr, pool_stride_b, pool_stride_p, P, K
):  # fmt: skip
    """Which of the slots ``k`` hold an entry, and where its row starts. Each ``[ENTRIES]``."""
    idxs = tl.load(idxs_ptr + b * idxs_stride_b + s * idxs_stride_s + k, mask=k < K, other=-1).to(tl.int64)
    valid = (idxs >= 0) & (idxs < P)
    return valid, pool_ptr + b * pool_stride_b + tl.where(valid, idxs, 0) * pool_stride_p


@triton.jit
def _gathered_logits(
    query_rows, entry_rows, head_is_real, valid, scale,
    HEADS: tl.constexpr, ENTRIES: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PRECISION: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
):  # fmt: skip
    """``scale * query . entry``, ``-inf`` on invalid slots, whose rows are not read.

    ``[HEADS, ENTRIES]`` or ``[ENTRIES, HEADS]``: the dim that is reduced comes last, for a thread holds much of a row
    and a reduction over the first dim goes through shared memory. What belongs to the first dim also takes fewer
    registers: a held row spilled with heads first.
    """
    dim = tl.arange(0, DIM)
    logits = tl.zeros([HEADS, ENTRIES] if HEADS_FIRST else [ENTRIES, HEADS], tl.float32)
    for d in range(0, D, DIM):
        if HEADS_FIRST:
            query = tl.load(query_rows[:, None] + (d + dim)[None, :], mask=head_is_real[:, None], other=0.0)
            entries = tl.load(entry_rows[None, :] + (d + dim)[:, None], mask=valid[None, :], other=0.0)
            logits = tl.dot(query, entries, logits, input_precision=PRECISION)
        else:
            entries = tl.load(entry_rows[:, None] + (d + dim)[None, :], mask=valid[:, None], other=0.0)
            query = tl.load(query_rows[None, :] + (d + dim)[:, None], mask=head_is_real[None, :], other=0.0)
            logits = tl.dot(entries, query, logits, input_precision=PRECISION)
    slot_is_valid = valid[None, :] if HEADS_FIRST else valid[:, None]
    return tl.where(slot_is_valid, logits * scale, float("-inf"))


@triton.jit
def _held_target_kernel(
    query_ptr, pool_ptr, idxs_ptr, lse_ptr, target_ptr,
    query_stride_b, query_stride_s, query_stride_h, pool_stride_b, pool_stride_p, idxs_stride_b, idxs_stride_s,
    lse_stride_b, lse_stride_s, lse_stride_h,
    S, P, K, scale,
    H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, ENTRIES: tl.constexpr, DIM: tl.constexpr,
    HAS_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Target of one row with all its logits in registers."""
    b, s = _batch_and_query(tl.program_id(0), S)
    k = tl.arange(0, ENTRIES)
    valid, entry_rows = _valid_entries(
        idxs_ptr, b, s, k, idxs_stride_b, idxs_stride_s, pool_ptr, pool_stride_b, pool_stride_p, P, K
    )
    target = tl.zeros([ENTRIES], tl.float32)
    for head_block in range(0, H, HEADS):
        h = head_block + tl.arange(0, HEADS)
        query_rows = query_ptr + b * query_stride_b + s * query_stride_s + h.to(tl.int64) * query_stride_h
        logits = _gathered_logits(
            query_rows, entry_rows, h < H, valid, scale, HEADS, ENTRIES, D, DIM, PRECISION, False
        )  # [ENTRIES, HEADS]
        maximum = tl.max(logits, 0)
        if HAS_LSE:
            lse = tl.load(
                lse_ptr + b * lse_stride_b + s * lse_stride_s + h * lse_stride_h, mask=h < H, other=float("-inf")
            )
            maximum = tl.maximum(maximum, lse)
        shift = finite_or_zero(maximum)
        exponential = exp_of_difference(logits, shift[None, :])
        total = tl.sum(exponential, 0)
        if HAS_LSE:
            total += exp_of_difference(lse, shift)
        share = tl.where((h < H) & (total > 0), 1.0 / tl.where(total > 0, total, 1.0), 0.0)
        target += tl.sum(exponential * share[None, :], 1)
    tl.store(target_ptr + (b * S + s) * K + k, target, mask=k < K)


@triton.jit
def _tile_of_program(S, K, ENTRIES: tl.constexpr):
    """Batch, query and tile of this program. The tiles of a query are neighbours: they read the same query rows."""
    program = tl.program_id(0)
    tiles = tl.cdiv(K, ENTRIES)
    b, s = _batch_and_query(program // tiles, S)
    return b, s, program % tiles, tiles


@triton.jit
def _tile_lse_kernel(
    query_ptr, pool_ptr, idxs_ptr, tile_lse_ptr,
    query_stride_b, query_stride_s, query_stride_h, pool_stride_b, pool_stride_p, idxs_stride_b, idxs_stride_s,
    S, P, K, scale,
    H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, ENTRIES: tl.constexpr, DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of one tile of selected entries, ``[B, S, tiles, H]``."""
    b, s, tile, tiles = _tile_of_program(S, K, ENTRIES)
    k = tile * ENTRIES + tl.arange(0, ENTRIES)
    valid, entry_rows = _valid_entries(
        idxs_ptr, b, s, k, idxs_stride_b, idxs_stride_s, pool_ptr, pool_stride_b, pool_stride_p, P, K
    )
    any_valid = tl.max(valid.to(tl.int32), 0) > 0
    out = tile_lse_ptr + ((b * S + s) * tiles + tile) * H
    for head_block in range(0, H, HEADS):
        h = head_block + tl.arange(0, HEADS)
        lse = tl.full([HEADS], float("-inf"), tl.float32)
        if any_valid:
            query_rows = query_ptr + b * query_stride_b + s * query_stride_s + h.to(tl.int64) * query_stride_h
            logits = _gathered_logits(
                query_rows, entry_rows, h < H, valid, scale, HEADS, ENTRIES, D, DIM, PRECISION, True
            )  # [HEADS, ENTRIES]
            maximum = tl.max(logits, 1)
            lse = maximum + tl.log(tl.sum(exp_of_difference(logits, finite_or_zero(maximum)[:, None]), 1))
        tl.store(out + h, lse, mask=h < H)


@triton.jit
def _join_kernel(
    lse_ptr, tile_lse_ptr, joint_lse_ptr, lse_stride_b, lse_stride_s, lse_stride_h, S, tiles,
    H: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Joint log-sum-exp of a query from ``lse`` and those of its tiles, ``[B, S, H]``.

    A launch of its own: in each of the eight tiles of V4-Pro it cost 0.3 ms a pass on an H200, here 0.02.
    """
    b, s = _batch_and_query(tl.program_id(0), S)
    h = tl.arange(0, HEADS)[None, :]
    t = tl.arange(0, TILES)[:, None]
    # [TILES, HEADS]
    tile_lse = tl.load(
        tile_lse_ptr + ((b * S + s) * tiles + t) * H + h, mask=(t < tiles) & (h < H), other=float("-inf")
    )
    maximum = tl.max(tile_lse, 0)[None, :]
    if HAS_LSE:
        lse_row = lse_ptr + b * lse_stride_b + s * lse_stride_s
        lse = tl.load(lse_row + h * lse_stride_h, mask=h < H, other=float("-inf"))
        maximum = tl.maximum(maximum, lse)
    shift = finite_or_zero(maximum)
    total = tl.sum(exp_of_difference(tile_lse, shift), 0)[None, :]
    if HAS_LSE:
        total += exp_of_difference(lse, shift)
    joint_lse = maximum + tl.log(tl.where(total > 0, total, 1.0))
    tl.store(joint_lse_ptr + (b * S + s) * H + h, joint_lse, mask=h < H)


@triton.jit
def _tile_target_kernel(
    query_ptr, pool_ptr, idxs_ptr, joint_lse_ptr, target_ptr,
    query_stride_b, query_stride_s, query_stride_h, pool_stride_b, pool_stride_p, idxs_stride_b, idxs_stride_s,
    lse_stride_b, lse_stride_s, lse_stride_h,
    S, P, K, scale,
    H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, ENTRIES: tl.constexpr, DIM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Target of one tile against the joint log-sum-exp."""
    b, s, tile, _ = _tile_of_program(S, K, ENTRIES)
    k = tile * ENTRIES + tl.arange(0, ENTRIES)
    valid, entry_rows = _valid_entries(
        idxs_ptr, b, s, k, idxs_stride_b, idxs_stride_s, pool_ptr, pool_stride_b, pool_stride_p, P, K
    )
    target = tl.zeros([ENTRIES], tl.float32)
    if tl.max(valid.to(tl.int32), 0) > 0:
        for head_block in range(0, H, HEADS):
            h = head_block + tl.arange(0, HEADS)
            lse_row = joint_lse_ptr + b * lse_stride_b + s * lse_stride_s
            joint_lse = tl.load(lse_row + h * lse_stride_h, mask=h < H, other=0.0)
            query_rows = query_ptr + b * query_stride_b + s * query_stride_s + h.to(tl.int64) * query_stride_h
            logits = _gathered_logits(
                query_rows, entry_rows, h < H, valid, scale, HEADS, ENTRIES, D, DIM, PRECISION, False
            )  # [ENTRIES, HEADS]
            exponent = tl.where(valid[:, None] & (h < H)[None, :], logits - joint_lse[None, :], float("-inf"))
            target += tl.sum(exp_of_difference(tl.minimum(exponent, 0.0), 0.0), 1)
    tl.store(target_ptr + (b * S + s) * K + k, target, mask=k < K)


@triton.jit
def _normalize_kernel(target_ptr, K, floor, WIDTH: tl.constexpr):
    """Divide a row by its sum, in place."""
    row = target_ptr + tl.program_id(0).to(tl.int64) * K
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(0, K, WIDTH):
        k = start + tl.arange(0, WIDTH)
        total += tl.load(row + k, mask=k < K, other=0.0)
    divisor = tl.maximum(tl.sum(total, 0), floor)
    for start in range(0, K, WIDTH):
        k = start + tl.arange(0, WIDTH)
        tl.store(row + k, tl.load(row + k, mask=k < K, other=0.0) / divisor, mask=k < K)


@dataclass(frozen=True)
class TargetCall:
    """The operands of one call, as the kernels take them."""

    query: Tensor
    pool: Tensor
    topk_idxs: Tensor
    lse: Tensor | None
    joint: bool
    scale: float

    @classmethod
    def of(cls, query, pool, topk_idxs, noncompressed_lse, joint_lse, scale) -> "TargetCall":
        query, pool, topk_idxs = (with_contiguous_last_dim(tensor) for tensor in (query, pool, topk_idxs))
        if joint_lse is not None:
            return cls(query, pool, topk_idxs, joint_lse, True, scale)
        return cls(query, pool, topk_idxs, noncompressed_lse, False, scale)

    @property
    def floor(self) -> float:
        return SELECTED_ONLY_FLOOR if self.lse is None else JOINT_FLOOR

    @property
    def strides(self) -> tuple[int, ...]:
        return (*self.query.stride()[:3], *self.pool.stride()[:2], *self.topk_idxs.stride()[:2])

    @property
    def lse_strides(self) -> tuple[int, ...]:
        return (0, 0, 0) if self.lse is None else self.lse.stride()


def fill_target(call: TargetCall, target: Tensor) -> None:
    """Fill ``[B, S, K]`` with the unnormalised target: one launch, or three where no program holds a row."""
    (B, S, H, D), P, K = call.query.shape, call.pool.shape[1], call.topk_idxs.shape[2]
    operands, sizes = (call.query, call.pool, call.topk_idxs), (S, P, K, call.scale)
    architecture = configs.architecture(call.query.device)
    precision = dot_precision(call.query.dtype, architecture)
    config = configs.target_config(architecture, H, K, D, call.query.element_size(), call.joint)

    def options(tile: configs.TileConfig) -> dict:
        return dict(
            H=H, D=D, HEADS=tile.heads, ENTRIES=tile.entries, DIM=tile.dim, PRECISION=precision,
            num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True,
        )  # fmt: skip

    has_lse = call.lse is not None
    if config.held is not None:
        _held_target_kernel[(B * S,)](
            *operands, call.lse, target, *call.strides, *call.lse_strides, *sizes,
            HAS_LSE=has_lse, **options(config.held),
        )  # fmt: skip
        return
    joint_lse, lse_strides = call.lse, call.lse_strides
    if not call.joint:
        tiles = triton.cdiv(K, config.lse.entries)
        tile_lse = target.new_empty((B, S, tiles, H))
        _tile_lse_kernel[(B * S * tiles,)](*operands, tile_lse, *call.strides, *sizes, **options(config.lse))
        joint_lse = target.new_empty((B, S, H))
        _join_kernel[(B * S,)](
            call.lse, tile_lse, joint_lse, *call.lse_strides, S, tiles,
            H=H, HEADS=triton.next_power_of_2(H), TILES=triton.next_power_of_2(tiles), HAS_LSE=has_lse,
            num_warps=configs.join_warps(H, tiles), enable_fp_fusion=True,
        )  # fmt: skip
        lse_strides = joint_lse.stride()
    _tile_target_kernel[(B * S * triton.cdiv(K, config.target.entries),)](
        *operands, joint_lse, target, *call.strides, *lse_strides, *sizes, **options(config.target)
    )


def distill_target(
    query: Tensor,
    pool: Tensor,
    topk_idxs: Tensor,
    noncompressed_lse: Tensor | None,
    joint_lse: Tensor | None,
    scale: float,
    normalize: bool,
) -> Tensor:
    """``[B, S, H, D]`` queries, ``[B, P, D]`` pool and ``[B, S, K]`` indices to the ``[B, S, K]`` float32 target."""
    B, S, H, D = query.shape
    P, K = pool.shape[1], topk_idxs.shape[2]
    target = query.new_empty((B, S, K), dtype=torch.float32)
    if B * S * H * P * K == 0:
        return target.zero_()
    call = TargetCall.of(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale)
    fill_target(call, target)
    if normalize:
        width = min(1024, triton.next_power_of_2(K))
        _normalize_kernel[(B * S,)](target, K, call.floor, WIDTH=width, num_warps=1, enable_fp_fusion=True)
    return target
