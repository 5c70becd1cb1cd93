"""distill_kl and its gradient: composite and kernels against the oracle."""

import pytest
import torch
from hypothesis import given, settings, strategies

import indexer_ops
import inputs
import oracle
import tolerance
from backends import BACKENDS, BACKENDS_AND_DTYPES, DEVICE, needs_kernels, poisoned_allocations
from indexer_ops import reference

NOTHING = float("-inf")
EPS = 1e-10


def check(backend, index_scores, target, topk_idxs, *, eps=EPS, grad_kl=None):
    """Compare value and gradient with the oracle; returns both."""
    if grad_kl is None:
        generator = torch.Generator().manual_seed(7)
        grad_kl = torch.randn(index_scores.shape[:2], generator=generator, dtype=torch.float64).to(DEVICE)
    leaf = index_scores.detach().requires_grad_()
    with poisoned_allocations():
        kl = indexer_ops.distill_kl(leaf, target, topk_idxs, eps=eps, backend=backend)
        grad_kl = grad_kl.to(kl.device, kl.dtype)
        (gradient,) = torch.autograd.grad(kl, leaf, grad_kl)
    assert kl.dtype == (torch.float64 if index_scores.dtype == torch.float64 else torch.float32)
    assert kl.device == index_scores.device and gradient.dtype == index_scores.dtype
    expected = oracle.distill_kl(index_scores, target, topk_idxs, eps)
    tolerance.assert_within(kl, expected, tolerance.distill_kl(index_scores, target, eps))
    expected = oracle.distill_kl_gradient(grad_kl, index_scores, target, topk_idxs, eps)
    bound = tolerance.distill_kl_gradient(grad_kl, index_scores, target, expected)
    tolerance.assert_within(gradient, expected, bound)
    assert bool((gradient[topk_idxs < 0] == 0).all())
    return kl.detach(), gradient


def rows(B, S, K, *, dtype=torch.float32, index_dtype=torch.int32, seed=0):
    """Scores, target and indices of causal rows, of which the first are empty."""
    topk_idxs = inputs.causal_topk_idxs(B, S, 2 * K + 1, K, ratio=1, query_offset=K - S, seed=seed, dtype=index_dtype)
    generator = torch.Generator().manual_seed(seed)
    index_scores = 3 * torch.randn(B, S, K, generator=generator, dtype=torch.float64)
    target_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return index_scores.to(DEVICE, dtype), inputs.target_of(topk_idxs, dtype=target_dtype, seed=seed), topk_idxs


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("B, S, K", [(2, 5, 1), (1, 7, 9), (2, 6, 33), (1, 3, 100), (1, 3, 512), (1, 2, 1025)])
def test_sizes(backend, dtype, index_dtype, B, S, K):
    check(backend, *rows(B, S, K, dtype=dtype, index_dtype=index_dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_target_in_half_precision(backend, dtype):
    if backend == "triton" and dtype == torch.bfloat16 and DEVICE == "cpu":
        dtype = torch.float16  # the interpreter is wrong for bfloat16
    index_scores, target, topk_idxs = rows(2, 5, 9)
    check(backend, index_scores, target.to(dtype), topk_idxs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [1e-10, 1e-4, 0.5])
def test_eps(backend, eps):
    index_scores, target, topk_idxs = rows(2, 5, 9)
    check(backend, 4 * index_scores, target, topk_idxs, eps=eps)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    index_scores, target, topk_idxs = rows(2, 6, 9)
    wide = [torch.cat([tensor, tensor], -1)[..., :9] for tensor in (index_scores, target, topk_idxs)]
    by_rows = [tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in (index_scores, target, topk_idxs)]
    by_slots = [inputs.with_strided_last_dim(tensor) for tensor in (index_scores, target, topk_idxs)]
    expected = check(backend, index_scores, target, topk_idxs)
    for variant in (wide, by_rows, by_slots, (index_scores, by_slots[1], by_rows[2])):
        for actual, same in zip(check(backend, *variant), expected):
            assert torch.equal(actual, same)
    check(backend, index_scores, target, topk_idxs, grad_kl=torch.full((), 0.5, device=DEVICE).expand(2, 6))
    check(backend, index_scores, target, topk_idxs, grad_kl=torch.randn(6, 2, device=DEVICE).t())
    one_batch = index_scores[:1].expand(2, 6, 9), target, topk_idxs
    check(backend, *one_batch)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("B, S, K", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_sizes(backend, B, S, K):
    index_scores = torch.randn(B, S, K, device=DEVICE, requires_grad=True)
    target = torch.zeros(B, S, K, device=DEVICE)
    topk_idxs = torch.zeros(B, S, K, dtype=torch.int32, device=DEVICE)
    kl = indexer_ops.distill_kl(index_scores, target, topk_idxs, backend=backend)
    assert kl.dtype == torch.float32 and kl.requires_grad and torch.equal(kl, torch.zeros(B, S, device=DEVICE))
    (gradient,) = torch.autograd.grad(kl.sum(), index_scores)
    assert gradient.shape == index_scores.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_rows(backend):
    index_scores, target, topk_idxs = rows(2, 4, 9)
    topk_idxs[0] = -1
    target[0] = 0.0
    kl, gradient = check(backend, index_scores, target, topk_idxs)
    assert bool((kl[0] == 0).all()) and bool((gradient[0] == 0).all()) and bool((kl[1, -1] != 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_lies_in_invalid_slots_is_ignored(backend):
    index_scores, target, topk_idxs = rows(2, 6, 9)
    invalid = topk_idxs < 0
    assert bool(invalid.any()) and not bool(invalid.all())
    expected = check(backend, index_scores, target, topk_idxs)
    for score, share in ((NOTHING, 0.0), (3e38, 0.3), (float("nan"), 7.0)):
        topk_idxs = torch.where(invalid, -(2**31), topk_idxs)
        index_scores = torch.where(invalid, score, index_scores)
        leaf = index_scores.requires_grad_()
        kl = indexer_ops.distill_kl(leaf, torch.where(invalid, share, target), topk_idxs, backend=backend)
        (gradient,) = torch.autograd.grad(kl.sum(), leaf)
        assert torch.equal(kl, expected[0])
        reference_gradient = check(
            backend, torch.where(invalid, 0.0, index_scores.detach()), target, topk_idxs, grad_kl=torch.ones(2, 6)
        )[1]
        assert torch.equal(gradient, reference_gradient)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_index_from_zero_on_is_valid(backend):
    index_scores, target, topk_idxs = rows(1, 6, 9)
    far = torch.where(topk_idxs >= 0, topk_idxs + 2**30, topk_idxs)
    for actual, same in zip(check(backend, index_scores, target, far), check(backend, index_scores, target, topk_idxs)):
        assert torch.equal(actual, same)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_minus_infinity(backend):
    index_scores, target, topk_idxs = rows(1, 5, 9)
    topk_idxs = torch.arange(9, device=DEVICE).expand(1, 5, 9).clone()
    target = inputs.target_of(topk_idxs)
    index_scores[0, 1, 3] = NOTHING
    index_scores[0, 2, :8] = NOTHING
    index_scores[0, 3] = NOTHING
    index_scores[0, 4] = NOTHING
    index_scores[0, 4, 5] = 1.0
    topk_idxs[0, 4, 5] = -1  # the only finite score stands in an empty slot
    kl, gradient = check(backend, index_scores, target, topk_idxs)
    assert bool((kl[0, 3:] == 0).all()) and bool((gradient[0, 3:] == 0).all())
    assert bool((gradient[index_scores == NOTHING] == 0).all()) and bool((kl[0, :3] != 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("largest", [3e38, -3e38, 1e4])
def test_extreme_scores(backend, largest):
    topk_idxs = torch.tensor([[[0, -1, 1, 2]]], device=DEVICE)
    index_scores = torch.tensor([[[largest, 0.0, -largest, 5.0]]], device=DEVICE)
    target = torch.tensor([[[0.25, 0.0, 0.5, 0.25]]], device=DEVICE)
    check(backend, index_scores, target, topk_idxs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_perfect_student_has_no_loss_and_no_gradient(backend):
    topk_idxs = torch.tensor([[[4, -1, 1, 2, -1]]], device=DEVICE)
    target = torch.tensor([[[0.5, 0.0, 0.25, 0.25, 0.0]]], device=DEVICE)
    kl, gradient = check(backend, target.log() + 3.0, target, topk_idxs)
    tolerance.assert_within(kl, torch.zeros(1, 1), tolerance.distill_kl(target, target, EPS))
    assert float(gradient.abs().max()) < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_descent_lowers_the_loss(backend):
    index_scores, target, topk_idxs = rows(1, 8, 9)
    kl, gradient = check(backend, index_scores, target, topk_idxs, grad_kl=torch.ones(1, 8))
    after, _ = check(backend, index_scores - 0.5 * gradient, target, topk_idxs)
    several = (topk_idxs >= 0).sum(-1) > 1
    assert bool((after < kl)[several].all()) and bool(several.any())


@pytest.mark.parametrize("backend", BACKENDS)
def test_target_receives_no_gradient(backend):
    index_scores, target, topk_idxs = rows(1, 3, 9)
    assert not indexer_ops.distill_kl(index_scores, target.requires_grad_(), topk_idxs, backend=backend).requires_grad


def test_oracle_gradient_is_the_slope_of_the_oracle():
    index_scores, target, topk_idxs = rows(1, 4, 5, dtype=torch.float64)
    index_scores, target, topk_idxs = index_scores.cpu(), target.cpu(), topk_idxs.cpu()
    gradient = oracle.distill_kl_gradient(torch.ones(1, 4), index_scores, target, topk_idxs, 1e-3)
    step = 1e-5
    for k in range(5):
        moved = index_scores.clone()
        moved[..., k] += step
        higher = oracle.distill_kl(moved, target, topk_idxs, 1e-3)
        moved[..., k] -= 2 * step
        slope = (higher - oracle.distill_kl(moved, target, topk_idxs, 1e-3)) / (2 * step)
        torch.testing.assert_close(gradient[..., k], slope, rtol=1e-7, atol=1e-9)


def test_composite_gradients_up_to_the_second():
    index_scores, target, topk_idxs = rows(1, 4, 4, dtype=torch.float64)
    topk_idxs[0, 3, 1] = -1
    index_scores[0, 3, 2] = -40.0

    def kl(scores):
        return indexer_ops.distill_kl(scores, target, topk_idxs, eps=1e-3, backend="composite")

    assert torch.autograd.gradcheck(kl, index_scores.requires_grad_())
    assert torch.autograd.gradgradcheck(kl, index_scores)


def test_closed_form_is_the_derivative_of_the_composite():
    index_scores, target, topk_idxs = rows(2, 6, 9, dtype=torch.float64)
    index_scores[1, 5, 2] = NOTHING
    grad_kl = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    closed = reference.distill_kl_backward(grad_kl, index_scores, target, topk_idxs, EPS)
    expected = oracle.distill_kl_gradient(grad_kl, index_scores, target, topk_idxs, EPS)
    tolerance.assert_within(closed, expected, tolerance.distill_kl_gradient(grad_kl, index_scores, target, expected))


@needs_kernels
def test_second_derivative_of_the_kernel_raises():
    index_scores, target, topk_idxs = rows(1, 5, 9)
    leaf = index_scores.requires_grad_()
    kl = indexer_ops.distill_kl(leaf, target, topk_idxs, backend="triton")
    (gradient,) = torch.autograd.grad(kl.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match='distill_kl has no second derivative.*"composite"'):
        (kl.sum() + gradient.pow(2).sum()).backward()


@pytest.mark.parametrize("budget", [2_000, 20_000])
def test_chunks_change_nothing(monkeypatch, budget):
    case = rows(2, 30, 9)
    whole = check("composite", *case)
    calls = []
    rows_of_chunk = reference._kl_rows
    monkeypatch.setattr(reference, "_kl_rows", lambda *args: calls.append(args) or rows_of_chunk(*args))
    monkeypatch.setattr(reference, "TRANSIENT_BYTES", budget)
    for actual, same in zip(check("composite", *case), whole):
        assert torch.equal(actual, same)
    assert len(calls) >= 4, "checkpointed chunks run forward and again in backward"
    # The closed form walks over its own chunks.
    arguments = (torch.ones(2, 30, device=DEVICE), *case, EPS)
    chunked = reference.distill_kl_backward(*arguments)
    monkeypatch.undo()
    assert torch.equal(chunked, reference.distill_kl_backward(*arguments))


def test_second_derivative_through_chunks(monkeypatch):
    index_scores, target, topk_idxs = rows(1, 5, 4, dtype=torch.float64)
    monkeypatch.setattr(reference, "TRANSIENT_BYTES", 700)

    def kl(scores):
        return indexer_ops.distill_kl(scores, target, topk_idxs, eps=1e-3, backend="composite")

    assert torch.autograd.gradgradcheck(kl, index_scores.requires_grad_())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    sizes=strategies.tuples(*(strategies.integers(1, limit) for limit in (3, 9, 20))),
    spread=strategies.sampled_from([0.1, 3.0, 300.0]),
    seed=strategies.integers(0, 99),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_size(backend, sizes, spread, seed):
    index_scores, target, topk_idxs = rows(*sizes, seed=seed)
    check(backend, spread * index_scores, target, topk_idxs)
