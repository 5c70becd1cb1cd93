"""The correctness gate: no speed-up is worth anything before the rungs below it agree with float64.

A fused rung may be off by twice what the composite is off on the same rows, and a band for the order of its sums. The
composite, and with it the whole comparison, must itself be right to half the digits of float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import reference, reference_indexer
from . import exact
from .eager import EPS
from .inputs import Case
from .ladder import Rung, gradients

# Consecutive rows, since the composite takes a run of positions; at the start, in the middle and at the end.
RUN, RUNS = 16, 4
COMPOSITE_BOUND = torch.finfo(torch.float32).eps ** 0.5


@dataclass(frozen=True)
class Check:
    """One quantity of one rung: relative errors in the norm against float64."""

    length: int
    part: str
    rung: str
    quantity: str
    error: float
    composite_error: float
    bound: float

    @property
    def passed(self) -> bool:
        # A NaN is not below anything.
        return self.error <= self.bound and self.composite_error <= COMPOSITE_BOUND + self.storage_rounding

    @property
    def storage_rounding(self) -> float:
        """Gradients of bfloat16 operands are stored in bfloat16, by the composite too."""
        return torch.finfo(torch.bfloat16).eps if self.quantity.startswith("gradient of ") else 0.0


def rounding_band(terms: int) -> float:
    """What float32 sums of this many terms may be off by, relative: the random walk of their roundings."""
    return torch.finfo(torch.float32).eps * terms**0.5


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """In the norm; infinity where infinities do not agree."""
    actual = actual.double()
    infinite = expected.isinf()
    if not torch.equal(actual.isinf(), infinite):
        return float("inf")
    difference = torch.where(infinite, 0.0, actual - torch.where(infinite, 0.0, expected)).norm()
    return float(difference / torch.where(infinite, 0.0, expected).norm().clamp(min=torch.finfo(torch.float64).tiny))


def checked_runs(S: int) -> list[slice]:
    """Up to RUNS runs of RUN rows, spread evenly from the first row to the last."""
    if S <= RUN * RUNS:
        return [slice(0, S)]
    return [slice(start, start + RUN) for start in (i * (S - RUN) // (RUNS - 1) for i in range(RUNS))]


def check(rung: Rung, case: Case, backend: str) -> list[Check]:
    """Compare a fused rung with float64 on some rows, over all heads and entries."""
    runs = checked_runs(case.S)
    rows = torch.cat([torch.arange(run.start, run.stop, device=case.query.device) for run in runs])
    return (_check_loss if rung.part == "loss" else _check_indexer)(rung, case, backend, runs, rows)


def _checks(rung: Rung, case: Case, terms: int, quantities: dict[str, tuple[Tensor, Tensor, Tensor]]) -> list[Check]:
    checks = []
    for name, (actual, composite, expected) in quantities.items():
        error, composite_error = relative_error(actual, expected), relative_error(composite, expected)
        bound = 2 * composite_error + rounding_band(terms)
        checks.append(Check(case.S, rung.part, rung.name, name, error, composite_error, bound))
    return checks


def _check_loss(rung: Rung, case: Case, backend: str, runs: list[slice], rows: Tensor) -> list[Check]:
    preset = case.preset
    outputs = rung.forward(case, backend)
    (gradient,) = gradients(rung, case, outputs)
    gradient = gradient * case.S  # grad_kl is that of the mean
    joint_lse = None if rung.needs_window else case.joint_lse
    kl_parts, gradient_parts = [], []
    for run in runs:
        query, idxs, scores = case.query[:, run], case.topk_idxs[:, run], case.index_scores.detach()[:, run]
        if rung.needs_window:
            window = reference.window_lse(
                query, case.window_kv, case.sink, None, preset.window, preset.scale, run.start
            )
            lses = (window, None)
        else:
            lses = (None, case.joint_lse[:, run])
        target = reference.distill_target(query, case.pool, idxs, *lses, preset.scale)
        kl = reference.distill_kl(scores, target, idxs, EPS)
        kl_parts.append(kl)
        gradient_parts.append(reference.distill_kl_backward(torch.ones_like(kl), scores, target, idxs, EPS))
    expected_kl, expected_gradient = exact.loss(case, rows, joint_lse)
    return _checks(
        rung,
        case,
        preset.D + preset.K + preset.H + preset.window,
        {
            "KL": (outputs[0].detach()[0, rows], torch.cat(kl_parts, 1)[0], expected_kl),
            "its gradient": (gradient[0, rows], torch.cat(gradient_parts, 1)[0], expected_gradient),
        },
    )


def _check_indexer(rung: Rung, case: Case, backend: str, runs: list[slice], rows: Tensor) -> list[Check]:
    preset = case.preset
    # A gradient from the checked rows alone: then that of k, a sum over rows, can be checked too.
    grad_scores = torch.zeros_like(case.grad_scores)
    grad_scores[:, rows] = torch.where(case.topk_idxs[:, rows] >= 0, case.grad_scores[:, rows], 0.0)
    leaves = (case.q, case.k, case.weights)
    scores, idxs = rung.forward(case, backend)
    dq, dk, dweights = torch.autograd.grad(scores, leaves, grad_scores)
    scores, idxs = scores.detach()[0, rows], idxs[0, rows]

    composite_scores, composite_dq, composite_dweights = [], [], []
    composite_dk = torch.zeros_like(case.k, dtype=torch.float32)
    expected_scores, expected_of_selected = [], []
    first = 0
    for run in runs:
        here = slice(first, first + run.stop - run.start)
        first = here.stop
        operands = (case.q.detach()[:, run], case.k.detach(), case.weights.detach()[:, run])
        composite_scores.append(
            reference_indexer.indexer_topk(*operands, None, None, preset.K, preset.ratio, run.start)[0][0]
        )
        everything = torch.nn.functional.pad(exact.index_scores(case, rows[here]), (0, preset.K), value=float("-inf"))
        expected_scores.append(everything.topk(preset.K, -1).values)
        empty = idxs[here] < 0
        of_selected = everything.gather(-1, idxs[here].clamp(min=0).long())
        expected_of_selected.append(torch.where(empty, float("-inf"), of_selected))
        gradient = reference_indexer.indexer_topk_backward(
            grad_scores[:, run], *operands, idxs[here].unsqueeze(0), (True, True, True)
        )
        composite_dq.append(gradient[0][0])
        composite_dk += gradient[1]
        composite_dweights.append(gradient[2][0])
    best, selected = torch.cat(expected_scores), torch.cat(expected_of_selected)
    exact_dq, exact_dk, exact_dweights = exact.indexer_gradients(case, rows, idxs, grad_scores[0, rows])
    composite_best = torch.cat(composite_scores)
    return _checks(
        rung,
        case,
        preset.Di + preset.Hi + preset.K,
        {
            "scores": (scores, composite_best, best),
            "selection": (selected, composite_best, best),
            "gradient of q": (dq[0, rows], torch.cat(composite_dq), exact_dq),
            "gradient of k": (dk[0], composite_dk[0], exact_dk),
            "gradient of weights": (dweights[0, rows], torch.cat(composite_dweights), exact_dweights),
        },
    )
