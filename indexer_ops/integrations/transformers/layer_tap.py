"""Seeing what one CSA layer computes, and letting its indexer select with the fused op.

A hook on the indexer detaches its inputs; its scores and its selection come from ``fused_indexer``, or by hooks from
the indexer's own dense scorer. An attention function registered with ``transformers`` calls the one that the model uses
and sees what it is given: query, window keys, pool and mask. All act only during a ``TrainingPass``, which reaches the
layer as a keyword argument: a layer that gradient checkpointing runs again then meets the pass it belongs to, whatever
the model has been used for since.
"""

import copy

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek_v4

from .fused_indexer import Selection, has_filled_cache, select
from .training_pass import LayerView, TrainingPass

PASS_KEYWORD = "indexer_distillation_pass"
_ATTENTION_NAME = "indexer_distillation"


class LayerTap:
    """The hooks in one CSA layer, and what they hold between the indexer and the attention of one call."""

    def __init__(self, attention: deepseek_v4.DeepseekV4Attention, fused_indexer: bool) -> None:
        self.attention = attention
        self.indexer = attention.compressor.indexer
        self.training_pass: TrainingPass | None = None
        self.all_scores: Tensor | None = None
        self.selection: Selection | None = None
        self._hooks = [
            attention.register_forward_pre_hook(self._enter, with_kwargs=True),
            self.indexer.register_forward_pre_hook(self._detach_inputs),
        ]
        # A forward method that is not the class's belongs to somebody else, such as offloading to the host.
        self._is_fused = fused_indexer and "forward" not in vars(self.indexer)
        if self._is_fused:
            self.indexer.forward = self._select
        else:
            self._hooks.append(self.indexer.scorer.register_forward_hook(self._keep_scores))
            self._hooks.append(self.indexer.register_forward_hook(self._keep_selection))
        # A layer looks its attention function up by name in its config, which all layers and the model share: a config
        # of its own leaves masks, other layers and checkpoints alone.
        self.shared_config = attention.config
        attention.config = copy.copy(self.shared_config)
        attention.config._attn_implementation = _ATTENTION_NAME
        attention.config.indexer_tap = self

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._is_fused:
            del self.indexer.forward
        self.attention.config = self.shared_config

    def _enter(self, attention, args, kwargs):
        kwargs = dict(kwargs)
        self.training_pass = kwargs.pop(PASS_KEYWORD, None)
        return args, kwargs

    def _detach_inputs(self, indexer, args):
        if self.training_pass is None:
            return None
        return tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)

    def _select(self, hidden_states, q_residual, position_ids, cache, layer_idx):
        if self.training_pass is None or has_filled_cache(cache, layer_idx):
            forward = type(self.indexer).forward
            return forward(self.indexer, hidden_states, q_residual, position_ids, cache, layer_idx)
        self.selection = select(self.indexer, hidden_states, q_residual, position_ids, cache, layer_idx)
        return self.selection.topk_idxs.long()  # the compressor scatters with them

    def _keep_scores(self, scorer, args, all_scores):
        if self.training_pass is not None:
            self.all_scores = all_scores

    def _keep_selection(self, indexer, args, topk_idxs):
        if self.training_pass is not None:
            scores, self.all_scores = self.all_scores, None
            self.selection = Selection(scores.gather(-1, topk_idxs.clamp(min=0)), topk_idxs, scores.shape[-1])

    def take_view(self, query: Tensor, key: Tensor) -> LayerView | None:
        """What the layer saw, given attention's ``[B, H, S, D]`` query and ``[B, 1, T + P, D]`` key; once per call.

        None where the layer reads an earlier call's cache: its entries carry no graph, or that of another step.
        """
        selection = self.selection
        self.training_pass = self.selection = None
        length = query.shape[2]
        key = key.to(query.dtype)  # under autocast, transformers 5.17 norms keys to float32; attention casts them back
        if selection is None or key.shape[2] != length + selection.entries:
            return None
        return LayerView(
            index_scores=selection.index_scores,
            topk_idxs=selection.topk_idxs,
            query=query.transpose(1, 2),
            window_kv=key[:, 0, :length],
            pool=key[:, 0, length:],
            sink=self.attention.sinks,
            scale=self.attention.scaling,
            window=self.attention.sliding_window,
        )


def _attend_and_distill(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, Tensor | None]:
    tap = module.config.indexer_tap
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(
        tap.shared_config._attn_implementation, deepseek_v4.eager_attention_forward
    )
    output, weights = attend(module, query, key, value, attention_mask, **kwargs)
    training_pass = tap.training_pass
    if training_pass is not None:
        view = tap.take_view(query, key)
        if view is not None:
            output = training_pass.distill(module.layer_idx, view, attention_mask, output)
    return output, weights


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION_NAME, _attend_and_distill)
