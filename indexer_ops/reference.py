"""The eager composite: what every op computes, formula by formula. Read this first.

Symbols are argument names. The setting is the compressed sparse attention of DeepSeek-V4 (section 2.3.1 of its
report): one softmax over the last ``window`` raw keys, the ``K`` pool entries that the lightning indexer selected, and
a learned sink per head; the loss is ``KL(attention || indexer)`` over the selected entries (DeepSeek-V3.2, section
2.1).

Rounding points: operands are converted to float32 first (float64 stays), everything after is float32, autocast is off.
Eager calls walk over rows in chunks, so that no call takes more than ``TRANSIENT_BYTES`` beyond its inputs and outputs;
traced calls do not (a loop over rows would be compiled once per size).
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import checkpoint

TRANSIENT_BYTES = 256 * 2**20
# Sums of a target below this count as empty. With a joint denominator any normal float32 is a legitimate mass; a
# target renormalised over its selected entries alone keeps the floor of the objective it is kept to compare with.
JOINT_FLOOR = torch.finfo(torch.float32).tiny
SELECTED_ONLY_FLOOR = 1e-10
# Rows that share one slice of keys in the banded window.
WINDOW_BLOCK = 64


def target_floor(has_lse: bool) -> float:
    """Smallest sum that ``distill_target`` divides by."""
    return JOINT_FLOOR if has_lse else SELECTED_ONLY_FLOOR


def is_traced(*tensors: Tensor) -> bool:
    return torch.compiler.is_compiling() or detect_fake_mode(tensors) is not None


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def without_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def chunks(total: int, bytes_per_row: int) -> list[tuple[int, int]]:
    step = max(1, TRANSIENT_BYTES // max(1, bytes_per_row))
    return [(start, min(start + step, total)) for start in range(0, total, step)]


def checkpointed(function: Callable, *arguments):
    """Call ``function``, and where a gradient is recorded keep its inputs alone: it runs again in backward."""
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return function(*arguments)


def _logsumexp(logits: Tensor) -> Tensor:
    """``log(sum(exp(logits)))`` over the last dim; ``-inf`` for rows that hold nothing but ``-inf``, or nothing."""
    if logits.shape[-1] == 0:
        return logits.new_full(logits.shape[:-1], float("-inf"))
    maximum = logits.amax(-1)
    shift = torch.where(maximum == float("-inf"), 0.0, maximum)
    return shift + (logits - shift.unsqueeze(-1)).exp().sum(-1).log()


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """``log(exp(a) + exp(b))`` that keeps ``-inf`` when both are, and never forms ``exp`` of a large number."""
    maximum = torch.maximum(a, b)
    difference = torch.where(maximum == float("-inf"), 0.0, torch.minimum(a, b) - maximum)
    return torch.where(maximum == float("-inf"), maximum, maximum + difference.exp().log1p())


# --- window_lse ---------------------------------------------------------------------------------------------------


def _banded_lse(
    query: Tensor, window_kv: Tensor, doc_start: Tensor | None, window, scale: float, first, dtype: torch.dtype
) -> Tensor:
    """LSE of rows at positions ``first, first + 1, ...`` over their last ``window`` keys. ``[B, n, H]``.

    Rows are taken in blocks of WINDOW_BLOCK; the rows of one block share a slice of ``WINDOW_BLOCK + window - 1`` keys.
    """
    B, n, H, D = query.shape
    T = window_kv.shape[1]
    # A traced call takes one block more: a graph for "one block" and one for "several" would be two graphs.
    blocks = (n + WINDOW_BLOCK - 1) // WINDOW_BLOCK + int(is_traced(query))
    device = query.device
    row = torch.arange(blocks * WINDOW_BLOCK, device=device).view(blocks, WINDOW_BLOCK)
    position = first + row  # [blocks, WINDOW_BLOCK]
    key = position[:, :1] - window + 1 + torch.arange(WINDOW_BLOCK + window - 1, device=device)  # [blocks, keys]
    source_row = row.clamp(max=n - 1)
    # index_select: indexing with a matrix gives a permuted query other strides in a trace than in an eager call.
    rows = query.index_select(1, source_row.flatten()).unflatten(1, source_row.shape).to(dtype)
    keys = window_kv[:, key.clamp(0, T - 1)].to(dtype)  # [B, blocks, keys, (H,) D]
    equation = "bnqhd,bnkd->bnqhk" if window_kv.dim() == 3 else "bnqhd,bnkhd->bnqhk"
    logits = scale * torch.einsum(equation, rows, keys)
    earliest = (position - window + 1).clamp(min=0).unsqueeze(0)  # [1, blocks, WINDOW_BLOCK]
    if doc_start is not None:
        earliest = torch.maximum(earliest, doc_start[:, source_row].long())
    latest = position.clamp(max=T - 1).unsqueeze(0)
    key = key.view(1, blocks, 1, -1)
    visible = (key >= earliest.unsqueeze(-1)) & (key <= latest.unsqueeze(-1))  # [B or 1, blocks, WINDOW_BLOCK, keys]
    lse = _logsumexp(logits.masked_fill(~visible.unsqueeze(3), float("-inf")))
    return lse.flatten(1, 2)[:, :n]


def _causal_lse(
    query: Tensor, window_kv: Tensor, doc_start: Tensor | None, scale: float, first, first_key, dtype: torch.dtype
) -> Tensor:
    """LSE of rows at positions ``first, ...`` over the keys of ``window_kv`` (``first_key`` on) up to their own."""
    position = first + torch.arange(query.shape[1], device=query.device)
    key = first_key + torch.arange(window_kv.shape[1], device=query.device)
    equation = "bqhd,bkd->bqhk" if window_kv.dim() == 3 else "bqhd,bkhd->bqhk"
    logits = scale * torch.einsum(equation, query.to(dtype), window_kv.to(dtype))
    visible = (key <= position.unsqueeze(-1)).unsqueeze(0)
    if doc_start is not None:
        visible = visible & (key >= doc_start.unsqueeze(-1))
    return _logsumexp(logits.masked_fill(~visible.unsqueeze(2), float("-inf")))


def _chunked_window_lse(query, window_kv, doc_start, window, scale, query_offset, dtype) -> Tensor:
    B, S, H, D = query.shape
    T = window_kv.shape[1]
    itemsize = torch.finfo(dtype).bits // 8
    heads_of_keys = 1 if window_kv.dim() == 3 else H
    out = query.new_empty((B, S, H), dtype=dtype)
    for b in range(B):
        batch = slice(b, b + 1)
        if 0 < window < T:
            keys = WINDOW_BLOCK + window - 1
            block_bytes = itemsize * (WINDOW_BLOCK * H * (2 * D + 4 * keys) + 2 * keys * heads_of_keys * D)
            for start, stop in chunks((S + WINDOW_BLOCK - 1) // WINDOW_BLOCK, block_bytes):
                rows = slice(start * WINDOW_BLOCK, min(stop * WINDOW_BLOCK, S))
                starts = None if doc_start is None else doc_start[batch, rows]
                out[batch, rows] = _banded_lse(
                    query[batch, rows], window_kv[batch], starts, window, scale, query_offset + rows.start, dtype
                )
            continue
        # A window that reaches past the first key is full causal attention; keys are walked too, joined by logaddexp.
        key_chunks = chunks(T, itemsize * 8 * (heads_of_keys * D + 4 * H))
        keys_at_once = max(stop - start for start, stop in key_chunks)
        for start, stop in chunks(S, itemsize * H * (D + 4 * keys_at_once)):
            rows = slice(start, stop)
            lse = out.new_full((1, stop - start, H), float("-inf"))
            for first_key, last_key in key_chunks:
                if first_key > query_offset + stop - 1:
                    break
                lse = _logaddexp(
                    lse,
                    _causal_lse(
                        query[batch, rows],
                        window_kv[batch, first_key:last_key],
                        _window_start(doc_start, batch, rows, window, query_offset, query),
                        scale,
                        query_offset + start,
                        first_key,
                        dtype,
                    ),
                )
            out[batch, rows] = lse
    return out


def _window_start(doc_start, batch: slice, rows: slice, window: int, query_offset: int, query: Tensor) -> Tensor | None:
    """First key that each row may see: the document's, or the window's where that is later."""
    starts = None if doc_start is None else doc_start[batch, rows]
    if window <= 0:
        return starts
    position = query_offset + torch.arange(rows.start, rows.stop, device=query.device)
    earliest = (position - window + 1).unsqueeze(0)
    return earliest if starts is None else torch.maximum(earliest, starts.long())


@torch.no_grad()
def window_lse(
    query: Tensor,
    window_kv: Tensor,
    sink: Tensor | None,
    doc_start: Tensor | None,
    window: int,
    scale: float,
    query_offset: int = 0,
) -> Tensor:
    """``out[b,s,h] = logaddexp(logsumexp_j(scale * query[b,s,h] . window_kv[b,j]), sink[h])`` over visible j."""
    dtype = compute_dtype(query, window_kv)
    B, S, H, D = query.shape
    T = window_kv.shape[1]
    with without_autocast(query):
        if B * S * H * T == 0:
            lse = query.new_full((B, S, H), float("-inf"), dtype=dtype)
        elif not is_traced(query):
            lse = _chunked_window_lse(query, window_kv, doc_start, window, scale, query_offset, dtype)
        elif window > 0:
            # A window wider than all positions is the same as one of just that width; sym_min adds no guard.
            width = torch.sym_min(window, query_offset + S)
            lse = _banded_lse(query, window_kv, doc_start, width, scale, query_offset, dtype)
        else:
            lse = _causal_lse(query, window_kv, doc_start, scale, query_offset, 0, dtype)
        return lse if sink is None else _logaddexp(lse, sink.to(dtype).expand_as(lse))


# --- distill_target -----------------------------------------------------------------------------------------------


def _target_rows(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale, dtype) -> Tensor:
    """``u[k] = sum_h exp(min(l[h,k] - Z[h], 0))`` for ``[b, n]`` rows. ``[b, n, K]``."""
    P = pool.shape[1]
    valid = (topk_idxs >= 0) & (topk_idxs < P)
    batch = torch.arange(pool.shape[0], device=pool.device).view(-1, 1, 1)
    entries = pool[batch, torch.where(valid, topk_idxs, 0)].to(dtype)  # [b, n, K, D]
    logits = scale * torch.einsum("bnhd,bnkd->bnhk", query.to(dtype), entries)
    logits = logits.masked_fill(~valid.unsqueeze(2), float("-inf"))
    if joint_lse is not None:
        denominator = joint_lse.to(dtype)
    else:
        denominator = _logsumexp(logits)
        if noncompressed_lse is not None:
            denominator = _logaddexp(noncompressed_lse.to(dtype), denominator)
    # Invalid slots would compute -inf - -inf where the denominator is empty: mask before the subtraction.
    exponent = torch.where(valid.unsqueeze(2), logits - denominator.unsqueeze(-1), float("-inf"))
    return exponent.clamp(max=0.0).exp().sum(2)


@torch.no_grad()
def distill_target(
    query: Tensor,
    pool: Tensor,
    topk_idxs: Tensor,
    noncompressed_lse: Tensor | None,
    joint_lse: Tensor | None,
    scale: float,
    normalize: bool = True,
) -> Tensor:
    """Attention over the selected entries, summed over heads; ``normalize`` divides each row by its sum."""
    dtype = compute_dtype(query, pool, noncompressed_lse, joint_lse)
    B, S, H, D = query.shape
    P, K = pool.shape[1], topk_idxs.shape[2]
    with without_autocast(query):
        if B * S * H * P * K == 0:
            return query.new_zeros((B, S, K), dtype=dtype)
        if is_traced(query):
            target = _target_rows(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale, dtype)
        else:
            itemsize = torch.finfo(dtype).bits // 8
            target = query.new_empty((B, S, K), dtype=dtype)
            for b in range(B):
                for start, stop in chunks(S, itemsize * (H * D + 2 * K * D + 4 * H * K)):
                    rows = (slice(b, b + 1), slice(start, stop))
                    noncompressed, joint = (
                        None if lse is None else lse[rows] for lse in (noncompressed_lse, joint_lse)
                    )
                    target[rows] = _target_rows(
                        query[rows], pool[b : b + 1], topk_idxs[rows], noncompressed, joint, scale, dtype
                    )
        if normalize:
            target = normalized_target(target, has_lse=noncompressed_lse is not None or joint_lse is not None)
        return target


def normalized_target(target: Tensor, has_lse: bool) -> Tensor:
    """``u / max(sum_k u, floor)``."""
    return target / target.sum(-1, keepdim=True).clamp(min=target_floor(has_lse))


# --- distill_kl ---------------------------------------------------------------------------------------------------


def student(index_scores: Tensor, valid: Tensor) -> Tensor:
    """Softmax of ``index_scores`` over valid slots; all zero in a row without a valid, finite score."""
    scores = index_scores.masked_fill(~valid, float("-inf"))
    maximum = scores.detach().amax(-1, keepdim=True)
    exponential = (scores - torch.where(maximum == float("-inf"), 0.0, maximum)).exp()
    total = exponential.sum(-1, keepdim=True)
    return exponential / torch.where(total > 0, total, 1.0)


def _kl_rows(index_scores: Tensor, target: Tensor, topk_idxs: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    valid = topk_idxs >= 0
    p = student(index_scores.to(dtype), valid)
    t = target.to(dtype)
    counted = valid & (p.detach().sum(-1, keepdim=True) > 0)  # an empty row counts nothing
    return torch.where(counted, t * ((t + eps).log() - (p + eps).log()), 0.0).sum(-1)


def distill_kl(index_scores: Tensor, target: Tensor, topk_idxs: Tensor, eps: float = 1e-10) -> Tensor:
    """``kl = sum_k t * (log(t + eps) - log(p + eps))`` with ``p = softmax(index_scores)`` over valid slots."""
    target = target.detach()
    dtype = compute_dtype(index_scores, target)
    B, S, K = index_scores.shape
    with without_autocast(index_scores):
        if B * S * K == 0:
            return index_scores.sum(-1, dtype=dtype)  # empty, and still a function of index_scores
        itemsize = torch.finfo(dtype).bits // 8
        flat = index_scores.flatten(0, 1), target.flatten(0, 1), topk_idxs.flatten(0, 1)
        row_chunks = [(0, B * S)] if is_traced(index_scores) else chunks(B * S, itemsize * 10 * K)
        if len(row_chunks) == 1:
            return _kl_rows(*flat, eps, dtype).view(B, S)
        rows = [
            checkpointed(_kl_rows, *(tensor[start:stop] for tensor in flat), eps, dtype) for start, stop in row_chunks
        ]
        return torch.cat(rows).view(B, S)


@torch.no_grad()
def distill_kl_backward(grad_kl: Tensor, index_scores: Tensor, target: Tensor, topk_idxs: Tensor, eps: float) -> Tensor:
    """Gradient of ``distill_kl`` in closed form: ``w = p/(p+eps)``, ``A = sum_k t*w``, ``grad_kl * (p*A - t*w)``."""
    dtype = compute_dtype(index_scores, target)
    out = torch.empty_like(index_scores, memory_format=torch.contiguous_format)
    B, S, K = index_scores.shape
    itemsize = torch.finfo(dtype).bits // 8
    with without_autocast(index_scores):
        for b in range(B if K else 0):
            for start, stop in chunks(S, itemsize * 10 * K):
                rows = (b, slice(start, stop))
                valid = topk_idxs[rows] >= 0
                p = student(index_scores[rows].to(dtype), valid)
                counted = valid & (p.sum(-1, keepdim=True) > 0)
                t = torch.where(counted, target[rows].to(dtype), 0.0)
                weighted = t * (p / (p + eps))
                gradient = p * weighted.sum(-1, keepdim=True) - weighted
                out[rows] = (grad_kl[rows].to(dtype).unsqueeze(-1) * gradient).to(out.dtype)
    return out


# --- distill_loss -------------------------------------------------------------------------------------------------


def distill_loss(
    index_scores: Tensor,
    topk_idxs: Tensor,
    query: Tensor,
    pool: Tensor,
    noncompressed_lse: Tensor | None,
    joint_lse: Tensor | None,
    scale: float,
    eps: float = 1e-10,
) -> Tensor:
    """``distill_target``, then ``distill_kl`` over the slots that lie in the pool."""
    target = distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale)
    return distill_kl(index_scores, target, slots_in_pool(topk_idxs, pool), eps)


def slots_in_pool(topk_idxs: Tensor, pool: Tensor) -> Tensor:
    """``topk_idxs`` with -1 for indices past the pool: ``distill_kl`` knows no P, and would count them as valid."""
    return torch.where(topk_idxs < pool.shape[1], topk_idxs, -1)


@torch.no_grad()
def distill_loss_and_gradient(
    index_scores: Tensor,
    topk_idxs: Tensor,
    query: Tensor,
    pool: Tensor,
    noncompressed_lse: Tensor | None,
    joint_lse: Tensor | None,
    scale: float,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """KL rows and the float32 gradient of their sum in the scores."""
    target = distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale)
    arguments = (index_scores.float(), target, slots_in_pool(topk_idxs, pool), eps)
    kl = distill_kl(*arguments)
    return kl, distill_kl_backward(torch.ones_like(kl), *arguments)


def scaled_rows(factor: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """``factor[b,s] * rows[b,s,k]``."""
    return (factor.to(rows.dtype).unsqueeze(-1) * rows).to(dtype)
