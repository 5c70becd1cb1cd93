"""Heads sharded over ranks: sum the partial targets before they are normalised."""

import torch.distributed
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce


def sum_over_head_group(partial_target: Tensor, head_group: "torch.distributed.ProcessGroup") -> Tensor:
    """Sum ``partial_target`` over the ranks of ``head_group`` with a collective that torch.compile can trace.

    Each rank holds the same rows and other heads, so the head sum of the target is the sum of the ranks' sums.
    """
    return all_reduce(partial_target, "sum", head_group)
