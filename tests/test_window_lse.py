"""window_lse: composite and kernel against the oracle."""

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


def check(backend, query, window_kv, sink=None, doc_start=None, *, window, scale, query_offset=0):
    """Compare one call with the oracle; returns what the op returned."""
    with poisoned_allocations():
        actual = indexer_ops.window_lse(
            query,
            window_kv,
            sink,
            doc_start,
            window=window,
            scale=scale,
            query_offset=query_offset,
            backend=backend,
        )
    expected = oracle.window_lse(query, window_kv, sink, doc_start, window, scale, query_offset)
    assert actual.dtype == (torch.float64 if query.dtype == torch.float64 else torch.float32)
    assert actual.device == query.device and actual.is_contiguous()
    bound = 0.0 if query.numel() == 0 or window_kv.numel() == 0 else None
    if bound is None:
        bound = tolerance.window_lse(query, window_kv, scale, expected)
    tolerance.assert_within(actual, expected, bound)
    return actual


@pytest.mark.parametrize("backend, dtype", BACKENDS_AND_DTYPES)
@pytest.mark.parametrize(
    "B, S, H, D, T, window",
    [
        (2, 9, 1, 16, 9, 4),
        (1, 11, 3, 48, 11, 1),
        (2, 6, 5, 64, 6, 0),
        (1, 7, 64, 16, 7, -1),
        (1, 4, 127, 32, 4, 3),
        (1, 5, 128, 16, 5, 100),
        (1, 70, 2, 16, 70, 37),
        (1, 5, 33, 80, 12, 6),
        (1, 9, 4, 16, 3, 2),
        (1, 9, 4, 16, 3, 0),
    ],
)
def test_sizes(backend, dtype, B, S, H, D, T, window):
    case = inputs.attention_inputs(B, S, H, D, T, dtype=dtype)
    check(backend, case.query, case.window_kv, case.sink, window=window, scale=case.scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 1, 3, 100])
@pytest.mark.parametrize("query_offset, T", [(0, 4), (3, 9), (7, 9), (20, 9), (2, 20)])
def test_query_offset(backend, window, query_offset, T):
    case = inputs.attention_inputs(B=1, S=6, H=2, T=T)
    arguments = (backend, case.query, case.window_kv, case.sink)
    check(*arguments, window=window, scale=case.scale, query_offset=query_offset)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sharded_queries_agree_with_all_queries(backend):
    case = inputs.attention_inputs(B=1, S=12, H=2)
    full = check(backend, case.query, case.window_kv, case.sink, window=5, scale=case.scale)
    shard = indexer_ops.window_lse(
        case.query[:, 7:], case.window_kv, case.sink, window=5, scale=case.scale, query_offset=7, backend=backend
    )
    bound = tolerance.window_lse(case.query, case.window_kv, case.scale, full)
    tolerance.assert_within(shard, full[:, 7:], 2 * bound[:, 7:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("window", [0, 3, 100])
def test_packed_documents(backend, index_dtype, window):
    case = inputs.attention_inputs(B=2, S=8, H=2)
    rows = [[0, 0, 0, 3, 3, 3, 3, 7], [0, 1, 1, 1, 1, 5, 5, 5]]
    doc_start = torch.tensor(rows, dtype=index_dtype, device=DEVICE)
    lse = check(backend, case.query, case.window_kv, case.sink, doc_start, window=window, scale=case.scale)
    moved = case.window_kv.clone()
    moved[0, :3] += 1.0
    again = indexer_ops.window_lse(
        case.query, moved, case.sink, doc_start, window=window, scale=case.scale, backend=backend
    )
    assert torch.equal(lse[0, 3:], again[0, 3:]), "a row saw a key of an earlier document"
    assert not torch.equal(lse[0, :3], again[0, :3])


@pytest.mark.parametrize("backend", BACKENDS)
def test_document_starts_out_of_range_are_clamped(backend):
    case = inputs.attention_inputs(B=1, S=5, H=2)
    doc_start = torch.tensor([[-4, -(2**31), 5, 2**31 - 1, 2]], dtype=torch.int32, device=DEVICE)
    lse = check(backend, case.query, case.window_kv, None, doc_start, window=3, scale=case.scale)
    assert bool((lse[0, 2:4] == NOTHING).all()), "a reversed range is empty"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [0, 3])
def test_keys_of_each_head(backend, window):
    case = inputs.attention_inputs(B=2, S=6, H=5)
    keys = torch.randn(2, 6, 5, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    check(backend, case.query, keys, case.sink, window=window, scale=case.scale)
    shared = case.window_kv.unsqueeze(2).expand(2, 6, 5, 16)
    check(backend, case.query, shared, case.sink, window=window, scale=case.scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    case = inputs.attention_inputs(B=2, S=6, H=3)
    keys_of_heads = torch.randn(2, 6, 3, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    one_document = case.window_kv[:1].expand(2, 6, 16)
    doc_start = torch.tensor([[0, 2]], device=DEVICE).expand(6, 2).t()
    for query in (inputs.as_transposed_view(case.query), inputs.with_strided_last_dim(case.query), case.query[:, ::2]):
        for keys in (
            inputs.amid_poison(case.window_kv),
            inputs.with_strided_last_dim(case.window_kv),
            one_document,
            inputs.as_transposed_view(keys_of_heads),
        ):
            starts = doc_start[:, : query.shape[1]]
            check(backend, query, keys, case.sink, starts, window=4, scale=case.scale)
    check(backend, case.query, case.window_kv, case.sink.repeat_interleave(2)[::2], window=4, scale=case.scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [{"B": 0}, {"S": 0}, {"T": 0}, {"H": 0}, {"S": 0, "T": 0}])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("window", [0, 3])
def test_empty_sizes(backend, size, with_sink, window):
    case = inputs.attention_inputs(**{"B": 2, "S": 3, "H": 2, "D": 16, "T": 3, **size})
    check(backend, case.query, case.window_kv, case.sink if with_sink else None, window=window, scale=case.scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_visible_and_no_sink(backend):
    case = inputs.attention_inputs(B=1, S=6, H=2, T=2)
    lse = check(backend, case.query, case.window_kv, window=2, scale=case.scale)
    assert bool((lse[:, 3:] == NOTHING).all()) and bool(lse[:, :3].isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [3e38, -3e38, NOTHING])
def test_extreme_sinks(backend, value):
    case = inputs.attention_inputs(B=1, S=4, H=3)
    case.sink[1] = value
    lse = check(backend, case.query, case.window_kv, case.sink, window=3, scale=case.scale)
    without = indexer_ops.window_lse(case.query, case.window_kv, window=3, scale=case.scale, backend=backend)
    if value < 0:
        assert torch.equal(lse[:, :, 1], without[:, :, 1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [None, 3e38, -3e38])
def test_extreme_logits(backend, sink):
    query = torch.zeros(1, 4, 1, 16, device=DEVICE)
    keys = torch.zeros(1, 4, 16, device=DEVICE)
    query[..., 0] = 3e19
    keys[0, :, 0] = torch.tensor([-1e19, 1e19, -1e19, 0.0], device=DEVICE)  # logits of +-3e38: twice that overflows
    sink = None if sink is None else torch.tensor([sink], device=DEVICE)
    for window in (0, 1, 2):
        lse = check(backend, query, keys, sink, window=window, scale=1.0)
        assert bool(lse.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-30])
def test_any_finite_scale(backend, scale):
    case = inputs.attention_inputs(B=1, S=5, H=2)
    check(backend, case.query, case.window_kv, case.sink, window=3, scale=scale)


@pytest.mark.parametrize("backend", BACKENDS)
def test_has_no_gradient(backend):
    case = inputs.attention_inputs(B=1, S=3, H=2)
    operands = [tensor.requires_grad_() for tensor in (case.query, case.window_kv, case.sink)]
    lse = indexer_ops.window_lse(*operands, window=2, scale=case.scale, backend=backend)
    assert not lse.requires_grad


@pytest.mark.parametrize("D", [1, 17])
def test_width_that_is_no_multiple_of_16(D):
    case = inputs.attention_inputs(B=1, S=5, H=3, D=D)
    for backend in ("auto", "composite"):
        check(backend, case.query, case.window_kv, case.sink, window=3, scale=case.scale)
    with pytest.raises(NotImplementedError):
        indexer_ops.window_lse(case.query, case.window_kv, window=3, scale=case.scale, backend="triton")


@needs_kernels
def test_kernel_names_the_width_it_cannot_serve():
    case = inputs.attention_inputs(B=1, S=3, H=2, D=17)
    with pytest.raises(NotImplementedError, match="window_lse.*multiple of 16, got 17"):
        indexer_ops.window_lse(case.query, case.window_kv, window=3, scale=case.scale, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
def test_check_inputs(backend):
    case = inputs.attention_inputs(B=1, S=4, H=2)
    options = {"window": 3, "scale": case.scale, "backend": backend, "check_inputs": True}
    doc_start = torch.tensor([[0, 4, 4, 0]], device=DEVICE)
    checked = indexer_ops.window_lse(case.query, case.window_kv, case.sink, doc_start, **options)
    expected = check(backend, case.query, case.window_kv, case.sink, doc_start, window=3, scale=case.scale)
    assert torch.equal(checked, expected)
    for wrong in (5, -1):
        doc_start[0, 2] = wrong
        with pytest.raises(ValueError, match=rf"doc_start\[0, 2\] is {wrong}, outside \[0, 5\)"):
            indexer_ops.window_lse(case.query, case.window_kv, case.sink, doc_start, **options)


@pytest.mark.parametrize("window", [0, 5, 70, 200])
@pytest.mark.parametrize("heads_of_keys", [1, 3])
def test_chunks_change_nothing(monkeypatch, window, heads_of_keys):
    case = inputs.attention_inputs(B=2, S=150, H=3, T=140)
    keys = case.window_kv
    if heads_of_keys == 3:
        keys = torch.randn(2, 140, 3, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    doc_start = (torch.arange(150, device=DEVICE) // 50 * 50).expand(2, 150)
    arguments = (case.query, keys, case.sink, doc_start)
    whole = indexer_ops.window_lse(*arguments, window=window, scale=case.scale, query_offset=1, backend="composite")
    calls = []
    name = "_banded_lse" if 0 < window < 140 else "_causal_lse"
    rows_of_chunk = getattr(reference, name)
    monkeypatch.setattr(reference, name, lambda *args: calls.append(name) or rows_of_chunk(*args))
    monkeypatch.setattr(reference, "TRANSIENT_BYTES", 20_000)
    chunked = indexer_ops.window_lse(*arguments, window=window, scale=case.scale, query_offset=1, backend="composite")
    assert len(calls) > 4, "the budget was meant to force several chunks"
    bound = tolerance.window_lse(case.query, keys, case.scale, whole.cpu().double())
    tolerance.assert_within(chunked, whole, 2 * bound)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    sizes=strategies.tuples(*(strategies.integers(1, limit) for limit in (2, 9, 6, 20, 12))),
    window=strategies.integers(-1, 14),
    query_offset=strategies.integers(0, 9),
    seed=strategies.integers(0, 99),
)
def test_composite_at_any_size(sizes, window, query_offset, seed):
    case = inputs.attention_inputs(*sizes, seed=seed)
    arguments = ("composite", case.query, case.window_kv, case.sink)
    check(*arguments, window=window, scale=case.scale, query_offset=query_offset)


@needs_kernels
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    sizes=strategies.tuples(*(strategies.integers(1, limit) for limit in (2, 40, 9))),
    T=strategies.integers(1, 40),
    window=strategies.integers(-1, 45),
    query_offset=strategies.integers(0, 20),
)
def test_kernel_at_any_size(sizes, T, window, query_offset):
    case = inputs.attention_inputs(*sizes, 16, T)
    arguments = ("triton", case.query, case.window_kv, case.sink)
    check(*arguments, window=window, scale=case.scale, query_offset=query_offset)
