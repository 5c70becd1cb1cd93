"""The indexer as a module against the one of transformers, in values, gradients and selection; and its loss."""

import pytest
import torch

import indexer_ops
from backends import BACKENDS
from indexer_ops.modules import CompressedAttentionDistillation, LightningIndexer, pool_overlapping_windows

HIDDEN, Q_RANK, HEADS, DIM, RATIO, TOPK = 24, 16, 3, 16, 4, 3
INDEXER_PARAMETERS = 6


def new_indexer(seed=0, **options):
    torch.manual_seed(seed)
    frequencies = 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8)
    options = dict(topk=TOPK, ratio=RATIO, inverse_frequencies=frequencies) | options
    indexer = LightningIndexer(HIDDEN, Q_RANK, HEADS, DIM, **options)
    torch.nn.init.normal_(indexer.position_bias)
    return indexer


def layer_inputs(B=2, S=22, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, S, HIDDEN, generator=generator), torch.randn(B, S, Q_RANK, generator=generator)


# --- Against transformers -----------------------------------------------------------------------------------------


@pytest.fixture
def theirs():
    small = pytest.importorskip("small_deepseek_v4")
    return small.small_model().model.layers[2].self_attn.compressor.indexer


def run_theirs(theirs, hidden_states, q_residual, positions):
    seen = {}
    hook = theirs.scorer.register_forward_hook(lambda module, args, scores: seen.update(scores=scores))
    topk_idxs = theirs(hidden_states, q_residual, positions, None, 2)
    hook.remove()
    return seen["scores"].gather(-1, topk_idxs.clamp(min=0)), topk_idxs


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_equals_the_one_of_transformers(theirs, packed, hadamard):
    generator = torch.Generator().manual_seed(3)
    hidden_states = torch.randn(2, 42, 64, generator=generator)
    q_residual = torch.randn(2, 42, 32, generator=generator)
    positions = torch.cat([torch.arange(19), torch.arange(23)]) if packed else torch.arange(42)
    positions = positions.expand(2, -1)
    ours = LightningIndexer.from_transformers(theirs, hadamard=hadamard)
    scores, idxs = ours(hidden_states, q_residual, positions if packed else None)
    expected_scores, expected_idxs = run_theirs(theirs, hidden_states, q_residual, positions)
    order = idxs.sort(-1)
    expected_order = expected_idxs.sort(-1)
    assert torch.equal(order.values, expected_order.values.int())
    valid = order.values >= 0
    assert valid.any() and not valid.all()
    scores, expected_scores = (s.gather(-1, o.indices) for s, o in ((scores, order), (expected_scores, expected_order)))
    torch.testing.assert_close(scores[valid], expected_scores[valid], rtol=1e-4, atol=1e-4)

    slope = torch.randn(scores.shape, generator=generator)[valid]
    (scores[valid] * slope).sum().backward()
    (expected_scores[valid] * slope).sum().backward()
    for own, other in (
        ("q_up_proj", "q_b_proj"), ("value_proj", "kv_proj"), ("gate_proj", "gate_proj"), ("key_norm", "kv_norm"),
        ("weights_proj", "scorer.weights_proj"),
    ):  # fmt: skip
        expected = theirs.get_parameter(f"{other}.weight").grad
        assert expected.abs().max() > 0
        tolerance = 1e-4 * expected.abs().max().item()
        torch.testing.assert_close(ours.get_parameter(f"{own}.weight").grad, expected, rtol=1e-3, atol=tolerance)
    torch.testing.assert_close(ours.position_bias.grad, theirs.position_bias.grad, rtol=1e-3, atol=1e-3)


def test_state_dict_of_a_whole_model_loads_by_prefix(theirs):
    ours = LightningIndexer.from_transformers(theirs)
    state = {f"model.indexer.{name}": value + 1 for name, value in theirs.state_dict().items()}
    ours.load_transformers_state_dict(state | {"model.other": torch.zeros(1)}, prefix="model.indexer.")
    assert torch.equal(ours.value_proj.weight, theirs.kv_proj.weight + 1)
    assert torch.equal(ours.weights_proj.weight, theirs.scorer.weights_proj.weight + 1)
    assert len(list(ours.parameters())) == len(list(theirs.parameters())) == INDEXER_PARAMETERS
    with pytest.raises(KeyError, match="no q_b_proj.weight, kv_proj.weight"):
        ours.load_transformers_state_dict({})
    del state["model.indexer.position_bias"]
    with pytest.raises(KeyError, match="no model.indexer.position_bias"):
        ours.load_transformers_state_dict(state, prefix="model.indexer.")
    with pytest.raises(RuntimeError, match="size mismatch"):
        new_indexer().load_transformers_state_dict(theirs.state_dict())


def test_copy_keeps_dtypes(theirs):
    theirs.bfloat16()
    theirs.kv_norm.float()
    ours = LightningIndexer.from_transformers(theirs)
    assert ours.q_up_proj.weight.dtype == torch.bfloat16 and ours.key_norm.weight.dtype == torch.float32
    generator = torch.Generator().manual_seed(3)
    hidden_states = torch.randn(1, 24, 64, generator=generator).bfloat16()
    q_residual = torch.randn(1, 24, 32, generator=generator).bfloat16()
    scores, idxs = ours(hidden_states, q_residual)
    expected = run_theirs(theirs, hidden_states, q_residual, torch.arange(24).unsqueeze(0))[0]
    expected = expected.masked_fill(idxs < 0, 0).sum(-1)
    torch.testing.assert_close(scores.masked_fill(idxs < 0, 0).sum(-1), expected, rtol=0.02, atol=0.02)


# --- Parts --------------------------------------------------------------------------------------------------------


def test_pooling_long_hand():
    values, gates = torch.randn(2, 1, 3, 2, 8).double()
    pooled = pool_overlapping_windows(values, gates)
    for n in range(3):
        for channel in range(4):
            pairs = [(gates[0, n, j, 4 + channel], values[0, n, j, 4 + channel]) for j in range(2)]
            if n > 0:
                pairs += [(gates[0, n - 1, j, channel], values[0, n - 1, j, channel]) for j in range(2)]
            shares = [gate.exp() for gate, _ in pairs]
            expected = sum(share * value for share, (_, value) in zip(shares, pairs)) / sum(shares)
            torch.testing.assert_close(pooled[0, n, channel], expected, rtol=1e-6, atol=1e-6)
    assert pool_overlapping_windows(values[:, :0], gates[:, :0]).shape == (1, 0, 4)


def test_hadamard_rotates_and_changes_no_score():
    plain, rotated = new_indexer(), new_indexer(hadamard=True)
    hidden_states, q_residual = layer_inputs()
    positions = torch.arange(22).unsqueeze(0)
    assert not torch.allclose(plain.keys(hidden_states), rotated.keys(hidden_states), atol=0.1)
    for one, other in (
        (plain.keys(hidden_states), rotated.keys(hidden_states)),
        (plain.queries(q_residual, positions), rotated.queries(q_residual, positions)),
    ):
        torch.testing.assert_close(one.norm(dim=-1), other.norm(dim=-1))
    torch.testing.assert_close(plain(hidden_states, q_residual)[0], rotated(hidden_states, q_residual)[0])


def test_scores_do_not_change_when_all_positions_shift_by_whole_entries():
    indexer = new_indexer()
    hidden_states, q_residual = layer_inputs()
    angles = torch.arange(22).unsqueeze(0)
    key = indexer.keys(hidden_states)
    shifted = indexer._rotated(indexer._rotated(key, torch.full((1, 5), 8)), torch.full((1, 5), 0))
    products = torch.einsum("bshd,bpd->bshp", indexer.queries(q_residual, angles), key)
    moved = torch.einsum("bshd,bpd->bshp", indexer.queries(q_residual, angles + 8), shifted)
    torch.testing.assert_close(products, moved, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shard_of_the_queries_selects_as_the_whole(backend):
    indexer = new_indexer(backend=backend)
    hidden_states, q_residual = layer_inputs()
    scores, idxs = indexer(hidden_states, q_residual)
    shard = slice(9, 22)
    part = indexer(hidden_states[:, shard], q_residual[:, shard], keys=indexer.keys(hidden_states), query_offset=9)
    torch.testing.assert_close(part[0], scores[:, shard])
    assert torch.equal(part[1], idxs[:, shard])


def test_entry_bounds_keep_packed_documents_apart():
    indexer = new_indexer()
    hidden_states, q_residual = layer_inputs()
    start = torch.where(torch.arange(22) < 12, 0, 3).expand(2, -1)
    _, idxs = indexer(hidden_states, q_residual, entry_start=start)
    late = idxs[:, 12:]
    assert (late >= 3).any() and not ((late >= 0) & (late < 3)).any() and (idxs[:, :12] == 0).any()


def test_too_short_for_an_entry():
    indexer = new_indexer()
    scores, idxs = indexer(*layer_inputs(S=RATIO - 1))
    assert scores.shape == idxs.shape == (2, RATIO - 1, TOPK) and (idxs == -1).all()
    scores.masked_fill(idxs < 0, 0.0).sum().backward()
    assert all(not parameter.grad.any() for parameter in indexer.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topk": -1}, "topk must be 0 or greater, got -1"),
        ({"ratio": 0}, "ratio must be 1 or greater, got 0"),
        ({"inverse_frequencies": torch.ones(9)}, r"rope_dim at most head_dim = 16, got \[9\]"),
        ({"inverse_frequencies": torch.ones(2, 2)}, r"must be \[rope_dim / 2\].* got \[2, 2\]"),
    ],
)
def test_bad_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        new_indexer(**options)


def test_bad_head_dims():
    options = dict(topk=2, ratio=4, inverse_frequencies=torch.ones(4))
    with pytest.raises(ValueError, match="power of two, got 48"):
        LightningIndexer(8, 8, 2, 48, hadamard=True, **options)
    with pytest.raises(ValueError, match="num_heads must be 1 or greater, got 0"):
        LightningIndexer(8, 8, 0, 16, **options)


# --- Indexer and loss ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_indexer_learns(backend):
    layer = CompressedAttentionDistillation(new_indexer(backend=backend), scale=0.25, window=5)
    inputs = [tensor.requires_grad_() for tensor in layer_inputs()]
    generator = torch.Generator().manual_seed(2)
    teacher = [
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((2, 22, 4, 16), (2, 5, 16), (2, 22, 16), (4,))
    ]
    query, pool, window_kv, sink = teacher
    scores, idxs = layer(*inputs)
    loss = layer.loss(scores, idxs, query, pool, window_kv, sink, reduction="valid_mean", backend=backend)
    expected = indexer_ops.distill_loss(
        scores, idxs, query, pool, scale=0.25, window_kv=window_kv, sink=sink, window=5, reduction="valid_mean"
    )
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(tensor.grad is None for tensor in (*inputs, *teacher))
    assert all(parameter.grad.abs().max() > 0 for parameter in layer.parameters())


def test_inputs_given_by_name_are_detached_too():
    layer = CompressedAttentionDistillation(new_indexer(), scale=0.25, window=5)
    hidden_states, q_residual = layer_inputs()
    keys = layer.indexer.keys(hidden_states).detach().requires_grad_()
    scores, idxs = layer(hidden_states, q_residual, keys=keys)
    scores.masked_fill(idxs < 0, 0.0).sum().backward()
    assert keys.grad is None and layer.indexer.q_up_proj.weight.grad.any()
