"""combine_lse against sums of exponentials written out by hand."""

import math

import pytest
import torch

from indexer_ops.lse import combine_lse

B, S, H = 2, 3, 4


def by_hand(*values: float) -> float:
    maximum = max(values)
    if maximum == -math.inf:
        return maximum
    return maximum + math.log(math.fsum(math.exp(value - maximum) for value in values))


def random_parts(dtype):
    generator = torch.Generator().manual_seed(0)
    first, second = (5 * torch.randn(B, S, H, generator=generator).to(dtype) for _ in range(2))
    return first, torch.randn(H, generator=generator).to(dtype), second


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sink_first", [False, True])
def test_against_sums_by_hand(dtype, sink_first):
    first, sink, second = random_parts(dtype)
    parts = (sink, first, second) if sink_first else (first, sink, second)
    joined = combine_lse(*parts)
    assert joined.dtype == dtype and joined.shape == (B, S, H)
    for b in range(B):
        for s in range(S):
            for h in range(H):
                expected = by_hand(first[b, s, h].item(), sink[h].item(), second[b, s, h].item())
                # Two joins, each a rounded difference, exponential, logarithm and sum.
                assert joined[b, s, h].item() == pytest.approx(expected, rel=0, abs=16 * torch.finfo(dtype).eps * 20)


@pytest.mark.parametrize(
    "values",
    [
        (-math.inf, -math.inf),
        (-math.inf, 2.0),
        (2.0, -math.inf),
        (3e38, 3e38),
        (-3e38, -3e38),
        (3e38, -3e38),
        (-3e38, -math.inf),
        (1e30, 1.0, -math.inf),
    ],
    ids=str,
)
def test_empty_parts_and_huge_values(values):
    joined = combine_lse(*(torch.full((1, 1, 1), value) for value in values))
    assert joined.item() == pytest.approx(by_hand(*values), rel=1e-6)


def test_equal_parts_of_one_sum():
    logits = torch.randn(B, S, H, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = [part.logsumexp(-1) for part in logits.split([5, 1, 6], -1)]
    torch.testing.assert_close(combine_lse(*parts), logits.logsumexp(-1))
    torch.testing.assert_close(combine_lse(parts[0]), parts[0], rtol=0, atol=0)


def test_log2_and_transposed_parts_as_the_docstring_converts_them():
    natural, sink, _ = random_parts(torch.float64)
    in_log2_by_head = (natural / math.log(2)).transpose(1, 2).contiguous()
    converted = in_log2_by_head.transpose(1, 2) * math.log(2)
    torch.testing.assert_close(combine_lse(converted, sink), combine_lse(natural, sink))


def test_float64_wins_and_no_gradient_comes_back():
    first, sink, second = random_parts(torch.float32)
    joined = combine_lse(first.requires_grad_(), sink, second.double())
    assert joined.dtype == torch.float64 and not joined.requires_grad and joined.is_contiguous()


@pytest.mark.parametrize(
    ("parts", "error", "named"),
    [
        ((), ValueError, "at least one part must be [B, S, H]"),
        ((torch.zeros(4),), ValueError, "at least one part must be [B, S, H], got shapes [[4]]"),
        ((torch.zeros(2, 3, 4), torch.zeros(2, 4, 3)), ValueError, "lses[1] must be [B, S, H] = [2, 3, 4]"),
        ((torch.zeros(2, 3, 4), torch.zeros(3)), ValueError, "or [H] = [4], got [3]"),
        ((torch.zeros(2, 3, 4), torch.zeros(3, 4)), ValueError, "got [3, 4]"),
        ((torch.zeros(2, 3, 4), torch.zeros(4, device="meta")), ValueError, "lses[1] on meta"),
        (
            (torch.zeros(2, 3, 4), torch.zeros(4).bfloat16()),
            TypeError,
            "lses[1] must be torch.float32 or torch.float64",
        ),
        ((torch.zeros(2, 3, 4).int(),), TypeError, "got torch.int32"),
        ((torch.zeros(2, 3, 4), 1.0), TypeError, "lses[1] must be a torch.Tensor, got float"),
    ],
)
def test_bad_input(parts, error, named):
    with pytest.raises(error) as raised:
        combine_lse(*parts)
    assert named in str(raised.value)
