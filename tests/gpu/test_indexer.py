"""The indexer's kernels on a GPU: bfloat16 against float64, the same bits on every run, memory at long context."""

import pytest
import torch

import indexer_ops
from backends import poisoned_allocations
from oracle_on_device import relative_error

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
NOTHING = float("-inf")

WIDTHS = {
    "V4-Flash": dict(B=1, S=1024, Hi=64, Di=128, P=1024, topk=512, ratio=1),
    "V4-Pro": dict(B=1, S=512, Hi=64, Di=128, P=2048, topk=1024, ratio=1),
    "wider than one program": dict(B=1, S=128, Hi=32, Di=128, P=9000, topk=512, ratio=1),
    "odd": dict(B=2, S=77, Hi=5, Di=48, P=123, topk=100, ratio=1),
    "one head": dict(B=2, S=65, Hi=1, Di=16, P=16, topk=9, ratio=4),
}


def operands(B, S, Hi, Di, P, dtype=torch.bfloat16, seed=0, **_):
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, device=DEVICE, generator=generator)

    q, k = normal(B, S, Hi, Di).to(dtype), normal(B, P, Di).to(dtype)
    return q, k, normal(B, S, Hi) * (Hi * Di) ** -0.5


def index_scores(q, k, weights, ratio, query_offset):
    """``[B, S, P]`` float64, ``-inf`` where an entry is not visible; a head at a time."""
    scores = torch.zeros(*q.shape[:2], k.shape[1], dtype=torch.float64, device=DEVICE)
    for h in range(q.shape[2]):
        products = q[:, :, h].double() @ k.double().transpose(1, 2)
        scores += products.clamp(min=0) * weights[:, :, h, None].double()
    stop = (query_offset + torch.arange(q.shape[1], device=DEVICE) + 1) // ratio
    return scores.masked_fill(torch.arange(k.shape[1], device=DEVICE) >= stop.unsqueeze(-1), NOTHING)


def exact_gradients(slope, q, k, weights, idxs):
    """dq, dk, dweights in float64 over the selected entries, a head at a time through dense rows."""
    valid = idxs >= 0
    dense = torch.zeros(*q.shape[:2], k.shape[1], dtype=torch.float64, device=DEVICE)
    dense.scatter_add_(-1, idxs.clamp(min=0).long(), torch.where(valid, slope.double(), 0.0))
    dq, dweights = torch.zeros_like(q, dtype=torch.float64), torch.zeros_like(weights, dtype=torch.float64)
    dk, keys = torch.zeros_like(k, dtype=torch.float64), k.double()
    for h in range(q.shape[2]):
        query = q[:, :, h].double()
        products = query @ keys.transpose(1, 2)
        gradient = torch.where(products > 0, dense * weights[:, :, h, None].double(), 0.0)
        dq[:, :, h] = gradient @ keys
        dk += gradient.transpose(1, 2) @ query
        dweights[:, :, h] = (dense * products.clamp(min=0)).sum(-1)
    return dq, dk, dweights


def rounding_band(terms: int) -> float:
    """What float32 sums of this many terms may be off by, relative: the random walk of their roundings."""
    return torch.finfo(torch.float32).eps * terms**0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("widths", WIDTHS)
def test_against_float64(widths, dtype):
    sizes = WIDTHS[widths]
    topk, ratio = sizes["topk"], sizes["ratio"]
    offset = max(0, sizes["P"] * ratio - sizes["S"]) // 2
    arguments = operands(**sizes, dtype=dtype)
    exact = index_scores(*arguments, ratio, offset)
    slope = torch.randn(*arguments[0].shape[:2], topk, device=DEVICE)

    def run(backend):
        leaves = [tensor.clone().requires_grad_() for tensor in arguments]
        scores, idxs = indexer_ops.indexer_topk(*leaves, topk=topk, ratio=ratio, query_offset=offset, backend=backend)
        return scores.detach(), idxs, torch.autograd.grad(scores, leaves, slope)

    results = {"composite": run("composite"), "fast": run("triton")}
    with poisoned_allocations():  # which also takes the deterministic road of the backward
        results["deterministic"] = run("triton")
    best = exact.topk(min(topk, sizes["P"]), -1).values
    score_errors, regrets, gradient_errors = {}, {}, {}
    for backend, (scores, idxs, gradients) in results.items():
        valid = idxs >= 0
        assert torch.equal(valid.sum(-1), (best > NOTHING).sum(-1))
        own = exact.gather(-1, idxs.clamp(min=0).long())
        assert bool((own[valid] > NOTHING).all()) and bool((scores[~valid] == NOTHING).all())
        rows = idxs.sort(-1).values
        assert not ((rows[..., 1:] == rows[..., :-1]) & (rows[..., 1:] >= 0)).any()
        descending = scores[..., :-1] >= scores[..., 1:]
        assert bool((descending | ~valid[..., 1:]).all())
        score_errors[backend] = relative_error(scores[valid], own[valid])
        regret = torch.where(best > NOTHING, best, 0.0).sum() - own[valid].sum()
        regrets[backend] = float(regret / own[valid].abs().sum())
        wanted = exact_gradients(slope, *arguments, idxs)
        gradient_errors[backend] = [relative_error(got, want) for got, want in zip(gradients, wanted)]
    band = rounding_band(sizes["Di"] + sizes["Hi"])
    # A gradient of half precision is rounded once more, to the dtype of the operands, before it multiplies.
    gradient_band = rounding_band(sizes["Hi"] + sizes["S"] + topk) + torch.finfo(dtype).eps / 2
    for road in ("fast", "deterministic"):
        assert score_errors[road] <= 2 * score_errors["composite"] + band, score_errors
        assert regrets[road] <= 2 * regrets["composite"] + band, regrets
        for error, composite_error in zip(gradient_errors[road], gradient_errors["composite"]):
            assert error <= 2 * composite_error + gradient_band, gradient_errors


@pytest.mark.parametrize("plateau", [False, True])
def test_25_runs_have_the_same_bits(plateau):
    q, k, weights = operands(B=1, S=1024, Hi=16, Di=128, P=6000)
    if plateau:
        q, k = q.abs(), -k.abs()  # every product is negative
    call = dict(topk=512, ratio=1, query_offset=5000, backend="triton")
    scores, idxs = indexer_ops.indexer_topk(q, k, weights, **call)
    if plateau:
        assert not scores.any() and bool((idxs == torch.arange(512, device=DEVICE)).all())
    for _ in range(25):
        again = indexer_ops.indexer_topk(q, k, weights, **call)
        assert torch.equal(scores, again[0]) and torch.equal(idxs, again[1])


def test_deterministic_dk_has_the_same_bits():
    arguments = operands(B=1, S=2048, Hi=64, Di=128, P=512)
    leaves = [tensor.requires_grad_() for tensor in arguments]
    slope = torch.randn(1, 2048, 256, device=DEVICE)
    scores, idxs = indexer_ops.indexer_topk(*leaves, topk=256, ratio=4, backend="triton")

    def gradient_of_keys():
        return torch.autograd.grad(scores, leaves[1], slope, retain_graph=True)[0]

    fast = gradient_of_keys()
    torch.use_deterministic_algorithms(True)
    try:
        first = gradient_of_keys()
        assert all(torch.equal(first, gradient_of_keys()) for _ in range(10))
    finally:
        torch.use_deterministic_algorithms(False)
    exact = exact_gradients(slope, *(leaf.detach() for leaf in leaves), idxs)[1]
    assert relative_error(first, exact) <= 2 * relative_error(fast, exact) + rounding_band(2048 * 64)


def test_long_context_fits():
    """65,536 queries of 16,384 entries: at most 1 GiB beyond inputs, outputs and gradients. Scores alone are 4 GiB."""
    leaves = [tensor.requires_grad_() for tensor in operands(B=1, S=65_536, Hi=64, Di=128, P=16_384)]
    slope = torch.ones(1, 65_536, 512, device=DEVICE)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    scores, idxs = indexer_ops.indexer_topk(*leaves, topk=512, ratio=4, backend="triton")
    scores.backward(slope)
    torch.cuda.synchronize()
    results = (scores, idxs, *(leaf.grad for leaf in leaves))
    kept = sum(tensor.numel() * tensor.element_size() for tensor in results)
    assert torch.cuda.max_memory_allocated() - before - kept <= 2**30
    assert bool((idxs[0, -1] >= 0).all()) and all(leaf.grad.any() for leaf in leaves)
