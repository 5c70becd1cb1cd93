"""The kernels on a GPU: bfloat16 against float64, within twice the composite's own error; capture; 64-bit offsets."""

import pytest
import torch

import indexer_ops
import oracle_on_device as oracle
from backends import poisoned_allocations
from oracle_on_device import relative_error

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
EPS = 1e-10

WIDTHS = {
    "V4-Flash": dict(S=150, H=64, D=512, P=600, K=512, window=128),
    "V4-Flash, more entries than selected": dict(S=60, H=64, D=512, P=2000, K=512, window=128),
    "V4-Pro": dict(S=100, H=128, D=512, P=1500, K=1024, window=128),
    "small": dict(S=100, H=8, D=128, P=75, K=64, window=32),
    "odd": dict(S=77, H=5, D=80, P=123, K=100, window=50),
    "one head": dict(S=65, H=1, D=16, P=40, K=9, window=0),
}


def causal_inputs(S, H, D, P, K, window, dtype=torch.bfloat16, B=2, seed=0):
    """Operands, and what a causal indexer selects: the best K of the entries visible at ratio 4 (or the whole pool)."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, device=DEVICE, generator=generator)

    query, keys, pool = normal(B, S, H, D).to(dtype), normal(B, S, D).to(dtype), normal(B, P, D).to(dtype)
    visible = (torch.arange(S, device=DEVICE) + 1) * P // S
    scores = normal(B, S, P).masked_fill(torch.arange(P, device=DEVICE) >= visible.unsqueeze(-1), float("-inf"))
    best, idxs = scores.topk(min(K, P), -1)
    idxs = torch.where(best == float("-inf"), -1, idxs).int()
    best = torch.where(idxs < 0, float("-inf"), best)
    padding = (0, K - idxs.shape[-1])
    idxs = torch.nn.functional.pad(idxs, padding, value=-1)
    return query, keys, pool, normal(H), idxs, torch.nn.functional.pad(best, padding, value=float("-inf"))


def rounding_band(terms: int) -> float:
    """What float32 sums of this many terms may be off by, relative: the random walk of their roundings."""
    return torch.finfo(torch.float32).eps * terms**0.5


def assert_as_exact_as_the_composite(op, expected, terms):
    """``op(backend)`` at both backends: the kernel's error is at most twice the composite's, and a rounding band."""
    with poisoned_allocations():
        fused = op("triton")
    error, composite_error = relative_error(fused, expected), relative_error(op("composite"), expected)
    assert error <= 2 * composite_error + rounding_band(terms), (error, composite_error)


def check_the_one_pass(query, pool, idxs, scores, lses, scale, target):
    """KL and gradient of distill_loss against those of the exact target."""
    kl, gradient = oracle.distill_kl(scores, target, idxs, EPS)
    noncompressed_lse, joint_lse = lses.get("noncompressed_lse"), lses.get("joint_lse")

    def value_and_gradient(backend):
        leaf = scores.clone().requires_grad_()
        value = torch.ops.v4idx.distill_loss(leaf, idxs, query, pool, noncompressed_lse, joint_lse, scale, EPS, backend)
        value.sum().backward()
        return value.detach(), leaf.grad

    terms = query.shape[-1] + idxs.shape[-1] + query.shape[2]
    for part, expected in enumerate((kl, gradient)):
        assert_as_exact_as_the_composite(lambda backend: value_and_gradient(backend)[part], expected, terms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("widths", WIDTHS)
def test_against_float64(widths, dtype):
    sizes = WIDTHS[widths]
    query, keys, pool, sink, idxs, scores = causal_inputs(**sizes, dtype=dtype)
    scale, window = sizes["D"] ** -0.5, sizes["window"]

    lse = oracle.window_lse(query, keys, sink, window, scale)
    assert_as_exact_as_the_composite(
        lambda backend: indexer_ops.window_lse(query, keys, sink, window=window, scale=scale, backend=backend),
        lse,
        sizes["D"] + max(window, 1),
    )
    lse32 = lse.float()
    for lses in ({"noncompressed_lse": lse32}, {"joint_lse": lse32 + 1}, {}):
        target = oracle.distill_target(query, pool, idxs, lses.get("noncompressed_lse"), lses.get("joint_lse"), scale)
        assert_as_exact_as_the_composite(
            lambda backend: indexer_ops.distill_target(query, pool, idxs, **lses, scale=scale, backend=backend),
            target,
            sizes["D"] + sizes["K"] + sizes["H"],
        )
        check_the_one_pass(query, pool, idxs, scores, lses, scale, target)
    target32 = target.float()
    kl, gradient = oracle.distill_kl(scores, target32, idxs, EPS)

    def value_and_gradient(backend):
        leaf = scores.clone().requires_grad_()
        value = indexer_ops.distill_kl(leaf, target32, idxs, eps=EPS, backend=backend)
        value.sum().backward()
        return value.detach(), leaf.grad

    for part, expected in enumerate((kl, gradient)):
        assert_as_exact_as_the_composite(lambda backend: value_and_gradient(backend)[part], expected, sizes["K"])


def test_strided_operands_are_read_in_place():
    query, keys, pool, sink, idxs, _ = causal_inputs(**WIDTHS["V4-Flash"])
    scale = 512**-0.5
    transposed = query.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = keys.unsqueeze(2).expand(-1, -1, 64, -1)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    lse = indexer_ops.window_lse(transposed, expanded, sink, window=128, scale=scale, backend="triton")
    assert torch.cuda.max_memory_allocated() - before <= 2 * lse.numel() * 4 + 2**20
    assert torch.equal(lse, indexer_ops.window_lse(query, keys, sink, window=128, scale=scale, backend="triton"))
    assert torch.equal(
        indexer_ops.distill_target(transposed, pool, idxs, lse, scale=scale, backend="triton"),
        indexer_ops.distill_target(query, pool, idxs, lse, scale=scale, backend="triton"),
    )


def test_rows_past_two_to_the_31_elements():
    """65,536 + 64 queries of 64 heads of 512: the last rows lie past 2**31 elements, and past 65,535 rows."""
    S, H, D, P, K = 65_600, 64, 512, 128, 32
    generator = torch.Generator(DEVICE).manual_seed(0)
    query = torch.empty(1, S, H, D, device=DEVICE, dtype=torch.bfloat16)
    for start in range(0, S, 8192):
        query[:, start : start + 8192].normal_(generator=generator)
    keys = torch.randn(1, S, D, device=DEVICE, generator=generator).bfloat16()
    pool = torch.randn(1, P, D, device=DEVICE, generator=generator).bfloat16()
    idxs = torch.randint(-1, P, (1, S, K), device=DEVICE, generator=generator, dtype=torch.int32)
    assert query.numel() > 2**31
    scale, tail = D**-0.5, 64
    lse = indexer_ops.window_lse(query, keys, window=128, scale=scale, backend="triton")
    last = slice(S - tail, S)
    expected = indexer_ops.window_lse(
        query[:, last], keys, window=128, scale=scale, query_offset=S - tail, backend="composite"
    )
    torch.testing.assert_close(lse[:, last], expected)
    target = indexer_ops.distill_target(query, pool, idxs, lse, scale=scale, backend="triton")
    expected = indexer_ops.distill_target(
        query[:, last], pool, idxs[:, last], lse[:, last], scale=scale, backend="composite"
    )
    torch.testing.assert_close(target[:, last], expected)


def loss_and_gradient(operands, scores):
    query, keys, pool, sink, idxs = operands
    loss = indexer_ops.distill_loss(
        scores, idxs, query, pool, scale=512**-0.5, window_kv=keys, sink=sink, window=128, backend="triton"
    )
    return loss, torch.autograd.grad(loss, scores)[0]


def test_cuda_graph_capture_after_one_warm_up():
    *operands, scores = causal_inputs(**WIDTHS["V4-Flash"])
    scores = scores.clone().requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = loss_and_gradient(operands, scores)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = loss_and_gradient(operands, scores)
    for tensor in captured:
        tensor.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    for actual, wanted in zip(captured, expected):
        assert torch.equal(actual, wanted)


def test_compiled_loss_equals_eager():
    *operands, scores = causal_inputs(**WIDTHS["V4-Flash"])
    scores = scores.clone().requires_grad_()
    query, keys, pool, sink, idxs = operands

    @torch.compile(fullgraph=True)
    def loss_of(scores):
        return indexer_ops.distill_loss(
            scores, idxs, query, pool, scale=512**-0.5, window_kv=keys, sink=sink, window=128
        )

    loss = loss_of(scores)
    for actual, wanted in zip((loss, torch.autograd.grad(loss, scores)[0]), loss_and_gradient(operands, scores)):
        torch.testing.assert_close(actual, wanted)


def test_auto_takes_the_fused_ops():
    *operands, scores = causal_inputs(**WIDTHS["small"])
    query, _, pool, _, idxs = operands
    fused = torch.ops.v4idx._distill_target.default
    calls = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            calls.append(function)
            return function(*arguments, **(keywords or {}))

    with Recorder():
        indexer_ops.distill_target(query, pool, idxs, scale=0.1)
    assert calls.count(fused) == 1
