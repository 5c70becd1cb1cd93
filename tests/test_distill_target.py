"""distill_target: composite and both kernels (row held, row tiled) against the oracle."""

from importlib import import_module

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
DENOMINATORS = ("noncompressed_lse", "joint_lse", "selected")


def call(backend, query, pool, topk_idxs, noncompressed_lse=None, joint_lse=None, **options):
    with poisoned_allocations():
        return indexer_ops.distill_target(
            query, pool, topk_idxs, noncompressed_lse, joint_lse, backend=backend, **options
        )


def check(backend, query, pool, topk_idxs, noncompressed_lse=None, joint_lse=None, *, scale, normalize=True):
    """Compare one call with the oracle; returns what the op returned."""
    arguments = (query, pool, topk_idxs, noncompressed_lse, joint_lse)
    actual = call(backend, *arguments, scale=scale, normalize=normalize)
    lse = noncompressed_lse if joint_lse is None else joint_lse
    assert actual.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    assert actual.device == query.device and actual.is_contiguous()
    expected = oracle.distill_target(*arguments, scale, normalize=False)
    bound = tolerance.distill_target(query, pool, lse, scale, expected)
    if normalize:
        floor = 1e-10 if lse is None else torch.finfo(torch.float32).tiny
        bound = tolerance.normalized(expected, bound, floor, query.dtype)
        expected = oracle.distill_target(*arguments, scale)
    tolerance.assert_within(actual, expected, bound)
    empty = ((topk_idxs < 0) | (topk_idxs >= pool.shape[1])).cpu()
    assert bool((actual.cpu()[empty] == 0).all())
    return actual


def lses(case, denominator):
    """The pair of log-sum-exp arguments for one choice of denominator."""
    if denominator == "selected":
        return None, None
    lse = case.noncompressed_lse
    return (lse, None) if denominator == "noncompressed_lse" else (None, lse + 2.0)


@pytest.fixture(params=["composite", *(pytest.param(kernel, marks=needs_kernels) for kernel in ("held", "tiled"))])
def implementation(request, monkeypatch):
    """The backend to ask for. Which kernel "triton" runs is a matter of architecture: here each serves every size."""
    if request.param == "composite":
        return "composite"
    configs = import_module("indexer_ops._triton.configs")

    def forced(architecture, H, K, D, itemsize, joint):
        def tile(largest):
            entries = configs.block_of(K, largest)
            return configs.TileConfig(16, entries, configs.dividing_block(D, 32), num_warps=4, num_stages=2)

        if request.param == "held" and not joint:
            return configs.TargetConfig(held=tile(8192))
        return configs.TargetConfig(lse=tile(32), target=tile(16))

    monkeypatch.setattr(configs, "target_config", forced)
    return "triton"


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("normalize", [True, False])
def test_denominators(backend, dtype, denominator, normalize):
    case = inputs.attention_inputs(B=2, S=7, H=5, D=32, P=6, K=9, dtype=dtype)
    pair = lses(case, denominator)
    check(backend, case.query, case.pool, case.topk_idxs, *pair, scale=case.scale, normalize=normalize)


SIZES = [
    # B, S, H, D, P, K
    (2, 3, 1, 16, 9, 1),
    (1, 4, 3, 48, 40, 9),
    (1, 2, 64, 16, 30, 100),
    (1, 2, 127, 32, 20, 17),
    (1, 2, 128, 16, 20, 33),
    (1, 1, 2, 16, 600, 512),
    (1, 2, 33, 80, 3, 5),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("B, S, H, D, P, K", SIZES)
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_sizes(implementation, dtype, B, S, H, D, P, K, denominator):
    case = inputs.attention_inputs(B, S, H, D, P=P, K=K, dtype=dtype)
    case.topk_idxs = inputs.causal_topk_idxs(B, S, P, K, ratio=1, query_offset=P // 2)
    check(implementation, case.query, case.pool, case.topk_idxs, *lses(case, denominator), scale=case.scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_duplicate_and_full_slots(backend, denominator):
    case = inputs.attention_inputs(B=1, S=3, H=2, P=4, K=6)
    case.topk_idxs = torch.tensor([[[3, 1, 0, 2, 1, 1], [0] * 6, [2, -1, 2, 3, -1, 0]]], device=DEVICE)
    check(backend, case.query, case.pool, case.topk_idxs, *lses(case, denominator), scale=case.scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_strides(backend, denominator):
    case = inputs.attention_inputs(B=2, S=6, H=3, P=5, K=4)
    pair = tuple(None if lse is None else inputs.with_strided_last_dim(lse) for lse in lses(case, denominator))
    for query in (inputs.as_transposed_view(case.query), inputs.with_strided_last_dim(case.query)):
        for pool in (
            inputs.amid_poison(case.pool),
            inputs.with_strided_last_dim(case.pool),
            case.pool[:1].expand(2, 5, 16),
        ):
            idxs = inputs.with_strided_last_dim(case.topk_idxs)
            check(backend, query, pool, idxs, *pair, scale=case.scale)


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_indices_past_the_pool_are_empty_slots(implementation, denominator):
    case = inputs.attention_inputs(B=2, S=4, H=2, P=5, K=6, index_dtype=torch.int64)
    case.topk_idxs[:, :, 1] = 5
    case.topk_idxs[:, 1, 2] = 7
    case.topk_idxs[:, 2, 3] = 2**31 - 1
    case.topk_idxs[:, 3, 4] = -(2**31)
    pool = inputs.amid_poison(case.pool)
    pair = lses(case, denominator)
    narrow = check(implementation, case.query, pool, case.topk_idxs.int(), *pair, scale=case.scale)
    # As 32-bit integers these would be the valid entries 1 and 0.
    case.topk_idxs[:, 2, 3] = 2**32 + 1
    case.topk_idxs[:, 3, 4] = -(2**32)
    wide = check(implementation, case.query, pool, case.topk_idxs, *pair, scale=case.scale)
    assert torch.equal(narrow, wide)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [{"B": 0}, {"S": 0}, {"H": 0}, {"P": 0}, {"K": 0}, {"P": 0, "K": 0}])
@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("normalize", [True, False])
def test_empty_sizes(backend, size, denominator, normalize):
    sizes = {"B": 2, "S": 3, "H": 2, "P": 4, "K": 3, **size}
    case = inputs.attention_inputs(**sizes)
    target = call(
        backend, case.query, case.pool, case.topk_idxs, *lses(case, denominator), scale=1.0, normalize=normalize
    )
    assert target.dtype == torch.float32 and torch.equal(target, torch.zeros_like(case.index_scores))


@pytest.mark.parametrize("denominator", DENOMINATORS)
@pytest.mark.parametrize("normalize", [True, False])
def test_rows_without_a_valid_slot(implementation, denominator, normalize):
    case = inputs.attention_inputs(B=1, S=4, H=3, P=5, K=18)
    case.topk_idxs[:, 1:3] = torch.tensor([[-1], [9]], device=DEVICE)
    pair = lses(case, denominator)
    target = check(implementation, case.query, case.pool, case.topk_idxs, *pair, scale=case.scale, normalize=normalize)
    assert bool((target[:, :3] == 0).all()) and bool((target[:, 3] > 0).any())


def test_attention_all_in_the_window(implementation):
    case = inputs.attention_inputs(B=1, S=6, H=3, P=5, K=20)
    case.noncompressed_lse[:] = 75.0  # a mass of exp(-75): far below eps, still a normal float32
    tiny = check(
        implementation, case.query, case.pool, case.topk_idxs, case.noncompressed_lse, scale=case.scale, normalize=False
    )
    assert 0 < float(tiny.max()) < 1e-25
    target = check(implementation, case.query, case.pool, case.topk_idxs, case.noncompressed_lse, scale=case.scale)
    rows = (case.topk_idxs >= 0).any(-1)
    torch.testing.assert_close(target.sum(-1), rows.float())
    for lse in (150.0, 3e38):
        case.noncompressed_lse[:] = lse
        for pair in ((case.noncompressed_lse, None), (None, case.noncompressed_lse)):
            nothing = call(implementation, case.query, case.pool, case.topk_idxs, *pair, scale=case.scale)
            assert bool((nothing == 0).all())


@pytest.mark.parametrize("value", [NOTHING, -3e38])
def test_denominator_without_mass(implementation, value):
    case = inputs.attention_inputs(B=1, S=5, H=3, P=5, K=4)
    case.noncompressed_lse[:, :, 1] = value
    lse, selected = case.noncompressed_lse, (case.query, case.pool, case.topk_idxs)
    check(implementation, *selected, lse, scale=case.scale)
    # Against a joint denominator that is too small, the exponent is capped at 0: no head gives more than 1.
    capped = check(implementation, *selected, None, lse, scale=case.scale, normalize=False)
    assert bool((capped[case.topk_idxs >= 0] >= 1).all())


@pytest.mark.parametrize("lse", [None, 0.0, NOTHING, 3e38, -3e38])
def test_extreme_logits(implementation, lse):
    query = torch.zeros(1, 1, 1, 16, device=DEVICE)
    pool = torch.zeros(1, 3, 16, device=DEVICE)
    query[..., 0] = 3e19
    pool[0, :, 0] = torch.tensor([-1e19, 1e19, 0.0], device=DEVICE)  # logits of +-3e38
    idxs = torch.tensor([[[0, 1, -1, 2]]], device=DEVICE)
    lse = None if lse is None else torch.full((1, 1, 1), lse, device=DEVICE)
    expected = oracle.distill_target(query, pool, idxs, lse, None, 1.0).float()
    actual = call(implementation, query, pool, idxs, lse, scale=1.0).cpu()
    # exp of 0 or of an underflow: nothing is rounded, except the logit 3e38 against an equal log-sum-exp.
    if lse is not None and float(lse) == pytest.approx(3e38):
        assert bool(actual.isfinite().all())
    else:
        assert torch.equal(actual, expected)
    joint = call(implementation, query, pool, idxs, None, lse, scale=1.0)
    assert bool(joint.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("moved", ["sink", "window key"])
def test_the_joint_objective_moves_with(backend, moved):
    """The old objective, a softmax over compressed entries alone, does not: the bug found in three projects."""
    case = inputs.attention_inputs(B=1, S=6, H=3, P=5, K=4)

    def target():
        lse = indexer_ops.window_lse(case.query, case.window_kv, case.sink, window=3, scale=case.scale, backend=backend)
        return check(backend, case.query, case.pool, case.topk_idxs, lse, scale=case.scale)

    before = target()
    if moved == "sink":
        case.sink[0] += 3.0
    else:
        case.window_kv[:, 4] = 3 * (case.query[:, 4, 0] + case.query[:, 5, 0])
    several = (case.topk_idxs >= 0).sum(-1) > 1
    if moved == "window key":
        several[:, :4] = False
    assert bool(((target() - before).abs().amax(-1) > 1e-3)[several].all()) and bool(several.any())


@pytest.mark.parametrize("backend", BACKENDS)
def test_partial_targets_of_sharded_heads_add_up(backend):
    case = inputs.attention_inputs(B=1, S=6, H=5, P=5, K=4)
    lse = case.noncompressed_lse

    def partial(heads):
        return call(
            backend, case.query[:, :, heads], case.pool, case.topk_idxs, lse[:, :, heads],
            scale=case.scale, normalize=False,
        )  # fmt: skip

    total = partial(slice(0, 2)) + partial(slice(2, 5))
    expected = oracle.distill_target(case.query, case.pool, case.topk_idxs, lse, None, case.scale, normalize=False)
    tolerance.assert_within(total, expected, tolerance.distill_target(case.query, case.pool, lse, case.scale, expected))


@pytest.mark.parametrize("backend", BACKENDS)
def test_has_no_gradient(backend):
    case = inputs.attention_inputs(B=1, S=3, H=2)
    operands = [tensor.requires_grad_() for tensor in (case.query, case.pool)]
    lse = case.noncompressed_lse.requires_grad_()
    assert not call(backend, *operands, case.topk_idxs, lse, scale=case.scale).requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_denominators_raise(backend):
    case = inputs.attention_inputs(B=1, S=3, H=2)
    lse = case.noncompressed_lse
    with pytest.raises(ValueError, match="noncompressed_lse and joint_lse exclude each other"):
        call(backend, case.query, case.pool, case.topk_idxs, lse, lse, scale=case.scale)


@pytest.mark.parametrize("D", [1, 17])
@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_width_that_is_no_multiple_of_16(D, denominator):
    case = inputs.attention_inputs(B=1, S=5, H=3, D=D)
    for backend in ("auto", "composite"):
        check(backend, case.query, case.pool, case.topk_idxs, *lses(case, denominator), scale=case.scale)


@needs_kernels
def test_kernel_names_the_width_it_cannot_serve():
    case = inputs.attention_inputs(B=1, S=3, H=2, D=17)
    with pytest.raises(NotImplementedError, match="distill_target.*multiple of 16, got 17"):
        call("triton", case.query, case.pool, case.topk_idxs, scale=case.scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_check_inputs(backend, index_dtype):
    case = inputs.attention_inputs(B=2, S=4, H=2, P=5, K=3, index_dtype=index_dtype)
    arguments = (backend, case.query, case.pool, case.topk_idxs, case.noncompressed_lse)
    checked = call(*arguments, scale=case.scale, check_inputs=True)
    assert torch.equal(checked, call(*arguments, scale=case.scale))
    for wrong in (5, -2):
        case.topk_idxs[1, 2, 1] = wrong
        case.topk_idxs[1, 3, 0] = wrong
        with pytest.raises(IndexError, match=rf"topk_idxs\[1, 2, 1\] is {wrong}, outside \[-1, 5\)"):
            call(*arguments, scale=case.scale, check_inputs=True)


@pytest.mark.parametrize("denominator", DENOMINATORS)
def test_chunks_change_nothing(monkeypatch, denominator):
    case = inputs.attention_inputs(B=2, S=20, H=3, P=8, K=5)
    arguments = ("composite", case.query, case.pool, case.topk_idxs, *lses(case, denominator))
    calls = []
    rows_of_chunk = reference._target_rows
    monkeypatch.setattr(reference, "_target_rows", lambda *args: calls.append(args) or rows_of_chunk(*args))
    monkeypatch.setattr(reference, "TRANSIENT_BYTES", 10_000)
    check(*arguments, scale=case.scale)
    assert len(calls) > 4, "the budget was meant to force several chunks"


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=strategies.tuples(*(strategies.integers(1, limit) for limit in (2, 9, 6, 20, 3, 9, 12))),
    denominator=strategies.sampled_from(DENOMINATORS),
    normalize=strategies.booleans(),
    seed=strategies.integers(0, 99),
)
def test_composite_at_any_size(sizes, denominator, normalize, seed):
    case = inputs.attention_inputs(*sizes, seed=seed)
    pair = lses(case, denominator)
    check("composite", case.query, case.pool, case.topk_idxs, *pair, scale=case.scale, normalize=normalize)
