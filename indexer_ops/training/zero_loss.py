"""What is left of the loss at coefficient 0."""

from collections.abc import Iterable

import torch
from torch import Tensor


def zero_loss(parameters: Iterable[Tensor]) -> Tensor:
    """A loss of 0 whose gradients are zeros, made in the backward pass.

    Instead of the distillation loss at coefficient 0: no op is called and nothing is saved, yet every parameter gets
    a gradient, without which ``DistributedDataParallel`` fails.

    Args:
        parameters: the indexers' parameters, at least one; of any shape, dtype and device.

    Returns:
        Scalar, float32, on the device of the first parameter.

    Raises:
        ValueError: there is no parameter.
    """
    parameters = tuple(parameters)
    if not parameters:
        raise ValueError("parameters must hold at least one tensor, got none")
    return _ZeroLoss.apply(*parameters)


class _ZeroLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(ctx.parameters, ctx.needs_input_grad, strict=True)
        return tuple(torch.zeros_like(parameter) if need else None for parameter, need in needed)
