"""The distillation loss in Megatron-core: attach it to a layer's output, record it, show it in the training log.

Numbers and names in this file are those of megatron-core 0.16.1, the version it is tested with:
``megatron/core/transformer/moe/moe_utils.py`` (tracker and auto scaler), ``.../moe/router.py`` (how the router uses
them) and ``pipeline_parallel/schedules.py`` (who sets the scale). Which names the training log prints is decided in
Megatron-LM's ``megatron/training/training.py``, ``training_log``, which that package does not ship. Models that
``training_log`` counts the layers of in another way (``hybrid_layer_pattern``) are not supported.

A layer with an indexer, in its forward pass::

    loss = indexer_ops.distill_loss(...)
    record_indexer_distill_loss(loss, layer_number, config, num_indexer_layers)
    hidden_states = attach_indexer_distill_loss(hidden_states, coeff * loss)

and once before training: ``report_in_training_log(megatron.training.training, args)``.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from .aux_loss_tracker import INDEXER_DISTILL_LOSS_NAME, save_layer_loss

__all__ = [
    "INDEXER_DISTILL_LOSS_NAME",
    "attach_indexer_distill_loss",
    "record_indexer_distill_loss",
    "report_in_training_log",
]

# What asks for the key, by the names of the arguments. Source: AMD-AGI/Primus pull request 992,
# indexer_distill_loss_logging patch.
MODEL_TYPE = "deepseek_v4"
COEFFICIENT_ARGUMENT = "v4_indexer_distill_loss_coeff"


def attach_indexer_distill_loss(output: Tensor, loss: Tensor, *, num_tokens: int | Tensor | None = None) -> Tensor:
    """``output`` unchanged; its backward also sends Megatron's auxiliary-loss scale into ``loss``.

    The scale is ``MoEAuxLossAutoScaler.main_loss_backward_scale`` at the time of the backward: the pipeline schedules
    set it to ``grad_scale * context_parallel_size / num_microbatches``, or ``grad_scale`` alone with
    ``calculate_per_token_loss``, for models with ``num_moe_experts``. It is 1 until a schedule has set it.

    Args:
        output: any tensor that the layer's result depends on.
        loss: the loss times its coefficient, one element.
        num_tokens: with ``calculate_per_token_loss`` the number of tokens in the micro-batch that count, since Megatron
            then divides all gradients by the number of tokens (``router.py``, ``attach_and_log_load_balancing_loss``);
            else None.

    Returns:
        Like ``output``.
    """
    return MoEAuxLossAutoScaler.apply(output, loss if num_tokens is None else loss * num_tokens)


def _slots(num_layers: int, mtp_num_layers: int | None) -> int:
    """Entries of the tracker: one a layer, those of multi-token prediction at the end (``router.py``)."""
    return num_layers + (mtp_num_layers or 0)


def _moe_layers(config: TransformerConfig) -> int:
    """What ``track_moe_metrics`` divides by."""
    frequency = config.moe_layer_freq
    if isinstance(frequency, int):
        count = len(range(0, config.num_layers, frequency))
    else:
        count = config.num_layers if frequency is None else sum(frequency)
    return count + (config.mtp_num_layers or 0)


def _group_of_rows() -> "torch.distributed.ProcessGroup | None":
    """The ranks that hold other rows of the batch: data and context parallel."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def record_indexer_distill_loss(
    loss: Tensor, layer_number: int, config: TransformerConfig, num_indexer_layers: int
) -> None:
    """Record the loss of one layer under ``indexer_distill_loss`` in Megatron-core's auxiliary-loss tracker.

    ``track_moe_metrics`` prints the sum over layers divided by the number of MoE layers, so the value is multiplied by
    ``MoE layers / num_indexer_layers`` here: printed is the mean over the layers that have an indexer, averaged over
    micro-batches (the log's ``loss_scale``) and over data- and context-parallel ranks. Per-layer scalars
    (``moe_per_layer_logging``) carry the same factor.

    Nothing is recorded while gradients are disabled: evaluation, and the first of the two passes of Megatron's
    activation checkpointing, which would count a layer twice.

    Args:
        loss: the mean over the rows of this rank, without its coefficient, one element.
        layer_number: the layer's number in the whole model, 1 for the first.
        config: its ``num_layers``, ``mtp_num_layers`` and ``moe_layer_freq`` are read.
        num_indexer_layers: layers with an indexer in the whole model, all pipeline stages together, 1 or more.

    Raises:
        TypeError: ``layer_number`` or ``num_indexer_layers`` is not an integer, ``loss`` not a tensor.
        ValueError: ``layer_number`` or ``num_indexer_layers`` is out of range, or ``loss`` has not one element.
    """
    slots = _slots(config.num_layers, config.mtp_num_layers)
    if not isinstance(num_indexer_layers, int):
        raise TypeError(f"num_indexer_layers must be an int, got {type(num_indexer_layers).__name__}")
    if not 1 <= num_indexer_layers <= slots:
        raise ValueError(f"num_indexer_layers must be from 1 to {slots}, the layers, got {num_indexer_layers}")
    if torch.is_grad_enabled():
        factor = _moe_layers(config) / num_indexer_layers
        save_layer_loss(loss, layer_number, slots, factor=factor, avg_group=_group_of_rows())


@dataclass(frozen=True)
class _TrackWithIndexerLoss:
    """``track_moe_metrics`` that reduces and prints ``indexer_distill_loss`` too."""

    original: Callable[..., None]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(self.original).bind(*args, **kwargs)
        names = call.arguments.get("track_names")
        # None stands for every key that the tracker holds.
        if names is not None and INDEXER_DISTILL_LOSS_NAME not in names:
            call.arguments["track_names"] = [*names, INDEXER_DISTILL_LOSS_NAME]
        if INDEXER_DISTILL_LOSS_NAME not in get_moe_layer_wise_logging_tracker():
            # A pipeline stage without an indexer takes part with zeros, and in the same groups: else the last stage,
            # which prints, would print one data-parallel rank's value.
            zero = torch.zeros((), device="cuda" if torch.cuda.is_available() else "cpu")
            slots = _slots(call.arguments["num_layers"], call.arguments.get("mtp_num_layers"))
            save_layer_loss(zero, 1, slots, avg_group=_group_of_rows())
        return self.original(*call.args, **call.kwargs)


def _wants_indexer_loss(args: Any) -> bool:
    """Looks at ``args`` alone, which Megatron parses alike on every rank: ranks that disagree on a key would hang."""
    if getattr(args, "model_type", None) != MODEL_TYPE:
        return False
    coefficient = getattr(args, COEFFICIENT_ARGUMENT, None) or 0.0
    if not (math.isfinite(coefficient) and coefficient >= 0):
        raise ValueError(f"{COEFFICIENT_ARGUMENT} must be finite and at least 0, got {coefficient}")
    return coefficient > 0


def report_in_training_log(training: ModuleType, args: Any) -> bool:
    """Make ``training_log`` of Megatron-LM print ``indexer_distill_loss``, where this run has that loss.

    ``training_log`` gives ``track_moe_metrics`` the names to reduce and print; a key it does not name is reduced over
    no ranks. The name ``track_moe_metrics`` in its module is wrapped, once however often this is called. Call it on
    every rank, before training. A run of another model, or with a coefficient of 0, gets the original function back.

    Args:
        training: the module ``megatron.training.training``.
        args: the arguments of the run; ``model_type`` must be ``"deepseek_v4"`` and ``v4_indexer_distill_loss_coeff``
            greater than 0 (absent and None are 0).

    Returns:
        Whether the key is printed.

    Raises:
        ValueError: the coefficient is negative or not finite.
        NotImplementedError: ``training`` has no ``track_moe_metrics``: another version's log works differently.

    Source: Megatron-LM ``training_log``; AMD-AGI/Primus pull request 992, which wraps the same function.
    """
    track = getattr(training, "track_moe_metrics", None)
    if track is None:
        raise NotImplementedError(
            f"training must have track_moe_metrics, as with megatron-core 0.16; {training.__name__} has not"
        )
    original = track.original if isinstance(track, _TrackWithIndexerLoss) else track
    wanted = _wants_indexer_loss(args)
    training.track_moe_metrics = _TrackWithIndexerLoss(original) if wanted else original
    return wanted
