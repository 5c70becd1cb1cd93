"""Metadata checks shared by the public ops, their fakes and the Python API.

Every check reads shapes, dtypes and devices only, never values, so it costs nothing on the device and traces: the
conditions go through ``torch._check_*``, which turns a comparison of symbolic sizes into a runtime assertion instead
of a graph break.
"""

import math

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "composite")
INDEX_DTYPES = (torch.int32, torch.int64)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


def _rank(name: str, tensor: Tensor, layout: str, *ranks: int) -> None:
    torch._check_value(tensor.dim() in ranks, lambda: f"{name} must be {layout}, got {_describe(tensor)}")


def _size(name: str, tensor: Tensor, dim: int, symbol: str, expected, source: str) -> None:
    torch._check_value(
        tensor.shape[dim] == expected,
        lambda: f"{name}.shape[{dim}] must be {symbol} = {expected} (from {source}), got {_describe(tensor)}",
    )


def _batch_and_rows(name: str, tensor: Tensor, like: Tensor, source: str) -> None:
    _size(name, tensor, 0, "B", like.shape[0], source)
    _size(name, tensor, 1, "S", like.shape[1], source)


def _floating(name: str, tensor: Tensor) -> None:
    torch._check_type(
        tensor.dtype.is_floating_point, lambda: f"{name} must be a floating-point tensor, got {_describe(tensor)}"
    )


def _float32_or_64(name: str, tensor: Tensor) -> None:
    torch._check_type(
        tensor.dtype in (torch.float32, torch.float64),
        lambda: f"{name} must be torch.float32 (torch.float64 in the composite), got {_describe(tensor)}",
    )


def _integers(name: str, tensor: Tensor) -> None:
    torch._check_type(
        tensor.dtype in INDEX_DTYPES, lambda: f"{name} must be torch.int32 or torch.int64, got {_describe(tensor)}"
    )


def _same_device(**tensors: Tensor | None) -> None:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first_name, first = next(iter(given.items()))
    for name, tensor in given.items():
        torch._check_value(
            tensor.device == first.device,
            lambda: f"all tensors must be on one device: {first_name} is on {first.device}, {name} on {tensor.device}",
        )


def _finite(name: str, value: float) -> None:
    torch._check_value(math.isfinite(value), lambda: f"{name} must be a finite number, got {value}")


def are_tensors(optional: tuple[str, ...] = (), **arguments: object) -> None:
    """Raise TypeError for an argument that is not a tensor (or None, where ``optional`` names it)."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor) and not (value is None and name in optional):
            expected = "a torch.Tensor or None" if name in optional else "a torch.Tensor"
            raise TypeError(f"{name} must be {expected}, got {type(value).__name__}")


def are_scalars(expected: type | tuple[type, ...], **arguments: object) -> None:
    """Raise TypeError for an argument that is not a number (int, (int, float)), flag or string as ``expected``."""
    names = {int: "an int", bool: "a bool", str: "a str"}
    for name, value in arguments.items():
        is_flag = isinstance(value, bool) and expected is not bool  # True is an int, but no window
        if is_flag or not isinstance(value, expected):
            raise TypeError(f"{name} must be {names.get(expected, 'a number')}, got {type(value).__name__} {value!r}")


def backend(value: str) -> None:
    torch._check_value(value in BACKENDS, lambda: f"backend must be one of {', '.join(BACKENDS)}, got {value!r}")


def window_lse(query: Tensor, window_kv: Tensor, sink: Tensor | None, doc_start: Tensor | None, scale: float) -> None:
    """Check the arguments of ``window_lse``; see there for the shapes."""
    _rank("query", query, "[B, S, H, D]", 4)
    _rank("window_kv", window_kv, "[B, T, D] or [B, T, H, D]", 3, 4)
    _floating("query", query)
    _floating("window_kv", window_kv)
    _size("window_kv", window_kv, 0, "B", query.shape[0], "query")
    _size("window_kv", window_kv, -1, "D", query.shape[3], "query")
    if window_kv.dim() == 4:
        _size("window_kv", window_kv, 2, "H", query.shape[2], "query")
    if sink is not None:
        _rank("sink", sink, "[H]", 1)
        _floating("sink", sink)
        _size("sink", sink, 0, "H", query.shape[2], "query")
    if doc_start is not None:
        _rank("doc_start", doc_start, "[B, S]", 2)
        _integers("doc_start", doc_start)
        _batch_and_rows("doc_start", doc_start, query, "query")
    _finite("scale", scale)
    _same_device(query=query, window_kv=window_kv, sink=sink, doc_start=doc_start)


def distill_target(
    query: Tensor,
    pool: Tensor,
    topk_idxs: Tensor,
    noncompressed_lse: Tensor | None,
    joint_lse: Tensor | None,
    scale: float,
) -> None:
    """Check the arguments of ``distill_target``; see there for the shapes."""
    _rank("query", query, "[B, S, H, D]", 4)
    _rank("pool", pool, "[B, P, D]", 3)
    _rank("topk_idxs", topk_idxs, "[B, S, K]", 3)
    _floating("query", query)
    _floating("pool", pool)
    _integers("topk_idxs", topk_idxs)
    _size("pool", pool, 0, "B", query.shape[0], "query")
    _size("pool", pool, 2, "D", query.shape[3], "query")
    _batch_and_rows("topk_idxs", topk_idxs, query, "query")
    torch._check_value(
        noncompressed_lse is None or joint_lse is None,
        lambda: "noncompressed_lse and joint_lse exclude each other: give the one that the attention forward has",
    )
    for name, lse in (("noncompressed_lse", noncompressed_lse), ("joint_lse", joint_lse)):
        if lse is not None:
            _rank(name, lse, "[B, S, H]", 3)
            _float32_or_64(name, lse)
            _batch_and_rows(name, lse, query, "query")
            _size(name, lse, 2, "H", query.shape[2], "query")
    _finite("scale", scale)
    _same_device(query=query, pool=pool, topk_idxs=topk_idxs, noncompressed_lse=noncompressed_lse, joint_lse=joint_lse)


def distill_kl(index_scores: Tensor, target: Tensor, topk_idxs: Tensor, eps: float) -> None:
    """Check the arguments of ``distill_kl``; see there for the shapes."""
    for name, tensor in (("index_scores", index_scores), ("target", target), ("topk_idxs", topk_idxs)):
        _rank(name, tensor, "[B, S, K]", 3)
        _batch_and_rows(name, tensor, index_scores, "index_scores")
        _size(name, tensor, 2, "K", index_scores.shape[2], "index_scores")
    _floating("index_scores", index_scores)
    _floating("target", target)
    _integers("topk_idxs", topk_idxs)
    torch._check_value(math.isfinite(eps) and eps > 0, lambda: f"eps must be a finite number greater than 0, got {eps}")
    _same_device(index_scores=index_scores, target=target, topk_idxs=topk_idxs)


def distill_loss(
    index_scores: Tensor,
    topk_idxs: Tensor,
    query: Tensor,
    pool: Tensor,
    noncompressed_lse: Tensor | None,
    joint_lse: Tensor | None,
    scale: float,
    eps: float,
) -> None:
    """Check the arguments of ``distill_loss``: those of its parts."""
    distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale)
    distill_kl(index_scores, index_scores, topk_idxs, eps)
    _same_device(query=query, index_scores=index_scores)


def indexer_topk(
    q: Tensor, k: Tensor, weights: Tensor, entry_start: Tensor | None, entry_stop: Tensor | None, topk, ratio: int
) -> None:
    """Check the arguments of ``indexer_topk``; see there for the shapes."""
    _rank("q", q, "[B, S, Hi, Di]", 4)
    _rank("k", k, "[B, P, Di]", 3)
    _rank("weights", weights, "[B, S, Hi]", 3)
    for name, tensor in (("q", q), ("k", k), ("weights", weights)):
        _floating(name, tensor)
    _size("k", k, 0, "B", q.shape[0], "q")
    _size("k", k, 2, "Di", q.shape[3], "q")
    _batch_and_rows("weights", weights, q, "q")
    _size("weights", weights, 2, "Hi", q.shape[2], "q")
    for name, bound in (("entry_start", entry_start), ("entry_stop", entry_stop)):
        if bound is not None:
            _rank(name, bound, "[B, S]", 2)
            _integers(name, bound)
            _batch_and_rows(name, bound, q, "q")
    torch._check_value(topk >= 0, lambda: f"topk must be 0 or greater, got {topk}")
    torch._check_value(ratio > 0, lambda: f"ratio must be greater than 0, got {ratio}")
    _same_device(q=q, k=k, weights=weights, entry_start=entry_start, entry_stop=entry_stop)
