"""Eager composites stay within their budget of temporary memory, at any size: chunks, not whole intermediates."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import indexer_ops
import inputs
from indexer_ops import reference

# Several chunks at the sizes below, and room for the smallest: a block of rows and the keys of its window.
BUDGET = 4 * 2**20
# Rounding of the allocator, index tensors of a chunk, scalars: what does not grow with the sizes below.
SLACK = 64 * 1024


def peak_bytes(call):
    """Most bytes that the CPU allocator held at once beyond those held before ``call``; and what it returned."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    records = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for record in sorted(records, key=lambda event: event.start_ns()):
        held += record.nbytes()
        peak = max(peak, held)
    return peak, result


def bytes_of(*tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_the_measure_sees_a_temporary():
    peak, result = peak_bytes(lambda: torch.zeros(1000, 1000).sum())
    assert 4_000_000 <= peak < 4_100_000 and bytes_of(result) == 4


@pytest.fixture
def case(monkeypatch):
    monkeypatch.setattr(reference, "TRANSIENT_BYTES", BUDGET)
    case = inputs.attention_inputs(B=2, S=1400, H=4, D=32, P=200, K=64, dtype=torch.bfloat16)
    for name in ("query", "window_kv", "sink", "pool", "noncompressed_lse", "index_scores"):
        setattr(case, name, getattr(case, name).cpu())
    case.topk_idxs = case.topk_idxs.cpu()
    return case


@pytest.mark.parametrize("window", [0, 1, 100, 699, 5000])
@pytest.mark.parametrize("per_head_keys", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_window_lse(case, window, per_head_keys, packed):
    keys = case.window_kv
    if per_head_keys:
        keys = keys.unsqueeze(2) + torch.zeros(4, 1, dtype=keys.dtype)
    doc_start = (torch.arange(1400) // 100 * 100).expand(2, 1400).contiguous() if packed else None
    peak, lse = peak_bytes(
        lambda: indexer_ops.window_lse(
            case.query, keys, case.sink, doc_start, window=window, scale=case.scale, backend="composite"
        )
    )
    # Without the sink and with it: both are [B, S, H].
    assert peak <= BUDGET + 2 * bytes_of(lse) + SLACK


@pytest.mark.parametrize("denominator", ["noncompressed_lse", "joint_lse", None])
@pytest.mark.parametrize("normalize", [False, True])
def test_distill_target(case, denominator, normalize):
    pair = {} if denominator is None else {denominator: case.noncompressed_lse}
    peak, target = peak_bytes(
        lambda: indexer_ops.distill_target(
            case.query, case.pool, case.topk_idxs, scale=case.scale, normalize=normalize, backend="composite", **pair
        )
    )
    # Normalised and not are both [B, S, K].
    assert peak <= BUDGET + (2 if normalize else 1) * bytes_of(target) + SLACK


def test_distill_kl_and_its_gradient(case):
    target = inputs.target_of(case.topk_idxs)
    leaf = case.index_scores.requires_grad_()
    peak, kl = peak_bytes(lambda: indexer_ops.distill_kl(leaf, target, case.topk_idxs, backend="composite"))
    # The rows of each chunk, and their concatenation.
    assert peak <= BUDGET + 2 * bytes_of(kl) + SLACK
    peak, (gradient,) = peak_bytes(lambda: torch.autograd.grad(kl.sum(), leaf))
    # Each chunk's gradient is added into a whole one: two of them live at once.
    assert peak <= BUDGET + 3 * bytes_of(gradient) + SLACK


def test_closed_form_gradient(case):
    target = inputs.target_of(case.topk_idxs)
    arguments = (torch.ones(2, 1400), case.index_scores, target, case.topk_idxs, 1e-10)
    peak, gradient = peak_bytes(lambda: reference.distill_kl_backward(*arguments))
    assert peak <= BUDGET + bytes_of(gradient) + SLACK
