"""KL of the target against the softmax of the index scores, and its gradient: rows in registers, nothing saved."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .common import exp_of_difference, finite_or_zero, with_contiguous_last_dim


@triton.jit
def rows_of_program(B, S, ROWS: tl.constexpr):
    """Row numbers, batches, queries (64 bits, for the offsets) and which of them exist. Each ``[ROWS]``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # rows are fewer than 2**31, and 64-bit division is slow
    return row.to(tl.int64), (row // S).to(tl.int64), (row % S).to(tl.int64), row // S < B


@triton.jit
def student_of(scores, valid):
    """Softmax of ``[ROWS, WIDTH]`` scores over valid slots, and the slots that count: none in an empty row."""
    scores = tl.where(valid, scores.to(tl.float32), float("-inf"))
    exponential = exp_of_difference(scores, finite_or_zero(tl.max(scores, 1))[:, None])
    total = tl.sum(exponential, 1)[:, None]
    return exponential / tl.where(total > 0, total, 1.0), valid & (total > 0)


@triton.jit
def kl_of(student, target, counted, eps):
    """``sum_k t * (log(t + eps) - log(p + eps))``, ``[ROWS]``."""
    terms = target * (tl.log(target + eps) - tl.log(student + eps))
    return tl.sum(tl.where(counted, terms, 0.0), 1)


@triton.jit
def kl_gradient_of(student, target, counted, eps):
    """``p*A - t*w`` with ``w = p/(p+eps)`` and ``A = sum_k t*w``, ``[ROWS, WIDTH]``."""
    weighted = tl.where(counted, target * (student / (student + eps)), 0.0)
    return tl.where(counted, student * tl.sum(weighted, 1)[:, None] - weighted, 0.0)


@triton.jit
def _load_rows(
    scores_ptr, target_ptr, idxs_ptr, b, s, row_is_real,
    scores_stride_b, scores_stride_s, target_stride_b, target_stride_s, idxs_stride_b, idxs_stride_s,
    K, WIDTH: tl.constexpr,
):  # fmt: skip
    """Student ``p``, target ``t`` and the slots that count. Each ``[ROWS, WIDTH]``.

    The three loads do not wait for one another: reading the scores of valid slots alone would cost a second latency.
    """
    k = tl.arange(0, WIDTH)[None, :]
    b, s = b[:, None], s[:, None]
    real = row_is_real[:, None] & (k < K)
    valid = tl.load(idxs_ptr + b * idxs_stride_b + s * idxs_stride_s + k, mask=real, other=-1) >= 0
    scores = tl.load(scores_ptr + b * scores_stride_b + s * scores_stride_s + k, mask=real, other=0.0)
    target = tl.load(target_ptr + b * target_stride_b + s * target_stride_s + k, mask=real, other=0.0)
    target = tl.where(valid, target.to(tl.float32), 0.0)
    student, counted = student_of(scores, valid)
    return student, target, counted


@triton.jit
def _kl_kernel(
    scores_ptr, target_ptr, idxs_ptr, kl_ptr,
    scores_stride_b, scores_stride_s, target_stride_b, target_stride_s, idxs_stride_b, idxs_stride_s,
    B, S, K, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, b, s, row_is_real = rows_of_program(B, S, ROWS)
    student, target, counted = _load_rows(
        scores_ptr, target_ptr, idxs_ptr, b, s, row_is_real,
        scores_stride_b, scores_stride_s, target_stride_b, target_stride_s, idxs_stride_b, idxs_stride_s, K, WIDTH,
    )  # fmt: skip
    tl.store(kl_ptr + row, kl_of(student, target, counted, eps), mask=row_is_real)


@triton.jit
def _kl_backward_kernel(
    grad_kl_ptr, scores_ptr, target_ptr, idxs_ptr, grad_scores_ptr,
    grad_stride_b, grad_stride_s,
    scores_stride_b, scores_stride_s, target_stride_b, target_stride_s, idxs_stride_b, idxs_stride_s,
    B, S, K, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row, b, s, row_is_real = rows_of_program(B, S, ROWS)
    student, target, counted = _load_rows(
        scores_ptr, target_ptr, idxs_ptr, b, s, row_is_real,
        scores_stride_b, scores_stride_s, target_stride_b, target_stride_s, idxs_stride_b, idxs_stride_s, K, WIDTH,
    )  # fmt: skip
    grad_kl = tl.load(grad_kl_ptr + b * grad_stride_b + s * grad_stride_s, mask=row_is_real, other=0.0)
    gradient = grad_kl.to(tl.float32)[:, None] * kl_gradient_of(student, target, counted, eps)
    k = tl.arange(0, WIDTH)[None, :]
    tl.store(grad_scores_ptr + row[:, None] * K + k, gradient, mask=row_is_real[:, None] & (k < K))


def row_strides(*tensors: Tensor) -> list[int]:
    return [tensor.stride(dim) for tensor in tensors for dim in (0, 1)]


def distill_kl(index_scores: Tensor, target: Tensor, topk_idxs: Tensor, eps: float) -> Tensor:
    """``[B, S, K]`` scores, target and indices to ``[B, S]`` float32."""
    B, S, K = index_scores.shape
    if B * S * K == 0:
        return index_scores.new_zeros((B, S), dtype=torch.float32)
    rows = [with_contiguous_last_dim(tensor) for tensor in (index_scores, target, topk_idxs)]
    kl = index_scores.new_empty((B, S), dtype=torch.float32)
    config = configs.kl_config(K)
    _kl_kernel[(triton.cdiv(B * S, config.rows),)](
        *rows, kl, *row_strides(*rows), B, S, K, eps,
        ROWS=config.rows, WIDTH=config.width, num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return kl


def distill_kl_backward(grad_kl: Tensor, index_scores: Tensor, target: Tensor, topk_idxs: Tensor, eps: float) -> Tensor:
    """``[B, S]`` gradient of the KL to the ``[B, S, K]`` gradient of the scores, in the scores' dtype."""
    B, S, K = index_scores.shape
    grad_scores = index_scores.new_empty((B, S, K))
    if B * S * K == 0:
        return grad_scores
    rows = [with_contiguous_last_dim(tensor) for tensor in (index_scores, target, topk_idxs)]
    config = configs.kl_config(K)
    _kl_backward_kernel[(triton.cdiv(B * S, config.rows),)](
        grad_kl, *rows, grad_scores, *row_strides(grad_kl, *rows), B, S, K, eps,
        ROWS=config.rows, WIDTH=config.width, num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return grad_scores
