"""How far a result may be from the float64 oracle: bounds computed from the inputs, here and nowhere else.

Every op takes its operands to float32 without loss (float64 stays), so the dtype of an input adds no error of its own,
and what is left is the rounding of float32 arithmetic, ``u = eps / 2`` an operation:

- a sum or dot product of n terms, in any order, is off by at most ``n * u * sum |terms|`` (Higham, 2002, section 4.2);
- ``exp`` and ``log`` are off by ``ELEMENTARY * u`` relative to their result, and ``exp`` turns an absolute error of its
  argument into a relative one of its result; a log-sum-exp turns it back;
- a result below the smallest normal number may be flushed to zero.

First order in u throughout. A result stored in a narrower dtype (the gradient of half-precision scores) adds one
rounding to it.
"""

import math

import torch
from torch import Tensor

# Two units in the last place, for exp2 and log2 of GPUs as well as those of C libraries.
ELEMENTARY = 4
# Roundings of scaling, shifting and comparing that come with each element, whatever the sizes.
PER_ELEMENT = 8
# exp(-x) is below the smallest float32 from here on: a larger shift of the exponent does not change the result.
UNDERFLOW = 104.0


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2


def _tiny(dtype: torch.dtype) -> float:
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).tiny


def assert_within(actual: Tensor, expected: Tensor, bound: Tensor | float) -> None:
    """``|actual - expected| <= bound``; infinities must be equal, and NaN never passes."""
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    bound = torch.as_tensor(bound, dtype=torch.float64).cpu().expand_as(expected)
    close = (actual == expected) | ((actual - expected).abs() <= bound)
    if not bool(close.all()):
        first = tuple((~close).nonzero()[0].tolist())
        raise AssertionError(
            f"{int((~close).sum())} of {close.numel()} off; first at {list(first)}: got {float(actual[first])!r}, "
            f"expected {float(expected[first])!r} within {float(bound[first]):.3g}"
        )


def logits(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    """``[B, S, H]``: error of ``scale * query . key``, for the worst key of the row."""
    equation = "bshd,btd->bsht" if keys.dim() == 3 else "bshd,bthd->bsht"
    magnitude = torch.einsum(equation, query.detach().cpu().double().abs(), keys.detach().cpu().double().abs())
    return (query.shape[-1] + PER_ELEMENT) * unit_roundoff(query.dtype) * abs(scale) * magnitude.amax(-1)


def window_lse(query: Tensor, window_kv: Tensor, scale: float, expected: Tensor) -> Tensor:
    """``[B, S, H]``: logits, the sum over T keys and the sink, and the size of the result itself."""
    u = unit_roundoff(query.dtype)
    size = torch.where(expected.isinf(), 0.0, expected.abs())
    terms = window_kv.shape[1] + 1
    return logits(query, window_kv, scale) + u * (terms + ELEMENTARY + PER_ELEMENT + ELEMENTARY * size)


def distill_target(query: Tensor, pool: Tensor, lse: Tensor | None, scale: float, expected: Tensor) -> Tensor:
    """``[B, S, K]`` for ``normalize=False``: each head's exponent and denominator, then the sum over heads."""
    u, H, K = unit_roundoff(query.dtype), query.shape[2], expected.shape[2]
    exponent = 2 * logits(query, pool, scale).amax(-1, keepdim=True)
    if lse is not None:
        exponent = exponent + 4 * u * lse.detach().cpu().double().abs().clamp(max=UNDERFLOW).amax(-1, keepdim=True)
    relative = exponent + u * (H + K + 3 * ELEMENTARY + PER_ELEMENT)
    return relative * expected + H * _tiny(query.dtype)


def normalized(unnormalized: Tensor, bound: Tensor, floor: float, dtype: torch.dtype) -> Tensor:
    """``[B, S, K]``: the bound of ``u / max(sum_k u, floor)``, given ``u`` and its bound."""
    total = unnormalized.sum(-1, keepdim=True).clamp(min=floor)
    share = unnormalized / total
    of_total = bound.sum(-1, keepdim=True) / total + (unnormalized.shape[2] + PER_ELEMENT) * unit_roundoff(dtype)
    return bound / total + share * of_total


def student(index_scores: Tensor) -> float:
    """Relative error of ``p``: its exponent, no longer than until underflow, and the sum over K."""
    K = index_scores.shape[2]
    return unit_roundoff(index_scores.dtype) * (UNDERFLOW + K + 2 * ELEMENTARY + PER_ELEMENT)


def distill_kl(index_scores: Tensor, target: Tensor, eps: float, target_bound: Tensor | float = 0.0) -> Tensor:
    """``[B, S]``: ``t`` times the error of both logarithms, and the sum over K; ``target_bound`` where t is off too."""
    u, K = unit_roundoff(index_scores.dtype), index_scores.shape[2]
    t = target.detach().cpu().double()
    logarithm = abs(math.log(eps)) + 1.0  # no |log(t+eps)| or |log(p+eps)| is larger, while t and p are at most 1
    of_logarithms = student(index_scores) + 2 * ELEMENTARY * u * logarithm
    of_sum = (K + PER_ELEMENT) * u * 2 * logarithm
    of_target = torch.as_tensor(target_bound, dtype=torch.float64) * 2 * logarithm
    return (t * (of_logarithms + of_sum) + of_target).sum(-1)


def distill_kl_gradient(
    grad_kl: Tensor, index_scores: Tensor, target: Tensor, expected: Tensor, target_bound: Tensor | float = 0.0
) -> Tensor:
    """``[B, S, K]``: both terms of ``grad_kl * (p*A - t*w)`` relative to their own size, and the rounding on storing.

    ``p`` and ``w`` are at most 1 and ``A`` at most ``sum_k t``; with ``p*A = expected/grad_kl + t*w`` the first term
    is at most ``|expected/grad_kl| + t``.
    """
    u, K = unit_roundoff(index_scores.dtype), index_scores.shape[2]
    t, slope = target.detach().cpu().double(), grad_kl.detach().cpu().double().abs().unsqueeze(-1)
    target_bound = torch.as_tensor(target_bound, dtype=torch.float64).expand_as(t)
    relative = 3 * student(index_scores) + (K + PER_ELEMENT) * u
    arithmetic = relative * (expected.abs() + 2 * slope * t)
    of_target = slope * (target_bound + target_bound.sum(-1, keepdim=True))
    stored = torch.finfo(index_scores.dtype)
    flushed = _tiny(index_scores.dtype) + stored.smallest_normal * stored.eps
    return arithmetic + of_target + stored.eps / 2 * expected.abs() + flushed
