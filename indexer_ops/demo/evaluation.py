"""How well the indexers of a model select, on held-out text."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from ..api import distill_loss
from ..integrations.transformers import enable_indexer_distillation
from ..integrations.transformers.layer_tap import PASS_KEYWORD
from ..integrations.transformers.training_pass import LayerView
from . import measure

SEQUENCES_AT_ONCE = 4


@dataclass(frozen=True)
class LayerQuality:
    """One CSA layer; over rows with more than topk visible entries, except for ``kl`` (all with a selected entry)."""

    chance: float
    recall: float
    captured: float
    captured_best: float
    kl: float


@dataclass(frozen=True)
class Evaluation:
    """A model on held-out text: the LM loss in nats a byte, and each CSA layer by its index."""

    lm_loss: float
    layers: dict[int, LayerQuality]


class _Recorder:
    """Takes the place of a training pass: keeps what each layer saw instead of adding a loss."""

    def __init__(self) -> None:
        self.views: dict[int, LayerView] = {}

    def distill(self, layer: int, view: LayerView, attention_mask: Tensor | None, output: Tensor) -> Tensor:
        self.views[layer] = view
        return output


def observe(model: DeepseekV4ForCausalLM, input_ids: Tensor) -> tuple[dict[int, LayerView], float]:
    """What attention and indexer of each CSA layer see, by layer index, and the LM loss; ``model`` is in ``eval()``."""
    recorder = _Recorder()
    is_tapped = hasattr(model.base_model, "indexer_distillation")
    handle = None if is_tapped else enable_indexer_distillation(model)
    try:
        outputs = model(input_ids=input_ids, labels=input_ids, use_cache=False, **{PASS_KEYWORD: recorder})
    finally:
        if handle is not None:
            handle.disable()
    return recorder.views, outputs.loss.item()


@torch.no_grad()
def evaluate(model: DeepseekV4ForCausalLM, sequences: Tensor) -> Evaluation:
    """Measure ``model`` on ``sequences``, ``[B, S]`` token ids; it comes back in the mode it was in."""
    ratio = model.config.compress_rates["compressed_sparse_attention"]
    topk = model.config.index_topk
    was_training = model.training
    model.eval()
    lm_losses: list[float] = []
    seen: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for input_ids in sequences.split(SEQUENCES_AT_ONCE):
        views, lm_loss = observe(model, input_ids)
        lm_losses += [lm_loss] * len(input_ids)
        for layer, view in views.items():
            visible = measure.visible_entries(view.query.shape[1], view.pool.shape[1], ratio, view.query.device)
            attention = measure.joint_attention(
                view.query, view.window_kv, view.pool, view.sink, visible, view.scale, view.window
            )
            selected = measure.selection_mask(view.topk_idxs, view.pool.shape[1])
            seen.setdefault(layer, []).append((attention, selected, _kl(view).expand(len(input_ids))))
    model.train(was_training)
    layers = {}
    for layer, parts in seen.items():
        attention, selected, kl = (torch.cat(part) for part in zip(*parts, strict=True))
        rows = measure.counting_rows(visible, topk)
        oracle = measure.selection_mask(measure.oracle_selection(attention, topk), attention.shape[-1])
        layers[layer] = LayerQuality(
            chance=measure.chance(visible, topk),
            recall=measure.recall(selected, oracle, rows).item(),
            captured=measure.captured_mass(attention, selected, rows).item(),
            captured_best=measure.captured_mass(attention, oracle, rows).item(),
            kl=kl.mean().item(),
        )
    return Evaluation(sum(lm_losses) / len(lm_losses), layers)


def _kl(view: LayerView) -> Tensor:
    return distill_loss(
        view.index_scores,
        view.topk_idxs,
        view.query,
        view.pool,
        scale=view.scale,
        window_kv=view.window_kv,
        sink=view.sink,
        window=view.window,
        reduction="valid_mean",
    )
