"""What every kernel shares: safe exponentials on the device, strides and precision on the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite_or_zero(maximum):
    """The shift of a softmax: the maximum, or 0 where there is nothing (``-inf - -inf`` would be NaN)."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def exp_of_difference(value, shift):
    """``exp(value - shift)``. Subtracts before it scales to base 2: ``3e38 * log2(e)`` would overflow."""
    return tl.exp2((value - shift) * LOG2E)


def with_contiguous_last_dim(tensor: Tensor) -> Tensor:
    """The tensor itself where a kernel can read it in place, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def block_of(size: int, largest: int, smallest: int = 16) -> int:
    """Power of two that covers ``size``, kept between what ``tl.dot`` takes and what fits."""
    return max(smallest, min(largest, triton.next_power_of_2(size)))


def dividing_block(size: int, largest: int) -> int:
    """Largest power of two up to ``largest`` that divides ``size``: no mask along the head dim."""
    return min(largest, size & -size)


def dot_precision(dtype: torch.dtype, architecture: str) -> str:
    """``input_precision`` of ``tl.dot``: float32 follows ``torch.get_float32_matmul_precision()``."""
    # gfx950 has no tf32 instructions.
    if dtype != torch.float32 or architecture == "gfx950" or torch.get_float32_matmul_precision() == "highest":
        return "ieee"
    return "tf32"
