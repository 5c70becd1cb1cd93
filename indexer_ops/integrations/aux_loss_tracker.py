"""One slot of Megatron-core's auxiliary-loss tracker: what the Megatron and the Primus integration both write."""

import torch
from torch import Tensor

# The key in Megatron's tracker and logs. Source: AMD-AGI/Primus pull request 992, indexer_distill_loss.py.
INDEXER_DISTILL_LOSS_NAME = "indexer_distill_loss"


def save_layer_loss(
    loss: Tensor,
    layer_number: int,
    num_layers: int,
    *,
    factor: float = 1.0,
    avg_group: "torch.distributed.ProcessGroup | None" = None,
) -> None:
    """Add ``factor * loss`` to the slot of one layer under ``indexer_distill_loss``.

    Megatron-core returns silently for a layer number of None and writes to the last layer for 0
    (``moe_utils.save_to_aux_losses_tracker``, megatron-core 0.16.1), so both are refused here.

    Args:
        loss: any dtype, one element; recorded detached, in float32.
        layer_number: from 1 to ``num_layers``.
        num_layers: slots of the tracker, the same on every rank: layers of the whole model, multi-token prediction
            included.
        factor: on the value.
        avg_group: process group over which the tracker averages the value before it is printed.

    Raises:
        TypeError: ``layer_number`` is not an integer, ``loss`` not a tensor.
        ValueError: ``layer_number`` is out of range, or ``loss`` has not one element.
        ImportError: megatron-core is not installed.
    """
    if not isinstance(layer_number, int) or isinstance(layer_number, bool):
        raise TypeError(f"layer_number must be an int from 1 to {num_layers}, got {layer_number!r}")
    if not 1 <= layer_number <= num_layers:
        raise ValueError(f"layer_number must be from 1 to {num_layers} (num_layers), got {layer_number}")
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a torch.Tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"loss must have one element, got shape {list(loss.shape)}")
    from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

    value = factor * loss.detach().float().reshape(())
    save_to_aux_losses_tracker(INDEXER_DISTILL_LOSS_NAME, value, layer_number, num_layers, avg_group=avg_group)
