"""Sending a loss into the backward pass of a stack that has no second value to return it by."""

import math

import torch
from torch import Tensor

# A name space of its own: the one of the public ops is complete once ``indexer_ops`` is imported.
_LIBRARY = torch.library.Library("v4idx_training", "DEF")
_LIBRARY.define("_scale_at_backward(Tensor scale, Tensor grad_output) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _read_scale(scale: Tensor, grad_output: Tensor) -> Tensor:
    return scale.clone()


def _scale_shape(scale: Tensor, grad_output: Tensor) -> Tensor:
    return scale.new_empty(scale.shape)


# An op, because its second argument ties the reading to the backward pass: without it, a compiled graph computes the
# gradient of the loss in its forward half, with the scale of that moment (seen in torch 2.13).
_LIBRARY.impl("_scale_at_backward", _read_scale, "CompositeExplicitAutograd")
torch.library.register_fake("v4idx_training::_scale_at_backward", _scale_shape, lib=_LIBRARY)
_SCALE_AT_BACKWARD = torch.ops.v4idx_training._scale_at_backward.default


def attach_aux_loss(output: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
    """``output`` unchanged; its backward pass also gives ``loss`` the gradient ``scale``.

    So ``attach_aux_loss(hidden, loss, s)`` in a layer does for the gradients what adding ``s * loss`` to the final loss
    does. Whatever multiplies the final loss (a gradient scaler, one over the number of micro-batches, one over a number
    of tokens) has to be in ``scale`` too, together with the coefficient.

    A tensor is read when the backward pass arrives, not before: fill it in place when a schedule knows the value, also
    after forward passes whose backward is still to come. In a graph of ``torch.compile`` such a change is followed
    (``aot_eager``) or raises ``RuntimeError`` in the backward pass (Inductor: a saved tensor was modified); it is never
    missed. With Inductor, change it between steps.

    Under activation checkpointing of either kind the loss counts once. Reentrant checkpointing needs an input that
    requires gradients, as always. Do not modify the result in place: autograd refuses that.

    Args:
        output: floating-point tensor of any shape that the final loss depends on, else nothing is sent.
        loss: one element, floating point; computed in the same forward pass.
        scale: one element on any device, or a number. A number must be finite; a tensor is not looked at, since that
            would synchronise.

    Returns:
        A view of ``output``, which requires a gradient if ``output`` or ``loss`` does.

    Raises:
        TypeError: ``output`` or ``loss`` is not a floating-point tensor, or ``scale`` neither a tensor nor a number.
        ValueError: ``loss`` or ``scale`` has not one element, or ``scale`` is a number that is not finite.

    Source: the idea of ``MoEAuxLossAutoScaler`` of Megatron-core, whose scale is one for the whole process.
    """
    for name, tensor in (("output", output), ("loss", loss)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name} must be a floating-point torch.Tensor, got {_kind(tensor)}")
    if isinstance(scale, bool) or not isinstance(scale, (Tensor, int, float)):
        raise TypeError(f"scale must be a torch.Tensor or a number, got {_kind(scale)}")
    if not isinstance(scale, Tensor):
        if not math.isfinite(scale):
            raise ValueError(f"scale must be finite, got {scale}")
        scale = loss.new_full((), scale)
    for name, tensor in (("loss", loss), ("scale", scale)):
        if tensor.numel() != 1:
            raise ValueError(f"{name} must have one element, got shape {list(tensor.shape)}")
    return _AttachLoss.apply(output, loss, scale.detach())


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        # Not saved for backward, which would forbid to fill it in between.
        ctx.scale = scale
        ctx.loss_shape, ctx.loss_dtype, ctx.loss_device = loss.shape, loss.dtype, loss.device
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = _SCALE_AT_BACKWARD(ctx.scale, grad_output)
        return grad_output, scale.to(dtype=ctx.loss_dtype, device=ctx.loss_device).reshape(ctx.loss_shape), None
