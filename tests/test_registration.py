"""What is registered: schemas, tags, opcheck of public and private ops, what activation checkpointing may save."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch.library import opcheck

import indexer_ops
import inputs
from backends import BACKENDS, DEVICE, needs_kernels

OPS = torch.ops.v4idx
EPS = 1e-10


def schemas():
    return sorted(str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("v4idx::"))


def test_schemas():
    assert_expected_inline(
        "\n".join(schemas()),
        """\
v4idx::_check_range(Tensor values, str name, SymInt low, SymInt high, bool is_index) -> Tensor
v4idx::_distill_kl(Tensor index_scores, Tensor target, Tensor topk_idxs, float eps, bool strict) -> Tensor
v4idx::_distill_kl_backward(Tensor grad_kl, Tensor index_scores, Tensor target, Tensor topk_idxs, float eps, bool strict) -> Tensor
v4idx::_distill_loss(Tensor index_scores, Tensor topk_idxs, Tensor query, Tensor pool, Tensor? noncompressed_lse, Tensor? joint_lse, float scale, float eps, bool strict) -> (Tensor kl, Tensor gradient)
v4idx::_distill_loss_backward(Tensor grad_kl, Tensor gradient, Tensor index_scores, bool strict) -> Tensor
v4idx::_distill_target(Tensor query, Tensor pool, Tensor topk_idxs, Tensor? noncompressed_lse, Tensor? joint_lse, float scale, bool normalize, bool strict) -> Tensor
v4idx::_indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor? entry_start, Tensor? entry_stop, SymInt topk, int ratio, SymInt query_offset, bool strict) -> (Tensor scores, Tensor idxs)
v4idx::_indexer_topk_backward(Tensor grad_scores, Tensor q, Tensor k, Tensor weights, Tensor idxs, bool[3] output_mask, bool strict) -> (Tensor, Tensor, Tensor)
v4idx::_window_lse(Tensor query, Tensor window_kv, Tensor? sink, Tensor? doc_start, int window, float scale, SymInt query_offset, bool strict) -> Tensor
v4idx::distill_kl(Tensor index_scores, Tensor target, Tensor topk_idxs, float eps=1e-10, str backend="auto") -> Tensor
v4idx::distill_loss(Tensor index_scores, Tensor topk_idxs, Tensor query, Tensor pool, Tensor? noncompressed_lse, Tensor? joint_lse, float scale, float eps=1e-10, str backend="auto") -> Tensor
v4idx::distill_target(Tensor query, Tensor pool, Tensor topk_idxs, Tensor? noncompressed_lse, Tensor? joint_lse, float scale, bool normalize=True, str backend="auto") -> Tensor
v4idx::indexer_topk(Tensor q, Tensor k, Tensor weights, Tensor? entry_start, Tensor? entry_stop, SymInt topk, int ratio, SymInt query_offset=0, str backend="auto") -> (Tensor scores, Tensor idxs)
v4idx::window_lse(Tensor query, Tensor window_kv, Tensor? sink, Tensor? doc_start, int window, float scale, SymInt query_offset=0, str backend="auto") -> Tensor""",  # noqa: E501
    )


def test_tags():
    for schema in schemas():
        op = getattr(OPS, schema.removeprefix("v4idx::").split("(")[0]).default
        assert op.tags == [torch.Tag.pt2_compliant_tag], op


def as_they_come(case):
    return case


def permuted(case):
    """The same values, every tensor dense with its dims in another order."""
    for name, tensor in vars(case).items():
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
            order = list(range(tensor.dim()))[::-1]
            setattr(case, name, tensor.permute(order).contiguous().permute(order))
    return case


def loss_arguments(case):
    return case.index_scores, case.topk_idxs, case.query, case.pool, case.noncompressed_lse, None, 0.3


LAYOUTS = pytest.mark.parametrize("layout", [as_they_come, permuted])
SIZES = {"B": 1, "S": 3, "H": 2, "T": 3, "P": 4, "K": 2}


def operands(layout):
    case = inputs.attention_inputs(**SIZES)
    case.doc_start = torch.zeros(1, 3, dtype=torch.int32, device=DEVICE)
    case.target = inputs.target_of(case.topk_idxs)
    return layout(case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requires_grad", [False, True])
@LAYOUTS
def test_opcheck_public(backend, requires_grad, layout):
    case = operands(layout)
    for tensor in vars(case).values():
        if requires_grad and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            tensor.requires_grad_()
    keys_and_rest = (case.window_kv, case.sink, case.doc_start, 2, 0.3)
    opcheck(OPS.window_lse.default, (case.query, *keys_and_rest), {"query_offset": 1, "backend": backend})
    selected = (case.query, case.pool, case.topk_idxs)
    opcheck(OPS.distill_target.default, (*selected, case.noncompressed_lse, None, 0.3), {"backend": backend})
    opcheck(OPS.distill_target.default, (*selected, None, case.noncompressed_lse, 0.3, False), {"backend": backend})
    scores = (case.index_scores, case.target, case.topk_idxs)
    opcheck(OPS.distill_kl.default, scores, {"backend": backend})
    opcheck(OPS.distill_loss.default, loss_arguments(case), {"backend": backend})


@needs_kernels
@pytest.mark.parametrize("requires_grad", [False, True])
@LAYOUTS
def test_opcheck_private(requires_grad, layout):
    case = operands(layout)
    for name in ("query", "pool", "window_kv", "index_scores"):
        getattr(case, name).requires_grad_(requires_grad)
    opcheck(OPS._window_lse.default, (case.query, case.window_kv, case.sink, case.doc_start, 2, 0.3, 1, True))
    opcheck(OPS._window_lse.default, (case.query, case.window_kv, None, None, 0, 0.3, 0, True))
    selected = (case.query, case.pool, case.topk_idxs)
    opcheck(OPS._distill_target.default, (*selected, case.noncompressed_lse, None, 0.3, True, True))
    opcheck(OPS._distill_target.default, (*selected, None, case.noncompressed_lse, 0.3, False, True))
    opcheck(OPS._distill_kl.default, (case.index_scores, case.target, case.topk_idxs, EPS, True))
    opcheck(OPS._distill_loss.default, (*loss_arguments(case), EPS, True))


@needs_kernels
@LAYOUTS
def test_opcheck_private_backward(layout):
    # Its own derivative raises, so its inputs must not ask for one.
    case = operands(layout)
    arguments = (case.grad_kl, case.index_scores, case.target, case.topk_idxs, EPS, True)
    opcheck(OPS._distill_kl_backward.default, arguments)
    opcheck(OPS._distill_loss_backward.default, (case.grad_kl, case.index_scores, case.index_scores.half(), True))


@pytest.mark.parametrize("values, is_index", [("topk_idxs", True), ("doc_start", False)])
@LAYOUTS
def test_opcheck_check_range(values, is_index, layout):
    opcheck(OPS._check_range.default, (getattr(operands(layout), values), values, -1, 4, is_index))


@needs_kernels
def test_fakes_follow_the_kernels_in_size_dtype_and_stride():
    """opcheck runs the ops at one size; here a fake meets symbolic sizes, half precision and empty results."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for sizes in (SIZES, {**SIZES, "K": 0}, {**SIZES, "S": 0}):
        for dtype in (torch.float32, torch.float16):
            case = permuted(inputs.attention_inputs(**sizes, dtype=dtype))
            case.target = torch.zeros_like(case.index_scores)
            calls = {
                OPS._window_lse.default: (case.query, case.window_kv, case.sink, None, 2, 0.3, 0, True),
                OPS._distill_target.default: (
                    case.query, case.pool, case.topk_idxs, case.noncompressed_lse, None, 0.3, True, True,
                ),
                OPS._distill_kl.default: (case.index_scores, case.target, case.topk_idxs, EPS, True),
                OPS._distill_kl_backward.default: (
                    case.grad_kl, case.index_scores, case.target, case.topk_idxs, EPS, True,
                ),
            }  # fmt: skip
            calls[OPS._distill_loss.default] = (*loss_arguments(case), EPS, True)
            calls[OPS._distill_loss_backward.default] = (
                case.grad_kl,
                case.index_scores.float(),
                case.index_scores,
                True,
            )
            for op, arguments in calls.items():
                real = op(*arguments)
                with FakeTensorMode() as mode:
                    fake = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
                assert metadata(fake) == metadata(real), op


def metadata(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [(tensor.shape, tensor.dtype, tensor.stride(), tensor.device) for tensor in outputs]


@needs_kernels
def test_second_derivative_of_private_backward_raises():
    case = operands(as_they_come)
    scores = case.index_scores.requires_grad_()
    for gradient in (
        OPS._distill_kl_backward(case.grad_kl, scores, case.target, case.topk_idxs, EPS, True),
        OPS._distill_loss_backward(case.grad_kl, case.index_scores, scores, True),
    ):
        with pytest.raises(NotImplementedError, match="no second derivative"):
            gradient.sum().backward()


def test_ops_to_save_are_private_and_forward():
    names = [str(op) for op in indexer_ops.SAC_SAVE_OPS]
    for op in ("_window_lse", "_distill_target", "_distill_kl", "_distill_loss"):
        assert f"v4idx.{op}.default" in names
    assert all(name.startswith("v4idx._") and "backward" not in name for name in names), names


@needs_kernels
def test_selective_checkpointing_saves_them():
    from functools import partial

    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    class Calls(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.namespace == "v4idx":
                self.names.append(op.__name__)
            return op(*args, **(kwargs or {}))

    case = inputs.attention_inputs(**SIZES)

    def loss(scores):
        return indexer_ops.distill_loss(
            scores, case.topk_idxs, case.query, case.pool, scale=0.3, window_kv=case.window_kv, sink=case.sink,
            window=2, backend="triton",
        )  # fmt: skip

    forward = ["_window_lse.default", "_distill_loss.default"]
    for save, replayed in ((list(indexer_ops.SAC_SAVE_OPS), []), ([], forward)):
        context = partial(create_selective_checkpoint_contexts, save)
        scores = case.index_scores.detach().requires_grad_()
        with Calls() as calls:
            checkpoint(loss, 1 * scores, use_reentrant=False, context_fn=context).backward()
        assert calls.names == [*forward, *replayed, "_distill_loss_backward.default"]
