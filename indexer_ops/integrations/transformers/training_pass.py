"""The losses of one training forward pass, and their gradients where no graph of the forward pass carries them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...api import distill_loss
from ...training.attach import attach_aux_loss


@dataclass(frozen=True)
class LayerView:
    """What attention and indexer of one CSA layer saw in one forward pass."""

    index_scores: Tensor  # [B, S, K] float32, differentiable in the indexer's parameters
    topk_idxs: Tensor  # [B, S, K] int32 or int64, -1 where empty
    query: Tensor  # [B, S, H, D], a view
    window_kv: Tensor  # [B, S, D], a view
    pool: Tensor  # [B, P, D], a view
    sink: Tensor  # [H]
    scale: float
    window: int


class TrainingPass:
    """The layer losses of one forward pass, and what the layers running again in its backward need to know.

    A layer loss is a side product of its layer with a graph of its own; that holds under non-reentrant checkpointing
    too, which recomputes what the graph saved. Reentrant checkpointing runs the layers without gradients and builds
    graphs during the backward pass only. Such losses are deferred: the forward pass has their values, and a layer that
    runs again attaches its loss to its output, with the gradient ``upstream`` that the sum of the losses received.
    """

    def __init__(self) -> None:
        self.losses: dict[int, Tensor] = {}
        self.is_over = False
        self.is_deferred = False
        self.upstream: Tensor | None = None
        self._rows: tuple[Tensor | None, Tensor | None] | None = None

    def distill(self, layer: int, view: LayerView, attention_mask: Tensor | None, output: Tensor) -> Tensor:
        """Compute the loss of one layer; returns ``output``, with the loss attached where it was deferred."""
        if self._rows is None:
            self._rows = _counting_rows(attention_mask, view.query.shape[0], view.query.shape[1])
        row_weight, doc_start = self._rows
        loss = distill_loss(
            view.index_scores,
            view.topk_idxs,
            view.query,
            view.pool,
            scale=view.scale,
            window_kv=view.window_kv,
            sink=view.sink,
            doc_start=doc_start,
            window=view.window,
            reduction="valid_mean",
            row_weight=row_weight,
        )
        if not self.is_over:
            self.losses[layer] = loss
            self.is_deferred |= not torch.is_grad_enabled()
        elif self.upstream is not None:
            output = attach_aux_loss(output, loss, self.upstream)
        return output

    def finish(self, output: Any) -> tuple[Any, Tensor]:
        """The model's output, and the sum of the layer losses with its gradient; no loss is recorded from here on."""
        self.is_over = True
        losses = list(self.losses.values())
        total = torch.stack([loss.to(losses[0].device) for loss in losses]).sum()
        if not self.is_deferred:
            return output, total
        if not output[0].requires_grad:
            raise ValueError(
                "reentrant gradient checkpointing recomputes a layer only if its inputs require gradients, which they "
                "do not, so the indexers would never learn: call model.enable_input_require_grads(), or "
                'model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
            )
        hidden_states, total = _KeepUpstream.apply(output[0], total, self)
        if isinstance(output, tuple):
            return (hidden_states, *output[1:]), total
        output.last_hidden_state = hidden_states
        return output, total


def _counting_rows(attention_mask: Tensor | None, batch: int, length: int) -> tuple[Tensor | None, Tensor | None]:
    """Which rows count and where their window starts, ``[B, S]`` each, read off the mask that attention is given.

    The mask is boolean or additive, ``[B or 1, heads or 1, S, T + P]``; a row that sees its own key is no padding.
    """
    if not isinstance(attention_mask, Tensor):
        return None, None
    mask = attention_mask[:, 0, :, :length]
    visible = (mask if mask.dtype == torch.bool else mask == 0).expand(batch, length, length)
    return visible.diagonal(dim1=1, dim2=2), visible.to(torch.int8).argmax(-1)


class _KeepUpstream(torch.autograd.Function):
    """Identity of the model's output and of the deferred losses' sum; keeps the gradient of the sum for the layers.

    Both go through one node because autograd then runs it before any layer, on any number of devices and threads.
    """

    @staticmethod
    def forward(ctx, hidden_states: Tensor, total: Tensor, training_pass: TrainingPass):
        ctx.training_pass = training_pass
        return hidden_states.view_as(hidden_states), total.view_as(total)

    @staticmethod
    def backward(ctx, grad_hidden_states: Tensor, grad_total: Tensor):
        # Autograd makes zeros of the one that nothing flows back to; the layers run again all the same.
        ctx.training_pass.upstream = grad_total
        return grad_hidden_states, grad_total, None
