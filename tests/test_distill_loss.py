"""indexer_ops.distill_loss: window, target and KL composed, its reductions, and what autocast must not change."""

import pytest
import torch

import indexer_ops
import inputs
import oracle
import tolerance
from backends import BACKENDS, BACKENDS_AND_DTYPES, DEVICE, needs_kernels, poisoned_allocations

NOTHING = float("-inf")
REDUCTIONS = ("none", "sum", "mean", "valid_mean")


def loss_inputs(dtype=torch.float32, **sizes):
    """Attention operands plus rows of every kind: causal, empty, past the pool, without a finite score."""
    case = inputs.attention_inputs(**{"B": 2, "S": 9, "H": 3, "P": 6, "K": 5, **sizes}, dtype=dtype)
    case.topk_idxs[1, 8, 0] = case.pool.shape[1]
    case.topk_idxs[1, 7] = case.pool.shape[1] + 3
    case.index_scores[0, 8] = NOTHING
    case.index_scores[1, 6, 2] = NOTHING
    return case


def call(case, backend, **options):
    return indexer_ops.distill_loss(
        case.index_scores, case.topk_idxs, case.query, case.pool, scale=case.scale, backend=backend, **options
    )


def denominator(case, source):
    """Arguments that choose the rest of attention's denominator, and the pair of log-sum-exps that they stand for."""
    if source == "window_kv":
        doc_start = torch.tensor([0] * 4 + [4] * 5, device=DEVICE).expand(2, 9)
        options = {"window_kv": case.window_kv, "sink": case.sink, "doc_start": doc_start, "window": 3}
        lse = oracle.window_lse(case.query, case.window_kv, case.sink, doc_start, 3, case.scale)
        return options, (lse, None)
    if source == "selected":
        return {}, (None, None)
    lse = case.noncompressed_lse
    return {source: lse}, (lse, None) if source == "noncompressed_lse" else (None, lse)


def expected_with_bounds(case, pair):
    """Per row: loss, bound; per slot: gradient for a slope of 1, bound."""
    P = case.pool.shape[1]
    inside = torch.where(case.topk_idxs < P, case.topk_idxs, -1)
    mass = oracle.distill_target(case.query, case.pool, case.topk_idxs, *pair, case.scale, normalize=False)
    lse = pair[0] if pair[1] is None else pair[1]
    bound = tolerance.distill_target(case.query, case.pool, lse, case.scale, mass)
    if pair[0] is not None:  # it may have been computed on the way, with an error that shifts every exponent alike
        shift = tolerance.window_lse(case.query, case.window_kv, case.scale, pair[0].cpu().double())
        bound = bound + mass * shift.amax(-1, keepdim=True)
    floor = 1e-10 if lse is None else torch.finfo(torch.float32).tiny
    bound = tolerance.normalized(mass, bound, floor, case.query.dtype)
    target = oracle.distill_target(case.query, case.pool, case.topk_idxs, *pair, case.scale)
    kl = oracle.distill_loss_rows(case.index_scores, case.topk_idxs, case.query, case.pool, *pair, case.scale)
    slope = torch.ones_like(kl)
    gradient = oracle.distill_kl_gradient(slope, case.index_scores, target, inside)
    kl_bound = tolerance.distill_kl(case.index_scores, target, 1e-10, bound)
    return kl, kl_bound, gradient, tolerance.distill_kl_gradient(slope, case.index_scores, target, gradient, bound)


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("source", ["window_kv", "noncompressed_lse", "joint_lse", "selected"])
def test_value_and_gradient(backend, dtype, source):
    case = loss_inputs(dtype)
    options, pair = denominator(case, source)
    kl, kl_bound, gradient, gradient_bound = expected_with_bounds(case, pair)
    leaf = case.index_scores = case.index_scores.requires_grad_()
    with poisoned_allocations():
        loss = call(case, backend, reduction="none", **options)
        (actual,) = torch.autograd.grad(loss.sum(), leaf)
    tolerance.assert_within(loss, kl, kl_bound)
    tolerance.assert_within(actual, gradient, gradient_bound)
    outside = (case.topk_idxs < 0) | (case.topk_idxs >= case.pool.shape[1])
    assert bool((actual[outside] == 0).all())
    empty = ~oracle.is_valid_row(case.index_scores, case.topk_idxs, case.pool.shape[1])
    assert int(empty.sum()) == 4 and bool((loss.cpu()[empty] == 0).all()) and bool((actual.cpu()[empty] == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "reduction, divisor", [*((name, None) for name in REDUCTIONS), ("sum", 8), ("sum", 2.5), ("sum", "tensor")]
)
def test_reductions(backend, reduction, weighted, divisor):
    case = loss_inputs()
    options, pair = denominator(case, "noncompressed_lse")
    row_weight = None
    if weighted:
        row_weight = torch.rand(2, 9, generator=torch.Generator().manual_seed(5)).to(DEVICE)
        row_weight[0, :4] = 0.0
    kl, bound, gradient, gradient_bound = expected_with_bounds(case, pair)
    number = 1.0 if divisor is None else 3.0 if divisor == "tensor" else float(divisor)
    divisor = torch.tensor(3.0, device=DEVICE) if divisor == "tensor" else divisor
    valid = oracle.is_valid_row(case.index_scores, case.topk_idxs, case.pool.shape[1])
    leaf = case.index_scores = case.index_scores.requires_grad_()
    loss = call(case, backend, reduction=reduction, row_weight=row_weight, divisor=divisor, **options)
    (actual,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.dtype == torch.float32

    def reduced(rows):
        return oracle.reduced(rows, valid, reduction, row_weight, number)

    expected = reduced(kl)
    assert float(expected.sum()) > 0
    summing = 64 * tolerance.unit_roundoff(torch.float32)  # 18 rows, a weight and a division
    tolerance.assert_within(loss, expected, reduced(bound) + summing * expected.abs())
    weight = torch.autograd.functional.jacobian(lambda rows: reduced(rows).sum(), kl).unsqueeze(-1)
    tolerance.assert_within(actual, gradient * weight, (gradient_bound + summing * gradient.abs()) * weight)


@needs_kernels
def test_second_derivative_of_the_kernel_raises():
    case = loss_inputs()
    leaf = case.index_scores = case.index_scores.requires_grad_()
    loss = call(case, "triton", noncompressed_lse=case.noncompressed_lse)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match='distill_loss has no second derivative.*"composite"'):
        (loss + gradient.pow(2).sum()).backward()  # a penalty on the gradient must not be dropped in silence


def test_composite_gradients_up_to_the_second():
    case = inputs.attention_inputs(B=1, S=6, K=3, dtype=torch.float64)

    def loss(index_scores):
        return indexer_ops.distill_loss(
            index_scores, case.topk_idxs, case.query, case.pool, scale=case.scale, window_kv=case.window_kv,
            sink=case.sink, window=2, eps=1e-3, reduction="none", backend="composite",
        )  # fmt: skip

    assert torch.autograd.gradcheck(loss, case.index_scores.requires_grad_())
    assert torch.autograd.gradgradcheck(loss, case.index_scores)


@pytest.mark.parametrize("backend", BACKENDS)
def test_default_is_the_mean(backend):
    case = loss_inputs()
    loss = call(case, backend, noncompressed_lse=case.noncompressed_lse)
    assert torch.equal(loss, call(case, backend, noncompressed_lse=case.noncompressed_lse, reduction="mean"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("why", ["no valid slot", "no finite score", "no weight"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "valid_mean"])
def test_nothing_to_average(backend, why, reduction):
    case = loss_inputs()
    row_weight = None
    if why == "no valid slot":
        case.topk_idxs = torch.full_like(case.topk_idxs, -1)
    elif why == "no finite score":
        case.index_scores = torch.full_like(case.index_scores, NOTHING)
    else:
        row_weight = torch.zeros(2, 9, device=DEVICE)
    leaf = case.index_scores = case.index_scores.requires_grad_()
    loss = call(case, backend, noncompressed_lse=case.noncompressed_lse, reduction=reduction, row_weight=row_weight)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert float(loss.detach()) == 0.0 and bool((gradient == 0).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_valid_mean_ignores_padding(backend):
    case = loss_inputs()
    options = {"noncompressed_lse": case.noncompressed_lse, "reduction": "valid_mean"}
    loss = call(case, backend, **options)
    padded = inputs.attention_inputs(B=2, S=14, H=3, P=6, K=5)
    for name in ("index_scores", "topk_idxs", "query", "noncompressed_lse"):
        getattr(padded, name)[:, :9] = getattr(case, name)
    padded.topk_idxs[:, 9:] = -1
    padded.pool, padded.scale = case.pool, case.scale
    options["noncompressed_lse"] = padded.noncompressed_lse
    torch.testing.assert_close(call(padded, backend, **options), loss)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_over_micro_batches_add_up(backend):
    case = loss_inputs()
    options = {"reduction": "sum", "divisor": torch.tensor(18.0, device=DEVICE)}
    total = call(case, backend, noncompressed_lse=case.noncompressed_lse)
    parts = 0.0
    for b in range(2):
        part = inputs.attention_inputs(B=1)
        for name in ("index_scores", "topk_idxs", "query", "pool"):
            setattr(part, name, getattr(case, name)[b : b + 1])
        part.scale = case.scale
        parts = parts + call(part, backend, noncompressed_lse=case.noncompressed_lse[b : b + 1], **options)
    torch.testing.assert_close(parts, total)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [{"B": 0}, {"S": 0}, {"T": 0}, {"P": 0}, {"K": 0}, {"H": 0}])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_empty_sizes(backend, size, reduction):
    case = inputs.attention_inputs(**{"B": 2, "S": 3, "H": 2, "P": 4, "K": 3, **size})
    leaf = case.index_scores.requires_grad_()
    loss = call(case, backend, window_kv=case.window_kv, sink=case.sink, window=2, reduction=reduction)
    assert loss.shape == (leaf.shape[:2] if reduction == "none" else ())
    if "T" not in size and "H" not in size:
        assert bool((loss == 0).all())
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    assert gradient.shape == leaf.shape and bool(gradient.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_scores_learn(backend):
    case = loss_inputs()
    teacher = [tensor.requires_grad_() for tensor in (case.query, case.pool, case.window_kv, case.sink)]
    options = {"window_kv": case.window_kv, "sink": case.sink, "window": 3}
    assert not call(case, backend, **options).requires_grad
    case.index_scores.requires_grad_()
    call(case, backend, **options).backward()
    assert case.index_scores.grad is not None and all(tensor.grad is None for tensor in teacher)


@pytest.mark.parametrize("backend", BACKENDS)
def test_check_inputs(backend):
    case = inputs.attention_inputs()
    doc_start = torch.zeros(2, 6, dtype=torch.int32, device=DEVICE)
    options = {"window_kv": case.window_kv, "sink": case.sink, "window": 3, "doc_start": doc_start}
    loss = call(case, backend, **options)
    assert torch.equal(call(case, backend, check_inputs=True, **options), loss)
    doc_start[1, 2] = 7
    with pytest.raises(ValueError, match=r"doc_start\[1, 2\] is 7, outside \[0, 7\)"):
        call(case, backend, check_inputs=True, **options)
    case.topk_idxs[0, 3, 1] = 5
    with pytest.raises(IndexError, match=r"topk_idxs\[0, 3, 1\] is 5, outside \[-1, 5\)"):
        call(case, backend, check_inputs=True, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse", [60.0, 150.0, 3e38])
def test_attention_all_in_the_window(backend, lse):
    """A tiny mass gives the right distribution, none at all gives exactly no loss: never NaN."""
    case = inputs.attention_inputs()
    case.noncompressed_lse[:] = lse
    leaf = case.index_scores.requires_grad_()
    loss = call(case, backend, noncompressed_lse=case.noncompressed_lse, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    if lse > 100:
        assert bool((loss == 0).all()) and bool((gradient == 0).all())
    else:
        kl, bound, expected, gradient_bound = expected_with_bounds(case, (case.noncompressed_lse, None))
        tolerance.assert_within(loss, kl, bound)
        tolerance.assert_within(gradient, expected, gradient_bound)
        assert bool((gradient != 0).any())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(backend, autocast_dtype):
    case = loss_inputs()
    leaf = case.index_scores = case.index_scores.requires_grad_()
    options = {"window_kv": case.window_kv, "sink": case.sink, "window": 3, "reduction": "valid_mean"}
    plain = call(case, backend, **options)
    (gradient,) = torch.autograd.grad(plain, leaf)
    with torch.autocast(DEVICE, dtype=autocast_dtype):
        cast = call(case, backend, **options)
        (cast_gradient,) = torch.autograd.grad(cast, leaf)
    assert torch.equal(cast, plain) and torch.equal(cast_gradient, gradient)
