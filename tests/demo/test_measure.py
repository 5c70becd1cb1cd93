"""The numbers of the demo against the same by hand: loops and sets in double precision."""

import math
import random

import pytest
import torch

from indexer_ops.demo import measure

B, S, H, D, RATIO, WINDOW, TOPK = 2, 37, 3, 8, 4, 6, 3
P = S // RATIO
SCALE = D**-0.5


@pytest.fixture(scope="module")
def operands():
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    return {"query": 3 * normal(B, S, H, D), "window_kv": normal(B, S, D), "pool": normal(B, P, D), "sink": normal(H)}


@pytest.fixture(scope="module")
def attention_by_hand(operands):
    """``[b][t]``: a dict from visible entry to head-summed attention."""
    query, window_kv, pool, sink = (operands[name].double().tolist() for name in operands)
    rows = []
    for b in range(B):
        rows.append([])
        for t in range(S):
            mass = {p: 0.0 for p in range(P) if (p + 1) * RATIO <= t + 1}
            for h in range(H):

                def weight(key, vector=query[b][t][h]):
                    return math.exp(SCALE * math.fsum(x * y for x, y in zip(vector, key, strict=True)))

                entries = {p: weight(pool[b][p]) for p in mass}
                keys = [weight(window_kv[b][j]) for j in range(max(0, t - WINDOW + 1), t + 1)]
                total = math.fsum([*entries.values(), *keys, math.exp(sink[h])])
                for p, value in entries.items():
                    mass[p] += value / total
            rows[b].append(mass)
    return rows


@pytest.fixture(scope="module")
def selection():
    """Random visible entries, fewer than TOPK in some rows; ``-1`` and indices past the pool are empty slots."""
    draw = random.Random(1)
    idxs = torch.full((B, S, TOPK), -1)
    for b in range(B):
        for t in range(S):
            visible = (t + 1) // RATIO
            chosen = draw.sample(range(visible), min(TOPK - (t % 5 == 0), visible))
            slots = [*chosen, *[(-1, P)[t % 2]] * (TOPK - len(chosen))]
            draw.shuffle(slots)
            idxs[b, t] = torch.tensor(slots)
    return idxs


def attention_of(operands):
    return measure.joint_attention(**operands, visible=measure.visible_entries(S, P, RATIO), scale=SCALE, window=WINDOW)


def test_joint_attention_is_one_softmax_over_window_sink_and_every_visible_entry(operands, attention_by_hand):
    expected = [[[mass.get(p, 0.0) for p in range(P)] for mass in row] for row in attention_by_hand]
    torch.testing.assert_close(attention_of(operands).double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-6)


def test_recall_and_captured_mass(operands, attention_by_hand, selection):
    overlaps, captured, best, everything = [], 0.0, 0.0, 0.0
    for b in range(B):
        for t, mass in enumerate(attention_by_hand[b]):
            if len(mass) <= TOPK:
                continue
            oracle = set(sorted(mass, key=mass.get, reverse=True)[:TOPK])
            chosen = set(selection[b, t].tolist()) & set(range(P))
            overlaps.append(len(oracle & chosen) / TOPK)
            captured += sum(mass[p] for p in chosen)
            best += sum(mass[p] for p in oracle)
            everything += sum(mass.values())
    assert 0 < sum(overlaps) < len(overlaps)  # or the comparison would say nothing

    attention = attention_of(operands)
    rows = measure.counting_rows(measure.visible_entries(S, P, RATIO), TOPK)
    selected = measure.selection_mask(selection, P)
    oracle = measure.selection_mask(measure.oracle_selection(attention, TOPK), P)
    assert measure.recall(selected, oracle, rows).item() == pytest.approx(sum(overlaps) / len(overlaps), rel=1e-6)
    assert measure.captured_mass(attention, selected, rows).item() == pytest.approx(captured / everything, rel=1e-5)
    assert measure.captured_mass(attention, oracle, rows).item() == pytest.approx(best / everything, rel=1e-5)


def test_chance_is_what_random_selections_recall(operands):
    visible = measure.visible_entries(S, P, RATIO)
    rows = measure.counting_rows(visible, TOPK)
    counts = [(t + 1) // RATIO for t in range(S)]
    assert rows.tolist() == [count > TOPK for count in counts]
    by_hand = [TOPK / count for count in counts if count > TOPK]
    assert measure.chance(visible, TOPK) == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-12)

    oracle = measure.selection_mask(measure.oracle_selection(attention_of(operands), TOPK), P)
    draws = 400
    keys = torch.rand(draws * B, S, P, generator=torch.Generator().manual_seed(2)).masked_fill(~visible, -1.0)
    selected = measure.selection_mask(keys.topk(TOPK, dim=-1).indices, P)
    # A row's recall has a standard deviation below 1/2, and 400 draws of 2 x 22 rows average it: 4 sigma are 0.015.
    recalled = measure.recall(selected, oracle.repeat(draws, 1, 1), rows).item()
    assert recalled == pytest.approx(measure.chance(visible, TOPK), abs=0.015)
