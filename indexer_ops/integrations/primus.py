"""The indexer loss of AMD-AGI/Primus, by the same names, layouts and switches, computed by ``indexer_ops``.

A drop-in for ``primus/backends/megatron/core/transformer/indexer_distill_loss.py`` as of pull request 992. Its floors
(1e-10 renormalised over the selected entries alone, the smallest normal float32 with the joint denominator) and its
epsilon (1e-10) are those of ``distill_target`` and ``distill_kl``.

What differs: any number of selected entries and any head count run in the kernels; an index past the pool is an empty
slot instead of a read out of bounds; an empty slot is left out of the softmax whatever its score; ``sink`` without
``k_local`` is ignored there and here; a layer without a number raises in ``log_indexer_distill_loss``.

Environment switches, read at every call; any value but ``1`` is off, all are on by default:

- ``PRIMUS_V4_DISTILL_NONCOMP_LSE``: the joint denominator. Off: the old objective, kept to compare with.
- ``PRIMUS_V4_DISTILL_WINDOW_TRITON``, ``..._TARGET_TRITON``, ``..._KL_TRITON``: the fused kernels of the window, the
  target and the KL. Off: the eager composite for that part. Target and KL run in one pass unless they disagree.
"""

import math
import os
import sys

import torch
import torch.distributed
from torch import Tensor

from .. import api, reference
from ..distributed import sum_over_head_group
from .aux_loss_tracker import INDEXER_DISTILL_LOSS_NAME, save_layer_loss

__all__ = [
    "INDEXER_DISTILL_LOSS_NAME",
    "V4IndexerLossAutoScaler",
    "compute_indexer_distill_loss",
    "log_indexer_distill_loss",
    "noncompressed_lse",
]


def _is_on(switch: str) -> bool:
    return os.environ.get(f"PRIMUS_V4_DISTILL_{switch}", "1") == "1"


def _backend(switch: str) -> str:
    return "auto" if _is_on(switch) else "composite"


def _rows_first(name: str, tensor: Tensor) -> Tensor:
    """``[B, H, S, D]`` seen as ``[B, S, H, D]``; no copy."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dim() != 4:
        raise ValueError(f"{name} must be [B, H, S, D], got {tensor.dtype} {list(tensor.shape)}")
    return tensor.transpose(1, 2)


def _window_keys(k_local: Tensor, heads: int) -> Tensor:
    """``[B, S, D]`` where all heads share the keys, else ``[B, S, H, D]``; a view either way."""
    keys = _rows_first("k_local", k_local)
    if keys.shape[2] not in (1, heads):
        raise ValueError(f"k_local.shape[1] must be 1 or H = {heads} (from query), got {list(k_local.shape)}")
    # A stride of 0 over the heads is what ``expand`` leaves: the heads' keys are one and the same memory.
    is_shared = keys.shape[2] == 1 or (heads > 0 and keys.stride(2) == 0)
    return keys[:, :, 0] if is_shared else keys


def _window_lse(query: Tensor, k_local: Tensor, sink: Tensor | None, swa_window: int, softmax_scale: float) -> Tensor:
    query = _rows_first("query", query)
    keys = _window_keys(k_local, query.shape[2])
    backend = _backend("WINDOW_TRITON")
    return api.window_lse(query, keys, sink, window=swa_window, scale=softmax_scale, backend=backend)


def noncompressed_lse(
    *, query: Tensor, k_local: Tensor, sink: Tensor | None, swa_window: int, softmax_scale: float
) -> Tensor:
    """Log-sum-exp of the sliding window and the sink, in Primus' layout.

    Args:
        query: ``[B, H, S, D]``.
        k_local: window keys, ``[B, H, S, D]``; an expanded view of shared keys, or one head of them, is never copied.
        sink: ``[H]`` or None.
        swa_window: keys a query sees, itself included; 0 or less means all earlier ones.
        softmax_scale: factor on the products.

    Returns:
        ``[B, H, S]`` float32 (a view of ``[B, S, H]``), natural log. Not differentiable.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype or device.

    Source: Primus pull request 992, ``noncompressed_lse``; here ``indexer_ops.window_lse``.
    """
    return _window_lse(query, k_local, sink, swa_window, softmax_scale).transpose(1, 2)


def compute_indexer_distill_loss(
    *,
    index_topk_scores: Tensor,
    topk_idxs: Tensor,
    query: Tensor,
    pool: Tensor,
    softmax_scale: float,
    loss_coeff: float,
    head_reduce_group: "torch.distributed.ProcessGroup | None" = None,
    k_local: Tensor | None = None,
    sink: Tensor | None = None,
    swa_window: int = 0,
) -> Tensor:
    """``loss_coeff`` times the mean over all rows of ``KL(attention || indexer)`` over the selected entries.

    Args:
        index_topk_scores: the indexer's scores of the selected entries, ``[B, S, K]``; the only input that learns.
        topk_idxs: ``[B, S, K]`` int32 or int64; a slot outside ``[0, P)`` is empty, ``-1`` by habit.
        query: ``[B, H, S, D]``.
        pool: ``[B, P, D]``.
        softmax_scale: factor on the products, usually ``D**-0.5``.
        loss_coeff: factor on the loss, finite and at least 0. With 0 nothing is computed or saved, and the scores'
            gradients are zeros made at backward.
        head_reduce_group: process group over which the heads of ``query`` are sharded, or None.
        k_local: window keys, ``[B, H, S, D]``; an expanded view of shared keys is never copied. Without them each head
            is renormalised over its selected entries alone, and ``sink`` and ``swa_window`` take no part.
        sink: ``[H]`` or None.
        swa_window: keys a query sees, itself included; 0 or less means all earlier ones.

    Returns:
        Scalar, float32. Rows without a selected entry count as 0 in the mean.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype or device; ``loss_coeff`` is negative or
            not finite.

    Source: Primus pull request 992, ``compute_indexer_distill_loss``; DeepSeek-V3.2 (section 2.1, eq. 4).
    """
    if not (math.isfinite(loss_coeff) and loss_coeff >= 0):
        raise ValueError(f"loss_coeff must be finite and at least 0, got {loss_coeff}")
    if loss_coeff == 0:
        # A sum of no elements: its gradient is zeros of the scores' shape, and only that shape is kept.
        return index_topk_scores[:0].sum(dtype=torch.float32)
    lse = None
    if k_local is not None and _is_on("NONCOMP_LSE"):
        lse = _window_lse(query, k_local, sink, swa_window, softmax_scale)
    query = _rows_first("query", query)
    target_backend, kl_backend = _backend("TARGET_TRITON"), _backend("KL_TRITON")
    if target_backend == kl_backend:
        loss = api.distill_loss(
            index_topk_scores,
            topk_idxs,
            query,
            pool,
            scale=softmax_scale,
            noncompressed_lse=lse,
            head_group=head_reduce_group,
            backend=kl_backend,
        )
        return loss * loss_coeff
    target = api.distill_target(
        query,
        pool,
        topk_idxs,
        lse,
        scale=softmax_scale,
        normalize=head_reduce_group is None,
        backend=target_backend,
    )
    if head_reduce_group is not None:
        target = reference.normalized_target(sum_over_head_group(target, head_reduce_group), lse is not None)
    slots = reference.slots_in_pool(topk_idxs, pool)
    kl = api.distill_kl(index_topk_scores, target, slots, backend=kl_backend)
    return kl.sum() / max(kl.numel(), 1) * loss_coeff


class V4IndexerLossAutoScaler(torch.autograd.Function):
    """``apply(output, aux_loss)``: ``output`` unchanged; its backward also sends ``current_loss_scale`` into the loss.

    The scale is read at backward, so that a schedule that runs several micro-batches before their backward is followed:
    the one given to ``set_loss_scale``, else Megatron's ``MoEAuxLossAutoScaler.main_loss_backward_scale``, else 1.

    Source: Primus pull request 992. Megatron sets its scale to ``grad_scale * context_parallel_size /
    num_microbatches`` after each micro-batch's forward (megatron-core 0.16.1, ``pipeline_parallel/schedules.py``).
    """

    main_loss_backward_scale: Tensor | None = None

    @staticmethod
    def current_loss_scale(reference: Tensor) -> Tensor:
        """The scale, a tensor of one element with the dtype and device of ``reference``."""
        scale = V4IndexerLossAutoScaler.main_loss_backward_scale
        # Where nobody has imported Megatron, no schedule has set a scale; importing it here would take seconds.
        megatron = sys.modules.get("megatron.core.transformer.moe.moe_utils")
        if scale is None and megatron is not None:
            scale = megatron.MoEAuxLossAutoScaler.main_loss_backward_scale
        if scale is None:
            return torch.ones((), dtype=reference.dtype, device=reference.device)
        return scale.to(dtype=reference.dtype, device=reference.device)

    @staticmethod
    def forward(ctx, output: Tensor, aux_loss: Tensor) -> Tensor:
        ctx.empty_like_loss = aux_loss.new_empty(0)
        ctx.loss_shape = aux_loss.shape
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        scale = V4IndexerLossAutoScaler.current_loss_scale(ctx.empty_like_loss)
        return grad_output, scale.reshape(()).expand(ctx.loss_shape)

    @staticmethod
    def set_loss_scale(scale: Tensor | None) -> None:
        """Set the scale, a tensor of one element; None follows Megatron's again."""
        V4IndexerLossAutoScaler.main_loss_backward_scale = scale


def log_indexer_distill_loss(loss: Tensor | None, *, layer_number: int, num_layers: int, device: torch.device) -> None:
    """Record one layer's loss in Megatron's auxiliary-loss tracker, as Primus reports it.

    Every layer calls this, those without an indexer with None, so that the key is there on every rank. The printed
    value is the sum over layers divided by Megatron's count of MoE layers, as in Primus;
    ``indexer_ops.integrations.megatron.record_indexer_distill_loss`` prints the mean over layers with an indexer.

    Args:
        loss: one element, or None for zero.
        layer_number: from 1 to ``num_layers``.
        num_layers: layers of the whole model, multi-token prediction included.
        device: where the tracker holds its values.

    Raises:
        TypeError, ValueError: the layer has no number or one out of range, or ``loss`` has not one element.
        ImportError: megatron-core is not installed.

    Source: Primus pull request 992, ``log_indexer_distill_loss``, which drops the value of an unnumbered layer.
    """
    value = torch.zeros((), device=device) if loss is None else loss.detach().to(device)
    save_layer_loss(value, layer_number, num_layers)
