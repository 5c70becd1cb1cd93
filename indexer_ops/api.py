"""The public functions. Plain typed Python over ``torch.ops.v4idx.*``; every one traces with ``fullgraph=True``.

Common to all: ``B, S`` batch and query tokens, ``H, D`` attention heads and head dim, ``T`` window keys, ``P`` pool
entries, ``K`` selected entries a query. Layout is ``[B, S, H, D]``; any strides with a contiguous last dim are read in
place. Inputs may be bfloat16, float16 or float32 (float64 with ``backend="composite"``); products accumulate in
float32 and every log-sum-exp, target and KL is float32. Log-sum-exps are natural logarithms of the *scaled* logits.

``backend`` is ``"auto"`` (the fused Triton op for CUDA tensors it supports, else the eager composite), ``"triton"``
(raises ``NotImplementedError`` where the fused op cannot serve the call) or ``"composite"``. ``check_inputs=True``
looks at values, which synchronises with the device, so not during CUDA graph capture; without it an index outside
``[0, P)`` is an empty slot and bounds are clamped.
"""

import math
from typing import Literal

import torch
import torch.distributed
from torch import Tensor

from . import checks, dispatch, reference

_OPS = torch.ops.v4idx
_NUMBER = (int, float)
REDUCTIONS = ("none", "sum", "mean", "valid_mean")


def window_lse(
    query: Tensor,
    window_kv: Tensor,
    sink: Tensor | None = None,
    doc_start: Tensor | None = None,
    *,
    window: int,
    scale: float,
    query_offset: int = 0,
    backend: str = "auto",
    check_inputs: bool = False,
) -> Tensor:
    """Log-sum-exp of the sliding window and the sink: the part of attention that needs no pool entry.

    ``out[b,s,h] = logaddexp(logsumexp_j(scale * query[b,s,h] . window_kv[b,j]), sink[h])`` over the keys j that are
    visible to position ``t = query_offset + s``: ``max(doc_start[b,s], t-window+1) <= j <= t``.

    Args:
        query: ``[B, S, H, D]``.
        window_kv: raw keys, ``[B, T, D]`` shared by all heads, or ``[B, T, H, D]``.
        sink: learned logit per head, ``[H]``; it takes part in the softmax and selects nothing.
        doc_start: first key of each query's document, ``[B, S]`` int32 or int64, for packed sequences.
        window: keys a query sees, itself included; 0 or less means all earlier ones.
        scale: factor on the products, usually ``D**-0.5``.
        query_offset: position of the first query row among the keys, for sharded queries.
        backend: see the module.
        check_inputs: raise ``ValueError`` for a ``doc_start`` outside ``[0, T]``.

    Returns:
        ``[B, S, H]`` float32, natural log; ``-inf`` where nothing is visible and there is no sink. Not differentiable.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype or device.
        NotImplementedError: ``backend="triton"`` cannot serve the call.

    Source: DeepSeek-V4 (report section 2.3.1): one softmax over window, pool and sink.
    """
    checks.are_tensors(("sink", "doc_start"), query=query, window_kv=window_kv, sink=sink, doc_start=doc_start)
    checks.are_scalars(int, window=window, query_offset=query_offset)
    checks.are_scalars(_NUMBER, scale=scale)
    checks.are_scalars(str, backend=backend)
    if check_inputs and doc_start is not None:
        _check_now(checks.window_lse, query, window_kv, sink, doc_start, scale)
        doc_start = _OPS._check_range(doc_start, "doc_start", 0, window_kv.shape[1] + 1, False)
    backend = dispatch.effective_backend("window_lse", backend)
    return _OPS.window_lse(query, window_kv, sink, doc_start, window, scale, query_offset, backend)


def distill_target(
    query: Tensor,
    pool: Tensor,
    topk_idxs: Tensor,
    noncompressed_lse: Tensor | None = None,
    joint_lse: Tensor | None = None,
    *,
    scale: float,
    normalize: bool = True,
    backend: str = "auto",
    check_inputs: bool = False,
) -> Tensor:
    """What the indexer should have said: attention over the selected entries, summed over heads.

    ``l[h,k] = scale * query[h] . pool[topk_idxs[k]]``, ``Z[h] = logaddexp(noncompressed_lse[h], logsumexp_k l[h,k])``
    or ``Z = joint_lse``, and ``u[k] = sum_h exp(min(l[h,k] - Z[h], 0))``.

    Args:
        query: ``[B, S, H, D]``.
        pool: compressed entries, key and value at once, shared by all heads, ``[B, P, D]``.
        topk_idxs: selected entries, ``[B, S, K]`` int32 or int64; a slot outside ``[0, P)`` is empty (``-1`` by habit).
        noncompressed_lse: log-sum-exp over window and sink, ``[B, S, H]`` float32, from ``window_lse``.
        joint_lse: log-sum-exp over window, sink *and* selected entries, from an attention forward; excludes the former.
            Without either, each head is renormalised over its selected entries: the old, wrong objective, kept to
            compare with.
        scale: factor on the products, usually ``D**-0.5``.
        normalize: divide each row by ``max(sum_k u, floor)``; False returns ``u``, so that sharded heads can be summed.
        backend: see the module.
        check_inputs: raise ``IndexError`` for an index outside ``[-1, P)``.

    Returns:
        ``[B, S, K]`` float32, 0 on empty slots. Not differentiable: attention is the teacher.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype or device, or both log-sum-exps are given.
        NotImplementedError: ``backend="triton"`` cannot serve the call.

    Source: DeepSeek-V3.2 (section 2.1, eqs. 3 and 4), with DeepSeek-V4's joint softmax as the denominator.
    """
    checks.are_tensors(
        ("noncompressed_lse", "joint_lse"),
        query=query,
        pool=pool,
        topk_idxs=topk_idxs,
        noncompressed_lse=noncompressed_lse,
        joint_lse=joint_lse,
    )
    checks.are_scalars(_NUMBER, scale=scale)
    checks.are_scalars(bool, normalize=normalize)
    checks.are_scalars(str, backend=backend)
    if check_inputs:
        _check_now(checks.distill_target, query, pool, topk_idxs, noncompressed_lse, joint_lse, scale)
        topk_idxs = _OPS._check_range(topk_idxs, "topk_idxs", -1, pool.shape[1], True)
    backend = dispatch.effective_backend("distill_target", backend)
    return _OPS.distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale, normalize, backend)


def distill_kl(
    index_scores: Tensor, target: Tensor, topk_idxs: Tensor, *, eps: float = 1e-10, backend: str = "auto"
) -> Tensor:
    """``KL(target || softmax(index_scores))`` per row, over the selected entries.

    ``p = softmax(index_scores)`` over valid slots, ``kl = sum_k t*(log(t+eps) - log(p+eps))``. Its gradient, exactly of
    that formula: ``w = p/(p+eps)``, ``A = sum_k t*w``, ``grad_kl * (p*A - t*w)``.

    Args:
        index_scores: the indexer's scores of the selected entries, ``[B, S, K]``.
        target: what ``distill_target`` returned, ``[B, S, K]``.
        topk_idxs: ``[B, S, K]`` int32 or int64; a slot is valid where it is not negative.
        eps: added inside both logarithms, greater than 0.
        backend: see the module.

    Returns:
        ``[B, S]`` float32; 0 for a row with no valid slot, or none with a finite score. Differentiable in
        ``index_scores`` alone; twice only with ``backend="composite"``.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype or device.
        NotImplementedError: ``backend="triton"`` cannot serve the call.

    Source: DeepSeek-V3.2 (section 2.1, eq. 4).
    """
    checks.are_tensors(index_scores=index_scores, target=target, topk_idxs=topk_idxs)
    checks.are_scalars(_NUMBER, eps=eps)
    checks.are_scalars(str, backend=backend)
    return _OPS.distill_kl(index_scores, target, topk_idxs, eps, dispatch.effective_backend("distill_kl", backend))


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    entry_start: Tensor | None = None,
    entry_stop: Tensor | None = None,
    *,
    topk: int,
    ratio: int,
    query_offset: int = 0,
    backend: str = "auto",
    check_inputs: bool = False,
) -> tuple[Tensor, Tensor]:
    """The lightning indexer: score every visible pool entry, keep the best ``topk``, differentiably.

    ``I[t,p] = sum_h weights[t,h] * relu(q[t,h] . k[p])``. Entry p is visible to position ``t = query_offset + s`` iff
    ``(p+1)*ratio <= t+1``. The gradient touches selected entries alone, with ``relu'(0) = 0``.

    Args:
        q: index queries, ``[B, S, Hi, Di]``.
        k: index keys of the pool entries, ``[B, P, Di]``.
        weights: head weights, ``[B, S, Hi]``, ``Hi**-0.5 * Di**-0.5`` included; they may be negative.
        entry_start: first visible entry of each query, ``[B, S]`` int32 or int64, on top of the other rule.
        entry_stop: one past the last visible entry, ``[B, S]``; replaces the rule by ``ratio``. With both: packed
            documents, sharded sequences.
        topk: columns of the outputs, 0 or more; may be larger than P.
        ratio: tokens that an entry compresses, 1 or more.
        query_offset: position of the first query row.
        backend: see the module.
        check_inputs: raise ``ValueError`` for bounds outside ``[0, P]`` or reversed; else they are clamped, and a
            reversed range is empty.

    Returns:
        ``scores`` float32 and ``idxs`` int32, ``[B, S, topk]``: best first, ties to the lowest index, the same bits on
        every run; unused slots are ``-inf`` and ``-1``, at the end. Differentiable in q, k and weights through scores;
        under ``torch.use_deterministic_algorithms(True)`` the gradient of k has the same bits on every run too.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype or device.
        NotImplementedError: ``backend="triton"`` cannot serve the call.

    Source: DeepSeek-V3.2 (section 2.1, eq. 1), DeepSeek-V4 (section 2.3.1, eqs. 15 to 17).
    """
    checks.are_tensors(
        ("entry_start", "entry_stop"), q=q, k=k, weights=weights, entry_start=entry_start, entry_stop=entry_stop
    )
    checks.are_scalars(int, topk=topk, ratio=ratio, query_offset=query_offset)
    checks.are_scalars(str, backend=backend)
    if check_inputs:
        _check_now(checks.indexer_topk, q, k, weights, entry_start, entry_stop, topk, ratio)
        P = k.shape[1]
        if entry_start is not None:
            entry_start = _OPS._check_range(entry_start, "entry_start", 0, P + 1, False)
        if entry_stop is not None:
            entry_stop = _OPS._check_range(entry_stop, "entry_stop", 0, P + 1, False)
        if entry_start is not None and entry_stop is not None:
            length = _OPS._check_range(entry_stop - entry_start, "(entry_stop - entry_start)", 0, P + 1, False)
            entry_stop = entry_start + length
    backend = dispatch.effective_backend("indexer_topk", backend)
    return _OPS.indexer_topk(q, k, weights, entry_start, entry_stop, topk, ratio, query_offset, backend)


def distill_loss(
    index_scores: Tensor,
    topk_idxs: Tensor,
    query: Tensor,
    pool: Tensor,
    *,
    scale: float,
    window_kv: Tensor | None = None,
    sink: Tensor | None = None,
    doc_start: Tensor | None = None,
    window: int = 0,
    query_offset: int = 0,
    noncompressed_lse: Tensor | None = None,
    joint_lse: Tensor | None = None,
    eps: float = 1e-10,
    reduction: Literal["none", "sum", "mean", "valid_mean"] = "mean",
    row_weight: Tensor | None = None,
    divisor: float | Tensor | None = None,
    head_group: "torch.distributed.ProcessGroup | None" = None,
    backend: str = "auto",
    check_inputs: bool = False,
) -> Tensor:
    """The distillation loss of the lightning indexer: ``KL(attention || indexer)`` over the selected entries.

    Target, KL and gradient in one pass (``torch.ops.v4idx.distill_loss``), after ``window_lse`` where that is asked
    for; with ``head_group`` the three ops ``window_lse``, ``distill_target`` and ``distill_kl``. Give at most one
    source for the rest of attention's denominator: ``window_kv`` (with ``sink``, ``doc_start``, ``window``,
    ``query_offset``: computed here),
    ``noncompressed_lse`` (window and sink), or ``joint_lse`` (from an attention forward, selected entries included).
    With none, the target is renormalised over the selected entries: the old objective.

    Args:
        index_scores: the indexer's scores of the selected entries, ``[B, S, K]``; the only input that learns.
        topk_idxs: ``[B, S, K]`` int32 or int64; a slot outside ``[0, P)`` is empty.
        query: ``[B, S, H, D]``.
        pool: ``[B, P, D]``.
        scale: factor on the products, usually ``D**-0.5``.
        window_kv, sink, doc_start, window, query_offset: see ``window_lse``.
        noncompressed_lse, joint_lse: see ``distill_target``.
        eps: see ``distill_kl``.
        reduction: with ``w = row_weight``: ``"none"`` is ``kl*w``, ``[B, S]``; ``"sum"`` is ``sum(kl*w) / divisor``;
            ``"mean"`` is ``sum(kl*w) / (B*S)``; ``"valid_mean"`` is ``sum(kl*w) / sum(w over non-empty rows)``, 0 if
            there is none.
        row_weight: ``[B, S]``, default 1; 0 for padding.
        divisor: a number or scalar tensor for ``reduction="sum"``, default 1: sums over micro-batches and ranks.
        head_group: process group over which the heads of ``query`` are sharded; partial targets are summed over it.
        backend: see the module.
        check_inputs: raise ``IndexError`` / ``ValueError`` for an index or a document start out of range.

    Returns:
        float32; ``[B, S]`` for ``reduction="none"``, else a scalar.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape, dtype or device; two sources of the denominator;
            an unknown reduction; a divisor with another reduction than ``"sum"``.
        NotImplementedError: ``backend="triton"`` cannot serve the call.

    Source: DeepSeek-V3.2 (section 2.1, eq. 4); DeepSeek-V4's joint softmax (report section 2.3.1).
    """
    _check_loss_arguments(
        index_scores, window_kv, sink, doc_start, noncompressed_lse, joint_lse, reduction, row_weight, divisor
    )
    checks.are_tensors(topk_idxs=topk_idxs, query=query, pool=pool)
    checks.are_scalars(_NUMBER, scale=scale, eps=eps)
    checks.are_scalars(str, backend=backend)
    _check_now(checks.distill_loss, index_scores, topk_idxs, query, pool, noncompressed_lse, joint_lse, scale, eps)
    if check_inputs:
        topk_idxs = _OPS._check_range(topk_idxs, "topk_idxs", -1, pool.shape[1], True)
    if window_kv is not None:
        noncompressed_lse = window_lse(
            query,
            window_kv,
            sink,
            doc_start,
            window=window,
            scale=scale,
            query_offset=query_offset,
            backend=backend,
            check_inputs=check_inputs,
        )
    if head_group is None:
        one_pass = dispatch.effective_backend("distill_loss", backend)
        kl = _OPS.distill_loss(index_scores, topk_idxs, query, pool, noncompressed_lse, joint_lse, scale, eps, one_pass)
    else:
        from .distributed import sum_over_head_group

        partial_target = distill_target(
            query, pool, topk_idxs, noncompressed_lse, joint_lse, scale=scale, normalize=False, backend=backend
        )
        has_lse = noncompressed_lse is not None or joint_lse is not None
        target = reference.normalized_target(sum_over_head_group(partial_target, head_group), has_lse)
        kl = distill_kl(index_scores, target, reference.slots_in_pool(topk_idxs, pool), eps=eps, backend=backend)
    return _reduced(kl, index_scores, topk_idxs, pool.shape[1], reduction, row_weight, divisor)


def _check_now(check, *arguments) -> None:
    """Check before anything is computed. In a graph the ops do, while it is traced and before any of it runs."""
    if not torch.compiler.is_compiling():
        check(*arguments)


def _check_loss_arguments(
    index_scores, window_kv, sink, doc_start, noncompressed_lse, joint_lse, reduction, row_weight, divisor
) -> None:
    checks.are_tensors(
        ("window_kv", "noncompressed_lse", "joint_lse", "row_weight"),
        index_scores=index_scores,
        window_kv=window_kv,
        noncompressed_lse=noncompressed_lse,
        joint_lse=joint_lse,
        row_weight=row_weight,
    )
    sources = {"window_kv": window_kv, "noncompressed_lse": noncompressed_lse, "joint_lse": joint_lse}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"at most one of {', '.join(sources)} may be given, got {' and '.join(given)}")
    if window_kv is None:
        for name, value in (("sink", sink), ("doc_start", doc_start)):
            if value is not None:
                raise ValueError(f"{name} takes part only with window_kv; the log-sum-exps already hold it")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if divisor is not None and reduction != "sum":
        raise ValueError(f'divisor goes with reduction="sum", got reduction={reduction!r}')
    if divisor is not None and not isinstance(divisor, (int, float, Tensor)):
        raise TypeError(f"divisor must be a number or a scalar tensor, got {type(divisor).__name__} {divisor!r}")
    if isinstance(divisor, Tensor):
        if divisor.numel() != 1 or divisor.is_complex():
            raise ValueError(f"divisor must be a number or a scalar tensor, got {divisor.dtype} {list(divisor.shape)}")
    elif divisor is not None and not (math.isfinite(divisor) and divisor != 0):
        raise ValueError(f"divisor must be finite and not 0, got {divisor}")
    if row_weight is not None:
        if row_weight.shape != index_scores.shape[:2] or row_weight.is_complex():
            raise ValueError(
                f"row_weight must be real, [B, S] = {list(index_scores.shape[:2])}, got {row_weight.dtype} "
                f"{list(row_weight.shape)}"
            )
        if row_weight.device != index_scores.device:
            raise ValueError(
                f"row_weight must be on the device of index_scores, {index_scores.device}, got one on "
                f"{row_weight.device}"
            )


def _reduced(kl, index_scores, topk_idxs, P, reduction, row_weight, divisor) -> Tensor:
    weighted = kl if row_weight is None else kl * row_weight.to(kl.dtype)
    if reduction == "none":
        return weighted
    total = weighted.sum()
    if reduction == "sum":
        return total if divisor is None else total / (divisor.reshape(()) if isinstance(divisor, Tensor) else divisor)
    if reduction == "mean":
        return total / kl.numel() if kl.numel() > 0 else total
    valid = (topk_idxs >= 0) & (topk_idxs < P)
    counted = (valid & (index_scores > float("-inf"))).any(-1).to(kl.dtype)
    weight = counted.sum() if row_weight is None else (counted * row_weight.to(kl.dtype)).sum()
    return torch.where(weight > 0, total / torch.where(weight > 0, weight, 1.0), 0.0)
