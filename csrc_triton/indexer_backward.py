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


@triton.jit
def _entry_load_kernel(
    grad_scores_ptr, idxs_ptr, of_heads_ptr, count_ptr, largest_ptr,
    grad_stride_b, grad_stride_s, grad_stride_k, idxs_stride_b, idxs_stride_s, S, P, topk, TOPK: tl.constexpr,
):  # fmt: skip
    """How many queries selected each entry, and the largest contribution that any of them can make to its dk.

    Counts and maxima do not depend on the order of their atomics. A maximum of floats that are not negative is one of
    their bits.
    """
    row = tl.program_id(0)
    b, s = (row // S).to(tl.int64), (row % S).to(tl.int64)
    k = tl.arange(0, TOPK)
    idxs = tl.load(idxs_ptr + b * idxs_stride_b + s * idxs_stride_s + k, mask=k < topk, other=-1).to(tl.int64)
    valid = (idxs >= 0) & (idxs < P)
    grad_row = grad_scores_ptr + b * grad_stride_b + s * grad_stride_s
    grad = tl.load(grad_row + k * grad_stride_k, mask=valid, other=0.0)
    bits = (tl.abs(grad) * tl.load(of_heads_ptr + b * S + s)).to(tl.int32, bitcast=True)
    tl.atomic_add(count_ptr + b * P + idxs, 1, mask=valid, sem="relaxed")
    tl.atomic_max(largest_ptr + b * P + idxs, bits, mask=valid, sem="relaxed")


@triton.jit
def _backward_kernel(
    grad_scores_ptr, q_ptr, k_ptr, weights_ptr, idxs_ptr, limb_unit_ptr, dq_ptr, dk_ptr, dweights_ptr,
    grad_stride_b, grad_stride_s, grad_stride_k,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_p,
    weights_stride_b, weights_stride_s, weights_stride_h, idxs_stride_b, idxs_stride_s,
    S, P, topk, Hi, dk_stride_limb,
    Di: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, ENTRIES: tl.constexpr,
    NEEDS_Q: tl.constexpr, NEEDS_K: tl.constexpr, NEEDS_WEIGHTS: tl.constexpr, LIMBS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head_blocks = tl.cdiv(Hi, HEADS)
    head_block = (program % head_blocks).to(tl.int64)
    b = (program // head_blocks // S).to(tl.int64)
    s = (S - 1 - program // head_blocks % S).to(tl.int64)
    h = head_block * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, DIM)
    head_mask = (h < Hi)[:, None] & (dim < Di)[None, :]
    # [HEADS, DIM]
    query = tl.load(
        q_ptr + b * q_stride_b + s * q_stride_s + h[:, None] * q_stride_h + dim[None, :], mask=head_mask, other=0.0
    )
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
                # [ENTRIES, DIM]
                dk = tl.dot(tl.trans(gradient), query, input_precision=PRECISION)
                out = dk_ptr + (b * P + entry[:, None]) * Di + dim[None, :]
                for limb in tl.static_range(LIMBS):
                    # Adding and taking away 1.5 * 2**23 units rounds to a multiple of the unit.
                    unit_ptr = limb_unit_ptr + limb * dk_stride_limb // Di + b * P + entry
                    rounder = tl.load(unit_ptr, mask=valid, other=0.0)[:, None] * 12582912.0
                    part = (dk + rounder) - rounder
                    tl.atomic_add(out + limb * dk_stride_limb, part, mask=entry_mask, sem="relaxed")
                    dk -= part
                if LIMBS == 0:
                    tl.atomic_add(out, dk, mask=entry_mask, sem="relaxed")
    if NEEDS_Q:
        tl.store(dq_ptr + ((b * S + s) * Hi + h[:, None]) * Di + dim[None, :], dq, mask=head_mask)
    if NEEDS_WEIGHTS:
        tl.store(dweights_ptr + (b * S + s) * Hi + h, dweights, mask=h < Hi)


def _limb_units(grad_scores: Tensor, q: Tensor, weights: Tensor, idxs: Tensor, P: int) -> Tensor:
    """Units of the limbs of each entry, ``[LIMBS, B, P]`` float32 powers of two.

    A contribution of query t to dk is at most ``|ds| * sum_h |weights[h]| * max |q[h]|``; times the number of queries
    that selected the entry it bounds every partial sum, and so gives the first unit. The second limb holds what
    rounding to the first left, at most half a unit from each of them.
    """
    B, S, topk = grad_scores.shape
    of_heads = (weights.float().abs() * q.abs().amax(-1)).sum(-1).contiguous()
    count, largest = (torch.zeros((B, P), dtype=torch.int32, device=q.device) for _ in range(2))
    _entry_load_kernel[(B * S,)](
        grad_scores, idxs, of_heads, count, largest, *grad_scores.stride(), *idxs.stride()[:2], S, P, topk,
        TOPK=triton.next_power_of_2(topk), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    # frexp: value < 2**exponent. The bounds are a little above what float32 rounded down.
    size = torch.frexp(largest.view(torch.float32) * 1.0001).exponent
    length = torch.frexp(count.float()).exponent
    first = size + length - LIMB_BITS
    exponents = torch.stack([first, first - 1 + length - LIMB_BITS]).clamp(min=-126)  # normal numbers alone
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
    accumulator = k.new_zeros((max(1, limbs), B, P, Di) if needs_k else (0,), dtype=torch.float32)
    limb_units = _limb_units(grad_scores, q, weights, idxs, P) if limbs else None
    config = configs.indexer_backward_config(Hi, Di, q.element_size())
    grid = B * S * triton.cdiv(Hi, config.heads)
    _backward_kernel[(grid,)](
        grad_scores, q, k, weights, idxs, limb_units, dq, accumulator, dweights,
        *grad_scores.stride(), *q.stride()[:3], *k.stride()[:2], *weights.stride(), *idxs.stride()[:2],
        S, P, topk, Hi, B * P * Di,
        Di=Di, DIM=max(16, triton.next_power_of_2(Di)), HEADS=config.heads, ENTRIES=config.entries,
        NEEDS_Q=needs_q, NEEDS_K=needs_k, NEEDS_WEIGHTS=needs_weights, LIMBS=limbs,
        PRECISION=dot_precision(q.dtype, configs.architecture(q.device)),
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    dk = accumulator.sum(0, dtype=torch.float64 if limbs else torch.float32) if needs_k else accumulator
    return dq, dk.to(k.dtype), dweights
