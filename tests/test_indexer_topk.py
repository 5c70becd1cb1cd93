"""indexer_ops.indexer_topk: scores and selection against the long-hand oracle, visibility, ties, sizes, bad input."""

import pytest
import torch

import indexer_ops
import inputs
import oracle_indexer as oracle
import tolerance
from backends import BACKENDS, BACKENDS_AND_DTYPES, DEVICE, HAS_KERNELS, needs_kernels, poisoned_allocations
from indexer_inputs import WIDTHS, bounds, operands
from indexer_ops import reference

NOTHING = float("-inf")


def score_error(q, k, weights, dtype=None):
    """``[B, S, 1]``: what rounding may do to a score, for the worst entry of a row."""
    u = tolerance.unit_roundoff(q.dtype if dtype is None else dtype)
    magnitude = oracle.index_scores(q.abs(), k.abs(), weights.abs()).amax(-1, keepdim=True)
    return (q.shape[-1] + q.shape[2] + tolerance.PER_ELEMENT) * u * magnitude


def assert_selection(result, q, k, weights, topk, ratio, query_offset=0, entry_start=None, entry_stop=None):
    """Scores within rounding; the entries of the full sort wherever scores differ by more than that; no worse else."""
    scores, idxs = (tensor.detach().cpu() for tensor in result)
    assert scores.shape == idxs.shape == (*q.shape[:2], topk) and idxs.dtype == torch.int32
    expected, expected_idxs = oracle.indexer_topk(q, k, weights, topk, ratio, query_offset, entry_start, entry_stop)
    used = expected_idxs >= 0
    assert torch.equal(idxs >= 0, used) and bool((scores[~used] == NOTHING).all()) and bool((idxs[~used] == -1).all())
    if not used.any():
        return
    bound = score_error(q, k, weights)
    tolerance.assert_within(scores, expected, bound)
    every = oracle.index_scores(q, k, weights)
    own = every.gather(-1, idxs.long().clamp(min=0))
    tolerance.assert_within(torch.where(used, scores, 0.0), torch.where(used, own, 0.0), bound)
    assert all(len(set(row)) == len(row) for row in (r[r >= 0].tolist() for r in idxs.flatten(0, 1)))
    for b, s in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(q.shape[1])).tolist():
        visible = oracle.visible_entries(s, b, k.shape[1], ratio, query_offset, entry_start, entry_stop)
        assert set(idxs[b, s][used[b, s]].tolist()) <= set(visible)
        ranked = every[b, s, visible].sort(descending=True).values
        distinct = len(ranked) < 2 or bool((ranked[:-1] - ranked[1:] > 2 * bound[b, s]).all())
        if distinct:
            assert torch.equal(idxs[b, s].long(), expected_idxs[b, s])
    regret = torch.where(used, expected - own, 0.0).sum(-1, keepdim=True)
    tolerance.assert_within(regret.clamp(min=0), torch.zeros_like(regret), 2 * topk * bound)


# --- Scores and selection -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize("widths", WIDTHS)
def test_against_the_full_sort(backend, dtype, widths):
    sizes = dict(WIDTHS[widths])
    topk = sizes.pop("topk")
    arguments = operands(**sizes, dtype=dtype)
    offset = max(0, sizes["P"] - sizes["S"])  # late enough to see the whole pool
    with poisoned_allocations():
        result = indexer_ops.indexer_topk(*arguments, topk=topk, ratio=1, query_offset=offset, backend=backend)
    assert result[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_selection(result, *arguments, topk, 1, offset)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("query_offset", [0, 5])
def test_ratio_and_offset(backend, ratio, query_offset):
    arguments = operands(B=1, S=6, P=9)
    result = indexer_ops.indexer_topk(*arguments, topk=3, ratio=ratio, query_offset=query_offset, backend=backend)
    assert_selection(result, *arguments, 3, ratio, query_offset)
    seen = min((query_offset + 1) // ratio, 9, 3)
    assert int((result[1][0, 0] >= 0).sum()) == seen


START, STOP = (0, 2, 3, 1, 0, 4, -3, 5), (5, 4, 3, 0, 2, 9, 4, 7)  # empty, reversed, past both ends


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "given, index_dtype", [("start", torch.int32), ("stop", torch.int64), ("both", torch.int32), ("both", torch.int64)]
)
def test_bounds(backend, given, index_dtype):
    arguments = operands(B=1, S=8)
    start = bounds(*START, B=1).to(index_dtype) if given != "stop" else None
    stop = bounds(*STOP, B=1).to(index_dtype) if given != "start" else None
    result = indexer_ops.indexer_topk(*arguments, start, stop, topk=4, ratio=1, backend=backend)
    assert_selection(result, *arguments, 4, 1, 0, start, stop)
    if given == "both":
        assert (result[1] >= 0).sum(-1)[0].tolist() == [4, 2, 0, 0, 2, 1, 4, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_bounds_that_are_strided_views(backend):
    arguments = operands(S=3)
    start, stop = (bounds(*row)[:, :1].expand(2, 3) for row in ((1,), (4,)))
    result = indexer_ops.indexer_topk(*arguments, start, stop, topk=4, ratio=1, backend=backend)
    assert_selection(result, *arguments, 4, 1, 0, start, stop)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_select_the_lowest_indices_every_time(backend):
    q, k, weights = operands(B=1, S=6, P=40)
    q, k = q.abs(), -k.abs()  # every product is negative
    stop = bounds(40, 40, 7, 3, 40, 0, B=1)
    start = bounds(0, 5, 0, 0, 37, 0, B=1)
    first = indexer_ops.indexer_topk(q, k, weights, start, stop, topk=6, ratio=1, backend=backend)
    assert first[1][0].tolist() == [
        [0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5], [0, 1, 2, -1, -1, -1],
        [37, 38, 39, -1, -1, -1], [-1] * 6,
    ]  # fmt: skip
    assert bool((first[0][first[1] >= 0] == 0).all())
    again = indexer_ops.indexer_topk(q, k, weights, start, stop, topk=6, ratio=1, backend=backend)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lowest_index(backend):
    q, k, weights = operands(B=1, S=4, P=24)
    k = k[:, :6].repeat(1, 4, 1)  # each entry four times over
    stop = bounds(24, 24, 24, 24, B=1)
    scores, idxs = indexer_ops.indexer_topk(q, k, weights, None, stop, topk=9, ratio=1, backend=backend)
    for row_scores, row in zip(scores.flatten(0, 1), idxs.flatten(0, 1)):
        for slot in range(8):
            assert row_scores[slot] > row_scores[slot + 1] or row[slot] < row[slot + 1]
    best = idxs[0, :, :4]
    assert bool((best % 6 == best[:, :1] % 6).all()) and bool((best // 6 == best.new_tensor(range(4))).all())


@needs_kernels
def test_backends_agree_bitwise_where_scores_are_exact():
    """Small integers: every product and sum is exact in float32, so ties are real and the same in both."""
    generator = torch.Generator().manual_seed(3)
    q, k, weights = (
        torch.randint(-2, 3, shape, generator=generator).float().to(DEVICE)
        for shape in ((1, 6, 3, 16), (1, 60, 16), (1, 6, 3))
    )
    stop = bounds(*range(10, 70, 10), B=1)
    results = [
        indexer_ops.indexer_topk(q, k, weights, None, stop, topk=11, ratio=1, backend=backend)
        for backend in ("triton", "composite")
    ]
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_operands(backend):
    q, k, weights = operands(S=4)
    expected = indexer_ops.indexer_topk(q, k, weights, topk=3, ratio=1, backend=backend)
    for strided in (
        (inputs.as_transposed_view(q), inputs.amid_poison(k), weights.transpose(1, 2).contiguous().transpose(1, 2)),
        (inputs.with_strided_last_dim(q), inputs.with_strided_last_dim(k), weights[..., :1].expand(-1, -1, 3)),
        (inputs.amid_poison(q), inputs.amid_poison(k), inputs.amid_poison(weights)),
    ):
        result = indexer_ops.indexer_topk(*strided, topk=3, ratio=1, backend=backend)
        if torch.equal(strided[2], weights):
            torch.testing.assert_close(result[0], expected[0])
            assert torch.equal(result[1], expected[1])
        else:
            assert_selection(result, *strided, 3, 1)


@needs_kernels
@pytest.mark.parametrize("slab_bytes, plateau", [(1, False), (4 * 70 * 3, True)])
def test_rounds_and_slabs_change_no_bit(monkeypatch, slab_bytes, plateau):
    from indexer_ops._triton import configs

    q, k, weights = operands(B=1, S=4, P=70)
    if plateau:
        q, k = q.abs(), -k.abs()
    start, stop = bounds(0, 3, 33, 69, B=1), bounds(70, 50, 66, 70, B=1)
    call = {"topk": 5, "ratio": 1, "backend": "triton"}
    expected = indexer_ops.indexer_topk(q, k, weights, start, stop, **call)
    monkeypatch.setattr(configs, "SELECT_WIDTH", 16)  # 5 chunks of the row, then 2 of their winners, then 1
    monkeypatch.setattr(configs, "SLAB_BYTES", slab_bytes)
    actual = indexer_ops.indexer_topk(q, k, weights, start, stop, **call)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    assert_selection(actual, q, k, weights, 5, 1, 0, start, stop)


def test_the_composite_in_chunks(monkeypatch):
    arguments = [tensor.requires_grad_() for tensor in operands(dtype=torch.float64)]
    start = torch.zeros(2, 11, dtype=torch.int32, device=DEVICE)

    def run():
        scores, idxs = indexer_ops.indexer_topk(*arguments, start, topk=3, ratio=2, query_offset=2, backend="composite")
        return scores.detach(), idxs, *torch.autograd.grad(scores.masked_fill(idxs < 0, 0).sin().sum(), arguments)

    whole = run()
    monkeypatch.setattr(reference, "TRANSIENT_BYTES", 1)
    for actual, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(actual, expected)


# --- Sizes and bad input ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "sizes, topk", [({"B": 0}, 2), ({"S": 0}, 2), ({"P": 0}, 2), ({"Hi": 0}, 2), ({}, 0), ({"P": 0}, 0)]
)
def test_empty_sizes(backend, sizes, topk):
    arguments = operands(**{"S": 4, **sizes})
    leaves = [tensor.requires_grad_() for tensor in arguments]
    scores, idxs = indexer_ops.indexer_topk(*leaves, topk=topk, ratio=1, backend=backend)
    assert scores.shape == idxs.shape == (*arguments[0].shape[:2], topk)
    assert scores.dtype == torch.float32 and idxs.dtype == torch.int32
    if sizes.get("Hi") != 0:
        assert bool((idxs == -1).all()) and bool((scores == NOTHING).all())
    gradients = torch.autograd.grad(scores, leaves, torch.zeros_like(scores))
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert gradient.shape == leaf.shape and not gradient.any()


def test_widths_that_no_kernel_takes():
    arguments = operands(Di=17)
    assert_selection(indexer_ops.indexer_topk(*arguments, topk=3, ratio=1), *arguments, 3, 1)
    if HAS_KERNELS:
        with pytest.raises(NotImplementedError, match="multiple of 16, got 17"):
            indexer_ops.indexer_topk(*arguments, topk=3, ratio=1, backend="triton")
        with pytest.raises(NotImplementedError, match="at most 256, got 272"):
            indexer_ops.indexer_topk(*operands(Di=272), topk=3, ratio=1, backend="triton")
        with pytest.raises(NotImplementedError, match="at most 2048 entries, got 2049"):
            indexer_ops.indexer_topk(*operands(), topk=2049, ratio=1, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "start, stop, message",
    [
        (-1, 3, r"entry_start\[1, 2\] is -1, outside \[0, 6\)"),
        (6, 3, r"entry_start\[1, 2\] is 6, outside \[0, 6\)"),
        (0, 6, r"entry_stop\[1, 2\] is 6, outside \[0, 6\)"),
        (3, 1, r"\(entry_stop - entry_start\)\[1, 2\] is -2, outside \[0, 6\)"),
    ],
)
def test_check_inputs_names_the_position(backend, start, stop, message):
    arguments, call = operands(S=4), {"topk": 2, "ratio": 1, "backend": backend}
    starts, stops = bounds(0, 0, 0, 5), bounds(0, 5, 3, 5)
    checked = indexer_ops.indexer_topk(*arguments, starts, stops, check_inputs=True, **call)
    assert torch.equal(checked[1], indexer_ops.indexer_topk(*arguments, starts, stops, **call)[1])
    starts[1, 2], stops[1, 2] = start, stop
    with pytest.raises(ValueError, match=message):
        indexer_ops.indexer_topk(*arguments, starts, stops, check_inputs=True, **call)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"topk": -1}, ValueError, "topk must be 0 or greater, got -1"),
        ({"ratio": 0}, ValueError, "ratio must be greater than 0, got 0"),
        ({"ratio": -4}, ValueError, "ratio must be greater than 0, got -4"),
        ({"q": torch.zeros(2, 4, 16)}, ValueError, r"q must be .*\[B, S, Hi, Di\]"),
        ({"k": torch.zeros(2, 5, 8)}, ValueError, r"k\.shape\[2\] must be Di = 16"),
        ({"k": torch.zeros(3, 5, 16)}, ValueError, r"k\.shape\[0\] must be B = 2"),
        ({"weights": torch.zeros(2, 4, 2)}, ValueError, r"weights\.shape\[2\] must be Hi = 3"),
        ({"weights": torch.zeros(2, 5, 3)}, ValueError, "weights"),
        ({"weights": torch.zeros(2, 4, 3).long()}, (TypeError, ValueError), "weights"),
        ({"entry_start": torch.zeros(2, 4)}, (TypeError, ValueError), "entry_start"),
        ({"entry_stop": torch.zeros(2, 5).int()}, ValueError, "entry_stop"),
        ({"q": None}, TypeError, "q must be"),
        ({"backend": "cuda"}, ValueError, "backend must be"),
    ],
)
def test_bad_arguments(backend, changes, error, message):
    q, k, weights = operands(S=4)
    call = {"q": q, "k": k, "weights": weights, "topk": 2, "ratio": 1, "backend": backend} | changes
    call = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    with pytest.raises(error, match=message):
        indexer_ops.indexer_topk(**call)


@needs_kernels
def test_one_dtype_for_queries_and_keys():
    q, k, weights = operands(S=4)
    with pytest.raises(NotImplementedError, match="one dtype for query and keys"):
        indexer_ops.indexer_topk(q.half(), k, weights, topk=2, ratio=1, backend="triton")
    mixed = indexer_ops.indexer_topk(q.half(), k.half(), weights, topk=2, ratio=1, backend="triton")
    assert_selection(mixed, q.half(), k.half(), weights, 2, 1)
