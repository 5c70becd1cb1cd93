"""The gradient of indexer_ops.indexer_topk against the long-hand oracle; opcheck of its ops, forward and backward."""

import pytest
import torch
from torch.library import opcheck

import indexer_ops
import oracle_indexer as oracle
import tolerance
from backends import BACKENDS, BACKENDS_AND_DTYPES, DEVICE, needs_kernels
from indexer_inputs import WIDTHS, bounds, operands

OPS = torch.ops.v4idx


# --- Gradients ----------------------------------------------------------------------------------------------------


def run_with_gradients(arguments, backend, slope=None, **options):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in arguments]
    scores, idxs = indexer_ops.indexer_topk(*leaves, backend=backend, **options)
    generator = torch.Generator().manual_seed(9)
    slope = torch.randn(scores.shape, generator=generator, dtype=torch.float64).to(scores) if slope is None else slope
    return slope, idxs, torch.autograd.grad(scores, leaves, slope)


def gradient_bounds(slope, q, k, weights, idxs):
    """The same sums of magnitudes, times the roundings of a term and of the longest sum, in the dtype of the operands.

    The kernel rounds the gradient of a product to the operands' dtype before it multiplies; results are stored in it.
    """
    magnitudes = oracle.gradients(slope.abs(), q.abs(), k.abs(), weights.abs(), idxs)
    terms = q.shape[1] * q.shape[2] + idxs.shape[2] + q.shape[-1] + tolerance.PER_ELEMENT
    rounding = terms * tolerance.unit_roundoff(q.dtype) + torch.finfo(q.dtype).eps
    return [rounding * magnitude for magnitude in magnitudes]


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("widths", ["odd heads", "48 dims", "topk above P"])
def test_gradients(backend, dtype, widths):
    sizes = dict(WIDTHS[widths])
    options = {"topk": sizes.pop("topk"), "ratio": 1}
    arguments = operands(**sizes, dtype=dtype)
    slope, idxs, actual = run_with_gradients(arguments, backend, **options)
    expected = oracle.gradients(slope, *arguments, idxs)
    bounds_of = gradient_bounds(slope, *arguments, idxs)
    for got, wanted, bound, tensor in zip(actual, expected, bounds_of, arguments, strict=True):
        assert got.dtype == tensor.dtype and wanted.any()
        tolerance.assert_within(got, wanted, bound)


@needs_kernels
@pytest.mark.parametrize("scale", [1e-20, 1.0])
def test_deterministic_dk_does_not_depend_on_the_order_of_queries(scale):
    """The interpreter runs programs in order, so the order itself is what must not matter: shuffled queries."""
    q, k, weights = operands(B=1, S=10, P=4, seed=4)
    stop = torch.full((1, 10), 4, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(10, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    slope = scale * torch.randn(1, 10, 3, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    torch.use_deterministic_algorithms(True)
    try:
        options = {"topk": 3, "ratio": 1, "entry_stop": stop}
        _, idxs, (_, dk, _) = run_with_gradients((q, k, weights), "triton", slope, **options)
        shuffled = (q[:, order], k, weights[:, order])
        _, _, (_, dk_shuffled, _) = run_with_gradients(shuffled, "triton", slope[:, order], **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(dk, dk_shuffled)
    bound = gradient_bounds(slope, q, k, weights, idxs)[1]
    tolerance.assert_within(dk, oracle.gradients(slope, q, k, weights, idxs)[1], bound)


def test_gradcheck_of_the_composite():
    arguments = [tensor.requires_grad_() for tensor in operands(B=1, S=4, Hi=2, Di=3, P=4, dtype=torch.float64)]

    def scores(*leaves):
        scores, idxs = indexer_ops.indexer_topk(*leaves, topk=2, ratio=1, backend="composite")
        return scores.masked_fill(idxs < 0, 0.0)

    assert torch.autograd.gradcheck(scores, arguments)
    assert torch.autograd.gradgradcheck(scores, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_relu_has_no_slope_at_zero(backend):
    q, k, weights = operands(S=4, P=4)
    q = torch.zeros_like(q)
    _, _, gradients = run_with_gradients((q, k, weights), backend, topk=2, ratio=1)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("needed", [(0,), (1,), (0, 2)])
def test_only_gradients_that_are_asked_for(backend, needed):
    arguments, slope = operands(B=1, S=3), torch.ones(1, 3, 3, device=DEVICE)
    _, _, expected = run_with_gradients(arguments, backend, slope, topk=3, ratio=1)
    leaves = [tensor.clone().requires_grad_(index in needed) for index, tensor in enumerate(arguments)]
    masks = []

    class Masks(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is OPS._indexer_topk_backward.default:
                masks.append(list(args[5]))
            return op(*args, **(kwargs or {}))

    scores, idxs = indexer_ops.indexer_topk(*leaves, topk=3, ratio=1, backend=backend)
    assert scores.requires_grad and not idxs.requires_grad
    with Masks():
        scores.backward(slope)
    for index, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (index not in needed)
        if index in needed:
            torch.testing.assert_close(leaf.grad, expected[index])
    assert masks == ([[index in needed for index in range(3)]] if backend == "triton" else [])


@needs_kernels
def test_second_derivative_of_the_fused_op_raises():
    leaves = [tensor.requires_grad_() for tensor in operands(S=3)]
    scores, idxs = indexer_ops.indexer_topk(*leaves, topk=2, ratio=1, backend="triton")
    (dq,) = torch.autograd.grad(scores.masked_fill(idxs < 0, 0).sin().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match='indexer_topk has no second derivative; backend="composite"'):
        dq.sum().backward()


# --- Registration -------------------------------------------------------------------------------------------------


def dense_permuted(tensor):
    order = list(range(tensor.dim()))[::-1]
    return tensor.permute(order).contiguous().permute(order)


LAYOUTS = pytest.mark.parametrize("layout", [torch.Tensor.clone, dense_permuted], ids=["contiguous", "permuted"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requires_grad", [False, True])
@LAYOUTS
def test_opcheck_public(backend, requires_grad, layout):
    arguments = [layout(tensor).requires_grad_(requires_grad) for tensor in operands(B=2, S=3, Hi=2, P=4)]
    start, stop = layout(bounds(0, 1, 0)), layout(bounds(4, 3, 2))
    opcheck(OPS.indexer_topk.default, (*arguments, start, stop, 2, 1), {"query_offset": 1, "backend": backend})


@needs_kernels
@pytest.mark.parametrize("requires_grad", [False, True])
@LAYOUTS
def test_opcheck_private(requires_grad, layout):
    arguments = [layout(tensor).requires_grad_(requires_grad) for tensor in operands(B=2, S=3, Hi=2, P=4)]
    opcheck(OPS._indexer_topk.default, (*arguments, layout(bounds(0, 1, 0)), layout(bounds(4, 3, 2)), 2, 1, 0, True))


@needs_kernels
@pytest.mark.parametrize("output_mask", [(True, True, True), (False, True, False)])
@LAYOUTS
def test_opcheck_private_backward(layout, output_mask):
    # Its own derivative raises, so its inputs must not ask for one.
    arguments = [layout(tensor) for tensor in operands(B=2, S=3, Hi=2, P=4)]
    slope, idxs = torch.ones(2, 3, 2, device=DEVICE), bounds(0, 1, 2, -1, 3, 0).view(2, 3, 2)
    opcheck(OPS._indexer_topk_backward.default, (layout(slope), *arguments, layout(idxs), list(output_mask), True))
