"""Gradients of the selected index scores: one program a query, over its selected entries alone.

With ``a[h,k] = q[h] . k[idx[k]]`` recomputed and ``g[h,k] = ds[k] * weights[h] * 1[a > 0]``: ``dq[h] = sum_k g k``,
``dk[idx[k]] += sum_h g q`` and ``dweights[h] = sum_k ds[k] * relu(a)``.

An entry is selected by many queries, so dk is accumulated with atomics, and float additions that round give other bits
in another order. On the deterministic road no addition rounds: a contribution is split into limbs, each a multiple of
its own power of two, so coarse that every partial sum of a limb fits the 24 bits of a float32 (binned summation, after
Demmel and Nguyen, "Parallel Reproducible Summation", 2015). 64-bit integers would do the same, at 3.2 times the price
of plain atomics (H200, V4-Flash widths): there is no vector atomic for them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from .common import dot_precision, with_contiguous_last_dim

# 24 bits of a float32's significand, less one for the rounding of a bound to a power of two.
LIMB_BITS = 23
LIMBS = 2
# Queries whose contributions share one pair of limbs. With 8,192 the smallest step is 2**-21 of the largest
# contribution; longer sequences are summed a segment at a time, in order. (More limbs: 0.4 ms each at V4-Flash widths;
# bounds per entry: 0.24 ms.)
SEGMENT = 8192


@triton.jit
def _backward_kernel(
    grad_scores_ptr, q_ptr, k_ptr, weights_ptr, idxs_ptr, limb_unit_ptr, dq_ptr, dk_ptr, dweights_ptr,
    grad_stride_b, grad_stride_s, grad_stride_k,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_p,
    weights_stride_b, weights_stride_s, weights_stride_h, idxs_stride_b, idxs_stride_s,
    S, first_row, rows, P, topk, Hi, dk_stride_limb,
    Di: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, ENTRIES: tl.constexpr,
    NEEDS_Q: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_WEIGHTS: tl.constexpr, LIMBS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head_blocks = tl.cdiv(Hi, HEADS)
    head_block = (program % head_blocks).to(tl.int64)
    b = (program // head_blocks // rows).to(tl.int64)
    s = (first_row + rows - 1 - program // head_blocks % rows).to(tl.int64)
    h = head_block * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    head_mask = (h < Hi)[:, None] & (dim < Di)[None, :]
    # [HEADS, DIM]
    query_row = q_ptr + b * q_stride_b + s * q_stride_s
    query = tl.load(query_row + h[:, None] * q_stride_h + dim[None, :], mask=head_mask, other=0.0)
    # [HEADS]
    weight = tl.load(
        weights_ptr + b * weights_stride_b + s * weights_stride_s + h * weights_stride_h, mask=h < Hi, other=0.0
    ).to(tl.float32)
    dq = tl.zeros([HEADS, DIM], tl.float32)
    dweights = tl.zeros([HEADS], tl.float32)
    for start in range(0, topk, ENTRIES):
        slot = start + tl.arange(0, ENTRIES)
        idxs = tl.load(idxs_ptr + b * idxs_stride_b + s * idxs_stride_s + slot, mask=slot < topk, other=-1)
        idxs = idxs.to(tl.int64)
        valid = (idxs >= 0) & (idxs < P)
        if tl.max(valid.to(tl.int32), 0) > 0:
            grad = tl.load(
                grad_scores_ptr + b * grad_stride_b + s * grad_stride_s + slot * grad_stride_k, mask=valid, other=0.0
            ).to(tl.float32)
            entry = tl.where(valid, idxs, 0)
            entry_mask = valid[:, None] & (dim < Di)[None, :]
            # [ENTRIES, DIM]
            keys = tl.load(
                k_ptr + b * k_stride_b + entry[:, None] * k_stride_p + dim[None, :], mask=entry_mask, other=0.0
            )
            # [HEADS, ENTRIES]
            products = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
            if NEEDS_WEIGHTS:
                dweights += tl.sum(tl.maximum(products, 0.0) * grad[None, :], 1)
            gradient = tl.where(products > 0.0, grad[None, :] * weight[:, None], 0.0).to(query.dtype)
            if NEEDS_Q:
                dq = tl.dot(gradient, keys, dq, input_precision=PRECISION)
            if NEEDS_K:
                # In two halves of the head dim: whole, the gradient of a tile of keys spills.
                for half in tl.static_range(2):
                    half_dim = half * (DIM // 2) + tl.arange(0, DIM // 2)
                    # [HEADS, DIM // 2]
                    half_query = tl.load(
                        query_row + h[:, None] * q_stride_h + half_dim[None, :],
                        mask=(h < Hi)[:, None] & (half_dim < Di)[None, :],
                        other=0.0,
                    )
                    # [ENTRIES, DIM // 2]
                    dk = tl.dot(tl.trans(gradient), half_query, input_precision=PRECISION)
                    out = dk_ptr + (b * P + entry[:, None]) * Di + half_dim[None, :]
                    half_mask = valid[:, None] & (half_dim < Di)[None, :]
                    for limb in tl.static_range(LIMBS):
                        # Adding and taking away 1.5 * 2**23 units rounds to a multiple of the unit.
                        rounder = tl.load(limb_unit_ptr + limb) * 12582912.0
                        part = (dk + rounder) - rounder
                        tl.atomic_add(out + limb * dk_stride_limb, part, mask=half_mask, sem="relaxed")
                        dk -= part
                    if LIMBS == 0:
                        tl.atomic_add(out, dk, mask=half_mask, sem="relaxed")
    if NEEDS_Q:
        tl.store(dq_ptr + ((b * S + s) * Hi + h[:, None]) * Di + dim[None, :], dq, mask=head_mask)
    if NEEDS_WEIGHTS:
        tl.store(dweights_ptr + (b * S + s) * Hi + h, dweights, mask=h < Hi)


def _limb_units(grad_scores: Tensor, q: Tensor, weights: Tensor, is_valid: Tensor) -> Tensor:
    """Units of the limbs for these queries, ``[LIMBS]`` float32 powers of two, computed without a host read.

    A contribution of query t to an element of dk is at most ``max_k |ds| * sum_h |weights[h]| * max |q[h]|``; summed
    over t this bounds every partial sum, and so gives the first unit. The second limb holds what rounding to the first
    left, at most half a unit from each query.
    """
    of_heads = (weights.float().abs() * torch.linalg.vector_norm(q, float("inf"), dim=-1)).sum(-1)
    largest_grad = torch.where(is_valid, grad_scores, 0.0).abs().amax(-1)
    # frexp: bound < 2**exponent. The factor covers what float32 rounded down.
    first = torch.frexp((largest_grad * of_heads).sum(-1).amax() * 1.001).exponent - LIMB_BITS
    second = first - 1 + (q.shape[1] - 1).bit_length() - LIMB_BITS
    exponents = torch.stack([first, second]).clamp(min=-126)  # normal numbers alone
    return torch.ldexp(torch.ones(exponents.shape, device=q.device), exponents)


def indexer_topk_backward(
    grad_scores: Tensor, q: Tensor, k: Tensor, weights: Tensor, idxs: Tensor, output_mask: tuple[bool, bool, bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and weights in their dtypes; an empty tensor for one that ``output_mask`` does not ask for."""
    B, S, Hi, Di = q.shape
    P, topk = k.shape[1], idxs.shape[2]
    needs_q, needs_k, needs_weights = output_mask
    dq = q.new_empty((B, S, Hi, Di) if needs_q else (0,))
    dweights = weights.new_empty((B, S, Hi) if needs_weights else (0,))
    if not any(output_mask) or B * S * P * topk * Hi * Di == 0:
        dk = k.new_zeros((B, P, Di) if needs_k else (0,))
        return dq.zero_(), dk, dweights.zero_()
    q, k, idxs = (with_contiguous_last_dim(tensor) for tensor in (q, k, idxs))
    limbs = LIMBS if needs_k and torch.are_deterministic_algorithms_enabled() else 0
    segment = SEGMENT if limbs else S
    dk = k.new_zeros((B, P, Di) if needs_k else (0,), dtype=torch.float32)
    config = configs.indexer_backward_config(Hi, Di, q.element_size())
    for first_row in range(0, S, segment):
        rows = min(segment, S - first_row)
        accumulator, limb_units = dk, None
        if limbs:
            part = (slice(None), slice(first_row, first_row + rows))
            limb_units = _limb_units(grad_scores[part], q[part], weights[part], (idxs[part] >= 0) & (idxs[part] < P))
            accumulator = dk.new_zeros((limbs, B, P, Di))
        _backward_kernel[(B * rows * triton.cdiv(Hi, config.heads),)](
            grad_scores, q, k, weights, idxs, limb_units, dq, accumulator, dweights,
            *grad_scores.stride(), *q.stride()[:3], *k.stride()[:2], *weights.stride(), *idxs.stride()[:2],
            S, first_row, rows, P, topk, Hi, B * P * Di,
            Di=Di, DIM=max(32, triton.next_power_of_2(Di)), HEADS=config.heads, ENTRIES=config.entries,
            NEEDS_Q=needs_q, NEEDS_K=needs_k, NEEDS_WEIGHTS=needs_weights, LIMBS=limbs,
            PRECISION=dot_precision(q.dtype, configs.architecture(q.device)),
            num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
        if limbs:
            dk += accumulator.flip(0).sum(0)  # the small limb first
    return dq, dk.to(k.dtype), dweights
