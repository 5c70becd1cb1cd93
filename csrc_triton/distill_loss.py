"""KL rows and the gradient of the index scores in one forward pass; the backward is one multiply.

The target is written where the gradient will stand, and one more launch turns each row into KL and gradient in place.
Doing that at the end of the program that holds the row's logits took longer, 0.74 ms against 0.48 at V4-Flash widths on
an H200: that program has a multiprocessor to itself, which then waits for every step of two softmaxes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .common import with_contiguous_last_dim
from .distill_kl import kl_gradient_of, kl_of, row_strides, rows_of_program, student_of
from .distill_target import TargetCall, fill_target


@triton.jit
def _row_loss_kernel(
    scores_ptr, idxs_ptr, kl_ptr, gradient_ptr,
    scores_stride_b, scores_stride_s, idxs_stride_b, idxs_stride_s,
    B, S, P, K, floor, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """KL and gradient of rows whose target stands, normalised or not, where the gradient is to go."""
    row, b, s, row_is_real = rows_of_program(B, S, ROWS)
    k = tl.arange(0, WIDTH)[None, :]
    real = row_is_real[:, None] & (k < K)
    idxs = tl.load(idxs_ptr + (b * idxs_stride_b + s * idxs_stride_s)[:, None] + k, mask=real, other=-1)
    scores = tl.load(scores_ptr + (b * scores_stride_b + s * scores_stride_s)[:, None] + k, mask=real, other=0.0)
    gradient_rows = gradient_ptr + row[:, None] * K + k
    target = tl.load(gradient_rows, mask=real, other=0.0)  # 0 on invalid slots
    target = target / tl.maximum(tl.sum(target, 1), floor)[:, None]
    student, counted = student_of(scores, (idxs >= 0) & (idxs < P))
    tl.store(kl_ptr + row, kl_of(student, target, counted, eps), mask=row_is_real)
    tl.store(gradient_rows, kl_gradient_of(student, target, counted, eps), mask=real)


@triton.jit
def _scale_rows_kernel(
    factor_ptr, rows_ptr, out_ptr, factor_stride_b, factor_stride_s, B, S, K, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """``out[row] = factor[row] * rows[row]``."""
    row, b, s, row_is_real = rows_of_program(B, S, ROWS)
    factor = tl.load(factor_ptr + b * factor_stride_b + s * factor_stride_s, mask=row_is_real, other=0.0)
    k = tl.arange(0, WIDTH)[None, :]
    offset, real = row[:, None] * K + k, row_is_real[:, None] & (k < K)
    tl.store(out_ptr + offset, factor.to(tl.float32)[:, None] * tl.load(rows_ptr + offset, mask=real), mask=real)


def distill_loss(
    index_scores: Tensor,
    topk_idxs: Tensor,
    query: Tensor,
    pool: Tensor,
    noncompressed_lse: Tensor | None,
    joint_lse: Tensor | None,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """KL rows ``[B, S]`` and the gradient of their sum in the scores ``[B, S, K]``, both float32."""
    B, S, H, D = query.shape
    P, K = pool.shape[1], topk_idxs.shape[2]
    kl = query.new_empty((B, S), dtype=torch.float32)
    gradient = query.new_empty((B, S, K), dtype=torch.float32)
    if B * S * H * P * K == 0:
        # Without heads the target is 0 everywhere, and so is t * log t; without entries there is nothing to learn.
        return kl.zero_(), gradient.zero_()
    index_scores = with_contiguous_last_dim(index_scores)
    call = TargetCall.of(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale)
    fill_target(call, gradient)
    config = configs.kl_config(K)
    _row_loss_kernel[(triton.cdiv(B * S, config.rows),)](
        index_scores, call.topk_idxs, kl, gradient, *row_strides(index_scores, call.topk_idxs),
        B, S, P, K, call.floor, eps,
        ROWS=config.rows, WIDTH=config.width, num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return kl, gradient


def distill_loss_backward(grad_kl: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad_kl[b,s] * gradient[b,s,k]`` in the dtype of the scores."""
    B, S, K = gradient.shape
    grad_scores = gradient.new_empty((B, S, K), dtype=dtype)
    if B * S * K == 0:
        return grad_scores
    config = configs.kl_config(K)
    _scale_rows_kernel[(triton.cdiv(B * S, config.rows),)](
        grad_kl, gradient, grad_scores, *grad_kl.stride(), B, S, K,
        ROWS=config.rows, WIDTH=config.width, num_warps=config.num_warps, enable_fp_fusion=True,
    )  # fmt: skip
    return grad_scores
