"""The registration of ``torch.ops.v4idx.*``: schemas, choosers, fakes, autograd formulas. Torch only, no Triton import.

Each op ``X`` has two layers. The public ``v4idx::X`` is CompositeImplicitAutograd and *chooses*: the fused op below it
where that can serve, else the eager composite. The private ``v4idx::_X`` is the Triton launcher with a fake and an
autograd formula. Two layers, because a CompositeImplicit kernel beside a backend kernel on one op hides the fake.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module

import torch
from torch import Tensor

from . import checks, dispatch, reference, reference_indexer

PUBLIC_SCHEMAS = (
    "window_lse(Tensor query, Tensor window_kv, Tensor? sink, Tensor? doc_start, int window, float scale, "
    'SymInt query_offset=0, str backend="auto") -> Tensor',
    "distill_target(Tensor query, Tensor pool, Tensor topk_idxs, Tensor? noncompressed_lse, Tensor? joint_lse, "
    'float scale, bool normalize=True, str backend="auto") -> Tensor',
    'distill_kl(Tensor index_scores, Tensor target, Tensor topk_idxs, float eps=1e-10, str backend="auto") -> Tensor',
    "distill_loss(Tensor index_scores, Tensor topk_idxs, Tensor query, Tensor pool, Tensor? noncompressed_lse, "
    'Tensor? joint_lse, float scale, float eps=1e-10, str backend="auto") -> Tensor',
    "indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor? entry_start, Tensor? entry_stop, SymInt topk, int ratio, "
    'SymInt query_offset=0, str backend="auto") -> (Tensor scores, Tensor idxs)',
)
# A final ``strict`` is true for backend="triton": such a call raises instead of degrading to the reference.
PRIVATE_SCHEMAS = (
    "_window_lse(Tensor query, Tensor window_kv, Tensor? sink, Tensor? doc_start, int window, float scale, "
    "SymInt query_offset, bool strict) -> Tensor",
    "_distill_target(Tensor query, Tensor pool, Tensor topk_idxs, Tensor? noncompressed_lse, Tensor? joint_lse, "
    "float scale, bool normalize, bool strict) -> Tensor",
    "_distill_kl(Tensor index_scores, Tensor target, Tensor topk_idxs, float eps, bool strict) -> Tensor",
    "_distill_kl_backward(Tensor grad_kl, Tensor index_scores, Tensor target, Tensor topk_idxs, float eps, "
    "bool strict) -> Tensor",
    "_distill_loss(Tensor index_scores, Tensor topk_idxs, Tensor query, Tensor pool, Tensor? noncompressed_lse, "
    "Tensor? joint_lse, float scale, float eps, bool strict) -> (Tensor kl, Tensor gradient)",
    "_distill_loss_backward(Tensor grad_kl, Tensor gradient, Tensor index_scores, bool strict) -> Tensor",
    "_indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor? entry_start, Tensor? entry_stop, SymInt topk, "
    "int ratio, SymInt query_offset, bool strict) -> (Tensor scores, Tensor idxs)",
    "_indexer_topk_backward(Tensor grad_scores, Tensor q, Tensor k, Tensor weights, Tensor idxs, "
    "bool[3] output_mask, bool strict) -> (Tensor, Tensor, Tensor)",
    "_check_range(Tensor values, str name, SymInt low, SymInt high, bool is_index) -> Tensor",
)

_LIBRARY = torch.library.Library("v4idx", "DEF")
for _schema in PUBLIC_SCHEMAS + PRIVATE_SCHEMAS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

_WINDOW_LSE = torch.ops.v4idx._window_lse.default
_DISTILL_TARGET = torch.ops.v4idx._distill_target.default
_DISTILL_KL = torch.ops.v4idx._distill_kl.default
_DISTILL_KL_BACKWARD = torch.ops.v4idx._distill_kl_backward.default
_DISTILL_LOSS = torch.ops.v4idx._distill_loss.default
_DISTILL_LOSS_BACKWARD = torch.ops.v4idx._distill_loss_backward.default
_INDEXER_TOPK = torch.ops.v4idx._indexer_topk.default
_INDEXER_TOPK_BACKWARD = torch.ops.v4idx._indexer_topk_backward.default


# --- Public: choose -----------------------------------------------------------------------------------------------


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _choose_window_lse(query, window_kv, sink, doc_start, window, scale, query_offset=0, backend="auto"):
    checks.backend(backend)
    checks.window_lse(query, window_kv, sink, doc_start, scale)
    query, window_kv, sink = query.detach(), window_kv.detach(), _detached(sink)
    reason = dispatch.supported_window_lse(query, window_kv)
    if dispatch.use_fused("window_lse", backend, query.device, reason):
        return _WINDOW_LSE(query, window_kv, sink, doc_start, window, scale, query_offset, backend == "triton")
    return reference.window_lse(query, window_kv, sink, doc_start, window, scale, query_offset)


def _choose_distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale, normalize=True, backend="auto"):
    checks.backend(backend)
    checks.distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale)
    query, pool = query.detach(), pool.detach()
    noncompressed_lse, joint_lse = _detached(noncompressed_lse), _detached(joint_lse)
    reason = dispatch.supported_distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse)
    arguments = (query, pool, topk_idxs, noncompressed_lse, joint_lse, scale, normalize)
    if dispatch.use_fused("distill_target", backend, query.device, reason):
        return _DISTILL_TARGET(*arguments, backend == "triton")
    return reference.distill_target(*arguments)


def _choose_distill_kl(index_scores, target, topk_idxs, eps=1e-10, backend="auto"):
    checks.backend(backend)
    checks.distill_kl(index_scores, target, topk_idxs, eps)
    target = target.detach()
    reason = dispatch.supported_distill_kl(index_scores, target)
    if dispatch.use_fused("distill_kl", backend, index_scores.device, reason):
        return _DISTILL_KL(index_scores, target, topk_idxs, eps, backend == "triton")
    return reference.distill_kl(index_scores, target, topk_idxs, eps)


def _choose_distill_loss(
    index_scores, topk_idxs, query, pool, noncompressed_lse, joint_lse, scale, eps=1e-10, backend="auto"
):
    checks.backend(backend)
    checks.distill_loss(index_scores, topk_idxs, query, pool, noncompressed_lse, joint_lse, scale, eps)
    query, pool = query.detach(), pool.detach()
    noncompressed_lse, joint_lse = _detached(noncompressed_lse), _detached(joint_lse)
    reason = dispatch.supported_distill_loss(index_scores, topk_idxs, query, pool, noncompressed_lse, joint_lse)
    arguments = (index_scores, topk_idxs, query, pool, noncompressed_lse, joint_lse, scale, eps)
    if dispatch.use_fused("distill_loss", backend, query.device, reason):
        kl, _ = _DISTILL_LOSS(*arguments, backend == "triton")
        return kl
    return reference.distill_loss(*arguments)


def _choose_indexer_topk(q, k, weights, entry_start, entry_stop, topk, ratio, query_offset=0, backend="auto"):
    checks.backend(backend)
    checks.indexer_topk(q, k, weights, entry_start, entry_stop, topk, ratio)
    reason = dispatch.supported_indexer_topk(q, k, weights, topk)
    arguments = (q, k, weights, entry_start, entry_stop, topk, ratio, query_offset)
    if dispatch.use_fused("indexer_topk", backend, q.device, reason):
        return _INDEXER_TOPK(*arguments, backend == "triton")
    return reference_indexer.indexer_topk(*arguments)


_LIBRARY.impl("window_lse", _choose_window_lse, "CompositeImplicitAutograd")
_LIBRARY.impl("distill_target", _choose_distill_target, "CompositeImplicitAutograd")
_LIBRARY.impl("distill_kl", _choose_distill_kl, "CompositeImplicitAutograd")
_LIBRARY.impl("distill_loss", _choose_distill_loss, "CompositeImplicitAutograd")
_LIBRARY.impl("indexer_topk", _choose_indexer_topk, "CompositeImplicitAutograd")


# --- Private: launch, or degrade ----------------------------------------------------------------------------------

# Calls whose kernel could not be had, so that a failing compilation is tried and reported once, not every step.
_UNAVAILABLE: dict[tuple, str] = {}


def _launch_or_degrade(op: str, launcher: str, fallback: Callable, arguments: tuple, strict: bool):
    """Run ``csrc_triton/<op>.py``'s launcher; where its kernel cannot be had, the no-grad reference, with a warning."""
    if op in dispatch.SWITCHED_OFF:
        if strict:
            raise NotImplementedError(f'{op}: backend="triton", but V4IDX_BACKEND or V4IDX_DISABLE switches it off')
        return fallback(*arguments)
    device = arguments[0].device
    widths = tuple((a.dtype, tuple(a.shape[2:])) for a in arguments if isinstance(a, Tensor))
    call = (launcher, device, widths)
    if call in _UNAVAILABLE and not strict:
        return fallback(*arguments)
    try:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return getattr(import_module(f"indexer_ops._triton.{op}"), launcher)(*arguments)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as cause:
        if strict:
            raise
        if not any(failed[0] == launcher for failed in _UNAVAILABLE):
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
            warnings.warn(
                f"v4idx::{op} runs its slow reference on {name}: no Triton kernel ({type(cause).__name__}: {cause})",
                stacklevel=2,
            )
        _UNAVAILABLE[call] = str(cause)
        return fallback(*arguments)


def _window_lse(query, window_kv, sink, doc_start, window, scale, query_offset, strict):
    arguments = (query, window_kv, sink, doc_start, window, scale, query_offset)
    return _launch_or_degrade("window_lse", "window_lse", reference.window_lse, arguments, strict)


def _distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale, normalize, strict):
    arguments = (query, pool, topk_idxs, noncompressed_lse, joint_lse, scale, normalize)
    return _launch_or_degrade("distill_target", "distill_target", reference.distill_target, arguments, strict)


@torch.no_grad()
def _distill_kl(index_scores, target, topk_idxs, eps, strict):
    arguments = (index_scores, target, topk_idxs, eps)
    return _launch_or_degrade("distill_kl", "distill_kl", reference.distill_kl, arguments, strict)


def _distill_kl_backward(grad_kl, index_scores, target, topk_idxs, eps, strict):
    arguments = (grad_kl, index_scores, target, topk_idxs, eps)
    return _launch_or_degrade("distill_kl", "distill_kl_backward", reference.distill_kl_backward, arguments, strict)


def _distill_loss(index_scores, topk_idxs, query, pool, noncompressed_lse, joint_lse, scale, eps, strict):
    arguments = (index_scores, topk_idxs, query, pool, noncompressed_lse, joint_lse, scale, eps)
    return _launch_or_degrade("distill_loss", "distill_loss", reference.distill_loss_and_gradient, arguments, strict)


def _distill_loss_backward(grad_kl, gradient, index_scores, strict):
    arguments = (grad_kl, gradient, index_scores.dtype)
    return _launch_or_degrade("distill_loss", "distill_loss_backward", reference.scaled_rows, arguments, strict)


@torch.no_grad()
def _indexer_topk(q, k, weights, entry_start, entry_stop, topk, ratio, query_offset, strict):
    arguments = (q, k, weights, entry_start, entry_stop, topk, ratio, query_offset)
    return _launch_or_degrade("indexer_topk", "indexer_topk", reference_indexer.indexer_topk, arguments, strict)


def _indexer_topk_backward(grad_scores, q, k, weights, idxs, output_mask, strict):
    arguments = (grad_scores, q, k, weights, idxs, output_mask)
    fallback = reference_indexer.indexer_topk_backward
    return _launch_or_degrade("indexer_topk", "indexer_topk_backward", fallback, arguments, strict)


def _check_range(values, name, low, high, is_index):
    wrong = (values < low) | (values >= high)
    if bool(wrong.any()):
        position = [int(i) for i in wrong.nonzero()[0]]
        message = f"{name}{position} is {int(values[tuple(position)])}, outside [{low}, {high})"
        raise IndexError(message) if is_index else ValueError(message)
    return values.clone()


for _device_key in ("CUDA", "CPU") if dispatch.INTERPRETED else ("CUDA",):
    _LIBRARY.impl("_window_lse", _window_lse, _device_key)
    _LIBRARY.impl("_distill_target", _distill_target, _device_key)
    _LIBRARY.impl("_distill_kl", _distill_kl, _device_key)
    _LIBRARY.impl("_distill_kl_backward", _distill_kl_backward, _device_key)
    _LIBRARY.impl("_distill_loss", _distill_loss, _device_key)
    _LIBRARY.impl("_distill_loss_backward", _distill_loss_backward, _device_key)
    _LIBRARY.impl("_indexer_topk", _indexer_topk, _device_key)
    _LIBRARY.impl("_indexer_topk_backward", _indexer_topk_backward, _device_key)
_LIBRARY.impl("_check_range", _check_range, "CompositeExplicitAutograd")


# --- Private: fakes -----------------------------------------------------------------------------------------------


@torch.library.register_fake("v4idx::_window_lse", lib=_LIBRARY)
def _(query, window_kv, sink, doc_start, window, scale, query_offset, strict):
    checks.window_lse(query, window_kv, sink, doc_start, scale)
    return query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.register_fake("v4idx::_distill_target", lib=_LIBRARY)
def _(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale, normalize, strict):
    checks.distill_target(query, pool, topk_idxs, noncompressed_lse, joint_lse, scale)
    return query.new_empty(topk_idxs.shape, dtype=torch.float32)


@torch.library.register_fake("v4idx::_distill_kl", lib=_LIBRARY)
def _(index_scores, target, topk_idxs, eps, strict):
    checks.distill_kl(index_scores, target, topk_idxs, eps)
    return index_scores.new_empty(index_scores.shape[:2], dtype=torch.float32)


@torch.library.register_fake("v4idx::_distill_kl_backward", lib=_LIBRARY)
def _(grad_kl, index_scores, target, topk_idxs, eps, strict):
    checks.distill_kl(index_scores, target, topk_idxs, eps)
    return index_scores.new_empty(index_scores.shape)


@torch.library.register_fake("v4idx::_distill_loss", lib=_LIBRARY)
def _(index_scores, topk_idxs, query, pool, noncompressed_lse, joint_lse, scale, eps, strict):
    checks.distill_loss(index_scores, topk_idxs, query, pool, noncompressed_lse, joint_lse, scale, eps)
    shape = topk_idxs.shape
    return query.new_empty(shape[:2], dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("v4idx::_distill_loss_backward", lib=_LIBRARY)
def _(grad_kl, gradient, index_scores, strict):
    return gradient.new_empty(gradient.shape, dtype=index_scores.dtype)


@torch.library.register_fake("v4idx::_indexer_topk", lib=_LIBRARY)
def _(q, k, weights, entry_start, entry_stop, topk, ratio, query_offset, strict):
    checks.indexer_topk(q, k, weights, entry_start, entry_stop, topk, ratio)
    shape = (q.shape[0], q.shape[1], topk)
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.int32)


@torch.library.register_fake("v4idx::_indexer_topk_backward", lib=_LIBRARY)
def _(grad_scores, q, k, weights, idxs, output_mask, strict):
    return tuple(
        operand.new_empty(operand.shape if needed else (0,)) for operand, needed in zip((q, k, weights), output_mask)
    )


@torch.library.register_fake("v4idx::_check_range", lib=_LIBRARY)
def _(values, name, low, high, is_index):
    return torch.empty_like(values)


# --- Private: autograd --------------------------------------------------------------------------------------------


def _mark_output_non_differentiable(ctx, inputs, output):
    ctx.mark_non_differentiable(output)
    ctx.number_of_inputs = len(inputs)


def _no_gradients(ctx, *grads):
    return (None,) * ctx.number_of_inputs


def _save_for_distill_kl_backward(ctx, inputs, output):
    index_scores, target, topk_idxs, ctx.eps, ctx.strict = inputs
    ctx.save_for_backward(index_scores, target, topk_idxs)


def _distill_kl_formula(ctx, grad_kl):
    grad_scores = None
    if ctx.needs_input_grad[0]:
        grad_scores = _DISTILL_KL_BACKWARD(grad_kl, *ctx.saved_tensors, ctx.eps, ctx.strict)
    return grad_scores, None, None, None, None


def _save_for_distill_loss_backward(ctx, inputs, output):
    index_scores, *_, ctx.strict = inputs
    _, gradient = output
    ctx.mark_non_differentiable(gradient)
    # The scores give the backward op their dtype, and make its result depend on them: a second derivative then raises.
    ctx.save_for_backward(gradient, index_scores)


def _distill_loss_formula(ctx, grad_kl, grad_gradient):
    grad_scores = None
    if ctx.needs_input_grad[0]:
        grad_scores = _DISTILL_LOSS_BACKWARD(grad_kl, *ctx.saved_tensors, ctx.strict)
    return (grad_scores, *(None,) * 8)


def _save_for_indexer_topk_backward(ctx, inputs, output):
    q, k, weights, *_, ctx.strict = inputs
    idxs = output[1]
    ctx.mark_non_differentiable(idxs)
    ctx.save_for_backward(q, k, weights, idxs)


def _indexer_topk_formula(ctx, grad_scores, grad_idxs):
    output_mask = list(ctx.needs_input_grad[:3])
    gradients = _INDEXER_TOPK_BACKWARD(grad_scores, *ctx.saved_tensors, output_mask, ctx.strict)
    wanted = (gradient if needed else None for gradient, needed in zip(gradients, output_mask))
    return (*wanted, *(None,) * 6)


def _no_second_derivative(op: str) -> Callable:
    def formula(ctx, *grads):
        raise NotImplementedError(f'v4idx::{op} has no second derivative; backend="composite" has one')

    return formula


for _op in ("_window_lse", "_distill_target", "_check_range"):
    torch.library.register_autograd(
        f"v4idx::{_op}", _no_gradients, setup_context=_mark_output_non_differentiable, lib=_LIBRARY
    )
torch.library.register_autograd(
    "v4idx::_distill_kl", _distill_kl_formula, setup_context=_save_for_distill_kl_backward, lib=_LIBRARY
)
torch.library.register_autograd(
    "v4idx::_indexer_topk", _indexer_topk_formula, setup_context=_save_for_indexer_topk_backward, lib=_LIBRARY
)
torch.library.register_autograd(
    "v4idx::_distill_loss", _distill_loss_formula, setup_context=_save_for_distill_loss_backward, lib=_LIBRARY
)
for _op in ("distill_kl", "distill_loss", "indexer_topk"):
    torch.library.register_autograd(f"v4idx::_{_op}_backward", _no_second_derivative(_op), lib=_LIBRARY)

# Selective activation checkpointing keeps these and recomputes the rest: each costs more to run than to hold.
SAC_SAVE_OPS = (_WINDOW_LSE, _DISTILL_TARGET, _DISTILL_KL, _DISTILL_LOSS, _INDEXER_TOPK)
