"""FLOP formulas of the private ops against a count by hand: visible keys and selected slots, two per multiply-add."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import indexer_ops
import inputs
from backends import needs_kernels


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def visible_pairs(S, T, window, query_offset):
    return sum(
        1
        for s in range(S)
        for j in range(T)
        if j <= query_offset + s and (window <= 0 or j > query_offset + s - window)
    )


@needs_kernels
@pytest.mark.parametrize("window", [0, -1, 1, 4, 100])
@pytest.mark.parametrize("S, T, query_offset", [(9, 9, 0), (5, 12, 6), (8, 3, 0), (6, 9, 20)])
@pytest.mark.parametrize("per_head_keys", [False, True])
def test_window_lse(window, S, T, query_offset, per_head_keys):
    case = inputs.attention_inputs(B=2, S=S, H=3, T=T)
    keys = case.window_kv.unsqueeze(2).repeat(1, 1, 3, 1) if per_head_keys else case.window_kv
    expected = 2 * 2 * 3 * 16 * visible_pairs(S, T, window, query_offset)
    options = {"window": window, "scale": 0.3, "query_offset": query_offset}
    public = counted(lambda: indexer_ops.window_lse(case.query, keys, case.sink, backend="triton", **options))
    private = counted(
        lambda: torch.ops.v4idx._window_lse(case.query, keys, case.sink, None, window, 0.3, query_offset, True)
    )
    assert public == private == expected


@needs_kernels
@pytest.mark.parametrize("denominator", ["noncompressed_lse", "joint_lse", "selected"])
def test_distill_target(denominator):
    case = inputs.attention_inputs(B=2, S=5, H=3, D=32, P=40, K=7)
    lse = case.noncompressed_lse
    pair = {"noncompressed_lse": (lse, None), "joint_lse": (None, lse), "selected": (None, None)}[denominator]
    # The pool has 40 entries: only the 7 selected count, however many passes the kernel takes.
    expected = 2 * 2 * 5 * 3 * 32 * 7
    arguments = (case.query, case.pool, case.topk_idxs, *pair)
    assert counted(lambda: indexer_ops.distill_target(*arguments, scale=0.3, backend="triton")) == expected
    assert counted(lambda: torch.ops.v4idx._distill_target(*arguments, 0.3, True, True)) == expected


@needs_kernels
def test_whole_loss():
    case = inputs.attention_inputs(B=2, S=5, H=3, P=6, K=4)
    scores = case.index_scores.requires_grad_()

    def step():
        indexer_ops.distill_loss(
            scores, case.topk_idxs, case.query, case.pool, scale=0.3, window_kv=case.window_kv, sink=case.sink,
            window=2, backend="triton",
        ).backward()  # fmt: skip

    # Window keys, and slots of the one pass.
    products_per_head = 5 * 4 + visible_pairs(5, 5, 2, 0)
    assert counted(step) == 2 * 2 * 3 * 16 * products_per_head, "the elementwise KL and its gradient count nothing"
