"""The rungs: the same result, each time with one switch more."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from .. import _ops  # noqa: F401  (registers torch.ops.v4idx.*)
from . import eager
from .inputs import Case

_OPS = torch.ops.v4idx
PARTS = ("loss", "indexer", "together")
DIRECTIONS = ("forward", "backward", "both")
# Beyond, the eager rungs take seconds a call and tens of GB.
LONGEST_UNFUSED = 16 * 1024


@dataclass(frozen=True)
class Rung:
    """One way to compute one part. ``forward`` returns the outputs, the differentiable one first."""

    part: str
    name: str
    forward: Callable[[Case, str], tuple[Tensor, ...]]  # of the case and the backend of the ops
    fused: bool
    compiled: bool = False
    needs_window: bool = True  # a joint log-sum-exp holds the window already

    def why_not(self, S: int, on_gpu: bool) -> str | None:
        """Why this rung is not measured at length ``S``; None where it is."""
        if self.compiled and not on_gpu:
            return "torch.compile is measured on a GPU only"
        if not self.fused and S > LONGEST_UNFUSED:
            return f"unfused rungs stop at {LONGEST_UNFUSED:,} tokens"
        return None

    def leaves(self, case: Case) -> tuple[Tensor, ...]:
        return (case.index_scores,) if self.part == "loss" else (case.q, case.k, case.weights)

    def grad_output(self, case: Case) -> Tensor:
        return case.grad_scores if self.part == "indexer" else case.grad_kl


@cache
def _compiled(function: Callable) -> Callable:
    # Every chunk of a length has the same shapes: no symbolic sizes.
    return torch.compile(function, dynamic=False)


def _eager_loss(case: Case, backend: str) -> tuple[Tensor, ...]:
    return (eager.loss(case, case.index_scores, case.topk_idxs),)


def _compiled_loss(case: Case, backend: str) -> tuple[Tensor, ...]:
    return (eager.loss(case, case.index_scores, case.topk_idxs, _compiled(eager.loss_rows)),)


def _window(case: Case, backend: str) -> Tensor:
    preset = case.preset
    return _OPS.window_lse(case.query, case.window_kv, case.sink, None, preset.window, preset.scale, 0, backend)


def _three_ops(case: Case, backend: str) -> tuple[Tensor, ...]:
    lse = _window(case, backend)
    target = _OPS.distill_target(case.query, case.pool, case.topk_idxs, lse, None, case.preset.scale, True, backend)
    return (_OPS.distill_kl(case.index_scores, target, case.topk_idxs, eager.EPS, backend),)


def _one_pass(
    case: Case, backend: str, *, index_scores=None, topk_idxs=None, joint: bool = False
) -> tuple[Tensor, ...]:
    lses = (None, case.joint_lse) if joint else (_window(case, backend), None)
    scores = case.index_scores if index_scores is None else index_scores
    idxs = case.topk_idxs if topk_idxs is None else topk_idxs
    return (_OPS.distill_loss(scores, idxs, case.query, case.pool, *lses, case.preset.scale, eager.EPS, backend),)


def _eager_indexer(case: Case, backend: str) -> tuple[Tensor, ...]:
    return eager.indexer(case)


def _compiled_indexer(case: Case, backend: str) -> tuple[Tensor, ...]:
    return eager.indexer(case, _compiled(eager.index_rows))


def _fused_indexer(case: Case, backend: str) -> tuple[Tensor, ...]:
    preset = case.preset
    return _OPS.indexer_topk(case.q, case.k, case.weights, None, None, preset.K, preset.ratio, 0, backend)


def _eager_together(case: Case, backend: str) -> tuple[Tensor, ...]:
    return (eager.loss(case, *eager.indexer(case)),)


def _compiled_together(case: Case, backend: str) -> tuple[Tensor, ...]:
    selected = eager.indexer(case, _compiled(eager.index_rows))
    return (eager.loss(case, *selected, _compiled(eager.loss_rows)),)


def _fused_together(case: Case, backend: str) -> tuple[Tensor, ...]:
    index_scores, topk_idxs = _fused_indexer(case, backend)
    return _one_pass(case, backend, index_scores=index_scores, topk_idxs=topk_idxs)


RUNGS = (
    Rung("loss", "eager", _eager_loss, fused=False),
    Rung("loss", "compiled", _compiled_loss, fused=False, compiled=True),
    Rung("loss", "+ three ops", _three_ops, fused=True),
    Rung("loss", "+ one pass", _one_pass, fused=True),
    Rung("loss", "+ joint LSE", partial(_one_pass, joint=True), fused=True, needs_window=False),
    Rung("indexer", "eager", _eager_indexer, fused=False),
    Rung("indexer", "compiled", _compiled_indexer, fused=False, compiled=True),
    Rung("indexer", "+ one op", _fused_indexer, fused=True),
    Rung("together", "eager", _eager_together, fused=False),
    Rung("together", "compiled", _compiled_together, fused=False, compiled=True),
    Rung("together", "+ fused", _fused_together, fused=True),
)


def rungs_of(only: str | None) -> list[Rung]:
    """All, or those of one part."""
    return [rung for rung in RUNGS if only is None or rung.part == only]


def gradients(rung: Rung, case: Case, outputs: tuple[Tensor, ...], retain_graph: bool = False) -> tuple[Tensor, ...]:
    """Gradients of the rung's leaves, from its outputs."""
    return torch.autograd.grad(outputs[0], rung.leaves(case), rung.grad_output(case), retain_graph=retain_graph)
