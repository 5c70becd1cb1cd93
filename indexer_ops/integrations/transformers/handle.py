"""Switching the loss on and off, and where a forward pass of the whole model begins and ends."""

import math
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4

from ...training.zero_loss import zero_loss
from .layer_tap import PASS_KEYWORD, LayerTap
from .training_pass import TrainingPass


def enable_indexer_distillation(
    model: PreTrainedModel, coeff: float = 1e-2, *, fused_indexer: bool = True
) -> "IndexerDistillation":
    """Make the lightning indexers of a DeepSeek-V4 model learn from attention.

    From now on, a forward pass in training mode with gradients enabled computes, for every CSA layer, the mean of
    ``KL(attention || indexer)`` over the rows that count (``indexer_ops.distill_loss``, ``reduction="valid_mean"``),
    and adds ``coeff`` times the mean over these layers to ``outputs.loss``. Without labels, or with a bare
    ``DeepseekV4Model``, there is nothing to add it to: add ``handle.loss`` to your own loss.

    The teacher is the attention that the layer really computes, its mask included: left padding, right padding and
    packed sequences as ``transformers`` masks them. (It separates packed sequences in the window but not in the pool,
    and only with ``use_cache=False`` and no ``attention_mask``.) Window keys that a mask hides *between* visible ones
    are taken as visible. A row counts if the mask lets it see its own key, so padding does not; nor does a row with
    nothing selected.

    The indexer is fed detached inputs and the teacher receives no gradient, so no other gradient changes. In
    ``eval()``, without gradients and while generating with a filled cache nothing is computed, likewise with a
    coefficient of 0; training then still gives the indexers gradients of zeros, so that ``DistributedDataParallel``
    finds every parameter used. Keep the loss enabled until the backward pass is over.

    Gradient checkpointing works in both modes. ``torch.compile`` of the model meets no break here; together with
    checkpointing, it needs ``torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True`` for that.

    The added loss is the mean of one call, so with gradient accumulation divide it as any mean. In
    ``transformers.Trainer``, which does not where it passes ``num_items_in_batch``, use ``trainer_callback``.

    Args:
        model: ``DeepseekV4ForCausalLM``, ``DeepseekV4Model`` or another model of ``transformers`` on top of the latter,
            in any dtype. Of a wrapped model (``DistributedDataParallel``, ``torch.compile``, PEFT), give the inner one.
        coeff: factor on the loss, finite and at least 0; ``handle.coeff`` changes it later.
        fused_indexer: where the loss is computed, score and select with ``indexer_ops.indexer_topk``, which forms no
            ``[B, S, P]`` matrix and breaks ties to the lowest index; ``indexer.scorer`` is not called then. False keeps
            the dense scorer and ``torch.topk``; so does an indexer whose ``forward`` was replaced before, as offloading
            does. Under autocast the fused road rounds index keys to the dtype of the index queries.

    Returns:
        The handle: ``.loss``, ``.per_layer``, ``.coeff``, ``.disable()``. The model keeps it as
        ``indexer_distillation``, on the ``DeepseekV4Model``, where a deep copy of the model finds its own.

    Raises:
        TypeError: ``model`` is not a DeepSeek-V4 model of ``transformers``, ``coeff`` is not a number, or
            ``fused_indexer`` is not a bool.
        ValueError: the model has no CSA layer, the loss is on already, or ``coeff`` is negative or not finite.
    """
    if not isinstance(fused_indexer, bool):
        raise TypeError(f"fused_indexer must be a bool, got {type(fused_indexer).__name__}")
    base_model = getattr(model, "base_model", None) if isinstance(model, PreTrainedModel) else None
    if not isinstance(base_model, deepseek_v4.DeepseekV4Model):
        raise TypeError(
            "model must be a DeepSeek-V4 model of transformers (DeepseekV4ForCausalLM, DeepseekV4Model), not wrapped "
            f"in anything, got {type(model).__name__}"
        )
    if hasattr(base_model, "indexer_distillation"):
        raise ValueError("model has the distillation loss on already: call disable() on its handle first")
    attentions = [layer.self_attn for layer in base_model.layers]
    attentions = [module for module in attentions if module.layer_type == "compressed_sparse_attention"]
    if not attentions:
        raise ValueError(
            "model must have at least one compressed_sparse_attention layer, the only kind with an indexer, got "
            f"layer_types={base_model.config.layer_types}"
        )
    return IndexerDistillation(model, base_model, attentions, coeff, fused_indexer)


class IndexerDistillation:
    """The distillation loss of one model, switched on; made by ``enable_indexer_distillation``."""

    def __init__(
        self,
        model: PreTrainedModel,
        base_model: deepseek_v4.DeepseekV4Model,
        attentions: list[deepseek_v4.DeepseekV4Attention],
        coeff: float,
        fused_indexer: bool,
    ) -> None:
        self.coeff = coeff
        self._loss: Tensor | None = None
        self._per_layer: dict[int, Tensor] = {}
        self._base_model = base_model
        self._layers = [LayerTap(module, fused_indexer) for module in attentions]
        self._hooks = [
            base_model.register_forward_pre_hook(self._begin, with_kwargs=True),
            base_model.register_forward_hook(self._finish, with_kwargs=True),
        ]
        if model is not base_model:
            self._hooks.append(model.register_forward_hook(self._add_to_outputs))
        base_model.indexer_distillation = self

    @property
    def loss(self) -> Tensor | None:
        """``coeff`` times the mean over CSA layers, of the last forward pass: a float32 scalar with its graph.

        It is part of ``outputs.loss`` already where the model was given labels. None after a pass in ``eval()`` or
        without gradients; a 0 after a training pass that computed nothing.
        """
        return self._loss

    @property
    def per_layer(self) -> dict[int, Tensor]:
        """The KL of each CSA layer in the last forward pass, by layer index: detached float32 scalars, no coefficient.

        Nothing is read back to the host before its caller does. Empty after a pass that computed nothing.
        """
        return dict(self._per_layer)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the CSA layers, the keys of ``per_layer``; empty after ``disable()``."""
        return tuple(layer.attention.layer_idx for layer in self._layers)

    @property
    def coeff(self) -> float:
        """Factor on the loss, finite and at least 0; holds from the next forward pass on."""
        return self._coeff

    @coeff.setter
    def coeff(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"coeff must be a number, got {type(value).__name__}")
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"coeff must be finite and at least 0, got {value}")
        self._coeff = float(value)

    def disable(self) -> None:
        """Put the model back as it was before; calling it again does nothing."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            layer.remove()
        if self._hooks:
            del self._base_model.indexer_distillation
        self._hooks, self._layers, self._loss, self._per_layer = [], [], None, {}

    def __getstate__(self) -> dict[str, Any]:
        # A model that is copied or pickled takes its handle along, but a tensor with a graph can be neither.
        return {**self.__dict__, "_loss": None, "_per_layer": {}}

    def _begin(self, base_model, args, kwargs):
        if getattr(base_model, "_is_replica", False):
            raise NotImplementedError(
                "nn.DataParallel shares the hooks of one model among threads; use DistributedDataParallel"
            )
        self._loss, self._per_layer = None, {}
        if self._coeff > 0 and base_model.training and torch.is_grad_enabled():
            kwargs = {**kwargs, PASS_KEYWORD: TrainingPass()}
        return args, kwargs

    def _finish(self, base_model, args, kwargs, output):
        if not (base_model.training and torch.is_grad_enabled()):
            return None
        training_pass = kwargs.get(PASS_KEYWORD)
        if training_pass is None or not training_pass.losses:
            self._loss = zero_loss(p for layer in self._layers for p in layer.indexer.parameters())
            return None
        self._per_layer = {layer: loss.detach() for layer, loss in training_pass.losses.items()}
        output, total = training_pass.finish(output)
        self._loss = total * (self._coeff / len(self._per_layer))
        return output

    def _add_to_outputs(self, model, args, output):
        if self._loss is None:
            return None
        if isinstance(output, tuple):
            # The loss comes first where labels were given; else logits do, which are no scalar.
            if output[0].dim() == 0:
                output = (output[0] + self._loss.to(output[0].device), *output[1:])
        elif output.loss is not None:
            output.loss = output.loss + self._loss.to(output.loss.device)
        return output
