"""Where each op runs: the environment switches, and what the fused kernels can serve. The only place that knows."""

import importlib.util
import os

import torch
from torch import Tensor

FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The first architecture with bfloat16 matrix instructions. AMD devices report 9.x and pass.
MINIMUM_CAPABILITY = (8, 0)
# One program of the KL kernels holds a whole row of scores, target and indices in registers, one that joins the tiles
# of a row their log-sum-exps.
MAXIMUM_WIDTH = 8192
# Each round of the selection takes chunks of 4,096 columns and must at least halve what is left.
MAXIMUM_TOPK = 2048
MAXIMUM_INDEX_HEAD_DIM = 256
OPS = ("window_lse", "distill_target", "distill_kl", "distill_loss", "indexer_topk")


def _read_switches() -> frozenset[str]:
    backend = os.environ.get("V4IDX_BACKEND", "auto")
    if backend not in ("auto", "composite"):
        raise ValueError(f"V4IDX_BACKEND must be auto or composite, got {backend!r}")
    if backend == "composite":
        return frozenset(OPS)
    disabled = frozenset(name.strip() for name in os.environ.get("V4IDX_DISABLE", "").split(",") if name.strip())
    if disabled - frozenset(OPS):
        unknown = ", ".join(sorted(disabled - frozenset(OPS)))
        raise ValueError(f"V4IDX_DISABLE must name ops of {', '.join(OPS)}, got {unknown}")
    return disabled


# Read once: a switch that could change later would leave stale graphs behind (torch.compile does not guard on it).
SWITCHED_OFF = _read_switches()
# Under Triton's interpreter the kernels run on CPU tensors. One process, one mode: Triton itself reads this at import.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
FUSED_DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)


def effective_backend(op: str, backend: str) -> str:
    """``backend`` with the environment's switches applied: ``auto`` becomes ``composite`` for an op switched off."""
    return "composite" if backend == "auto" and op in SWITCHED_OFF else backend


def _unsupported_tensors(*tensors: Tensor) -> str | None:
    first = tensors[0]
    for tensor in tensors:
        if tensor.device.type not in FUSED_DEVICES:
            hint = " (set TRITON_INTERPRET=1 before the first import to interpret it)" if tensor.is_cpu else ""
            return f"the fused kernel runs on CUDA devices, got {tensor.device}{hint}"
        if tensor.dtype not in FUSED_DTYPES:
            return f"the fused kernel takes bfloat16, float16 or float32, got {tensor.dtype}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if first.is_cuda and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(first.device)
        if capability < MINIMUM_CAPABILITY:
            return f"the fused kernel needs compute capability {MINIMUM_CAPABILITY}, this device has {capability}"
    return None


def _unsupported_products(query: Tensor, keys: Tensor, lses: tuple[Tensor | None, ...]) -> str | None:
    if query.dtype != keys.dtype:
        return f"the fused kernel takes one dtype for query and keys, got {query.dtype} and {keys.dtype}"
    if query.shape[-1] % 16 != 0:
        return f"the fused kernel needs a head dim that is a multiple of 16, got {query.shape[-1]}"
    for lse in lses:
        if lse is not None and lse.dtype != torch.float32:
            return f"the fused kernel takes log-sum-exps in float32, got {lse.dtype}"
    return None


def _unsupported_width(K: int) -> str | None:
    return f"the fused kernel takes at most {MAXIMUM_WIDTH} entries a row, got {K}" if K > MAXIMUM_WIDTH else None


def supported_window_lse(query: Tensor, window_kv: Tensor) -> str | None:
    """Why the fused ``window_lse`` cannot serve these tensors, or None where it can."""
    return _unsupported_tensors(query, window_kv) or _unsupported_products(query, window_kv, ())


def supported_distill_target(
    query: Tensor, pool: Tensor, topk_idxs: Tensor, noncompressed_lse: Tensor | None, joint_lse: Tensor | None
) -> str | None:
    """Why the fused ``distill_target`` cannot serve these tensors, or None where it can."""
    return (
        _unsupported_width(topk_idxs.shape[2])
        or _unsupported_tensors(query, pool)
        or _unsupported_products(query, pool, (noncompressed_lse, joint_lse))
    )


def supported_distill_kl(index_scores: Tensor, target: Tensor) -> str | None:
    """Why the fused ``distill_kl`` cannot serve these tensors, or None where it can."""
    return _unsupported_width(index_scores.shape[2]) or _unsupported_tensors(index_scores, target)


def supported_distill_loss(
    index_scores: Tensor,
    topk_idxs: Tensor,
    query: Tensor,
    pool: Tensor,
    noncompressed_lse: Tensor | None,
    joint_lse: Tensor | None,
) -> str | None:
    """Why the fused ``distill_loss`` cannot serve these tensors, or None where it can."""
    return supported_distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse) or supported_distill_kl(
        index_scores, index_scores
    )


def supported_indexer_topk(q: Tensor, k: Tensor, weights: Tensor, topk: int) -> str | None:
    """Why the fused ``indexer_topk`` cannot serve these tensors, or None where it can."""
    if q.shape[-1] > MAXIMUM_INDEX_HEAD_DIM:
        return f"the fused kernel takes an index head dim of at most {MAXIMUM_INDEX_HEAD_DIM}, got {q.shape[-1]}"
    if topk > MAXIMUM_TOPK:
        return f"the fused kernel selects at most {MAXIMUM_TOPK} entries, got {topk}"
    return _unsupported_tensors(q, k, weights) or _unsupported_products(q, k, ())


def use_fused(op: str, backend: str, device: torch.device, reason: str | None) -> bool:
    """Resolve ``backend`` for one call, given why the fused op cannot serve it (``reason``, None where it can).

    Looks at metadata alone. ``auto`` takes the fused op for CUDA tensors, also where it is switched off: that switch
    acts inside the private op, where a compiled graph that outlives the process cannot go stale. On a CPU ``auto`` is
    the composite, interpreter or not.
    """
    if backend == "triton":
        if reason is not None:
            raise NotImplementedError(f'{op}: backend="triton" cannot serve this call: {reason}')
        return True
    return backend == "auto" and reason is None and device.type == "cuda"
