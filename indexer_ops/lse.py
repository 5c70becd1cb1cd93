"""Joining log-sum-exps that come from somewhere else: other attention kernels, a sink, shards of the keys."""

from functools import reduce

import torch
from torch import Tensor


def combine_lse(*lses: Tensor) -> Tensor:
    """``log(sum_i exp(lses[i]))``: the log-sum-exp over all keys, from those over parts of them.

    For instance ``joint_lse = combine_lse(window_part, sink, selected_part)``. Every part must be

    - a **natural** logarithm. Kernels that compute with ``exp2`` often return log2: multiply theirs by ``math.log(2)``.
      Nothing in the numbers tells one from the other: this function cannot notice, and the loss is silently wrong;
    - of the **scaled** logits;
    - **disjoint** from the others: a key that two parts cover counts twice. FlashMLA and cuDNN return a log-sum-exp
      *without* the sink, so join the sink; ``indexer_ops.window_lse(..., sink=sink)`` holds it already, so do not;
    - ``[B, S, H]``. Attention kernels often return ``[B, H, S]``: pass ``lse.transpose(1, 2)``. Where ``S == H`` a
      forgotten transposition cannot be noticed either.

    Args:
        *lses: one or more parts, ``[B, S, H]`` or, for what is the same in every row such as the sink, ``[H]``; at
            least one of them ``[B, S, H]``. float32, or float64. ``-inf`` stands for a part without keys; any finite
            value is safe, however large.

    Returns:
        ``[B, S, H]``, float64 if a part is, else float32; ``-inf`` where all parts are. Not differentiable: attention
        is the teacher.

    Raises:
        TypeError: a part is not a tensor, or neither float32 nor float64.
        ValueError: no part, none that is ``[B, S, H]``, or parts whose shapes or devices do not go together.
    """
    for i, lse in enumerate(lses):
        if not isinstance(lse, Tensor):
            raise TypeError(f"lses[{i}] must be a torch.Tensor, got {type(lse).__name__}")
        if lse.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"lses[{i}] must be torch.float32 or torch.float64, got {lse.dtype}")
    whole = next((lse for lse in lses if lse.dim() == 3), None)
    if whole is None:
        raise ValueError(f"at least one part must be [B, S, H], got shapes {[list(lse.shape) for lse in lses]}")
    for i, lse in enumerate(lses):
        if lse.shape not in (whole.shape, whole.shape[-1:]):
            raise ValueError(
                f"lses[{i}] must be [B, S, H] = {list(whole.shape)} or [H] = {list(whole.shape[-1:])}, "
                f"got {list(lse.shape)}"
            )
        if lse.device != whole.device:
            raise ValueError(f"all parts must be on one device, got {whole.device} and lses[{i}] on {lse.device}")
    dtype = torch.float64 if any(lse.dtype == torch.float64 for lse in lses) else torch.float32
    return reduce(torch.logaddexp, (lse.detach().to(dtype).expand(whole.shape) for lse in lses)).contiguous()
