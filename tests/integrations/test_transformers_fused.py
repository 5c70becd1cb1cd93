"""Both roads of the indexer inside transformers: the fused op selects and learns as the dense scorer does."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from indexer_ops.integrations.transformers import enable_indexer_distillation, fused_indexer
from small_deepseek_v4 import (
    CACHE,
    CSA,
    CSA_LAYERS,
    LENGTH,
    RATIO,
    TOPK,
    checkpoint_layers,
    gradients,
    indexer_parameters,
    masked_case,
    small_model,
    tokens,
)


@pytest.fixture
def model():
    return small_model()


def indexers_of(model):
    return [model.model.layers[layer].self_attn.compressor.indexer for layer in CSA_LAYERS]


def training_step(model, inputs, fused):
    """Loss per layer, gradients, what each indexer selected (sorted: the roads order it differently), and logits."""
    model = copy.deepcopy(model)
    handle = enable_indexer_distillation(model, coeff=0.5, fused_indexer=fused)
    selected = []
    for indexer in indexers_of(model):
        indexer.register_forward_hook(lambda module, args, topk_idxs: selected.append(topk_idxs))
    outputs = model(**inputs, labels=inputs["input_ids"])
    outputs.loss.backward()
    return handle.per_layer, gradients(model), [idxs.sort(-1).values for idxs in selected], outputs.logits


@pytest.mark.parametrize("use_reentrant", [None, False, True], ids=["plain", "non_reentrant", "reentrant"])
@pytest.mark.parametrize("name", ["unmasked", "left_padding_with_positions", "packed"])
def test_both_roads_select_and_learn_the_same(model, name, use_reentrant):
    checkpoint_layers(model, use_reentrant)
    inputs = masked_case(name).inputs
    fused = training_step(model, inputs, True)
    dense = training_step(model, inputs, False)
    assert len(fused[2]) == len(dense[2]) >= len(CSA_LAYERS)
    for actual, expected in zip(fused[2], dense[2], strict=True):
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)
    assert any((idxs < 0).any() for idxs in fused[2])
    # The documents of a pack are so short that each query takes all it sees.
    assert name == "packed" or any((idxs >= TOPK).any() for idxs in fused[2])
    torch.testing.assert_close(fused[3], dense[3])
    assert set(fused[0]) == set(CSA_LAYERS)
    torch.testing.assert_close(fused[0], dense[0], rtol=1e-5, atol=1e-7)
    for parameter, expected in dense[1].items():
        torch.testing.assert_close(fused[1][parameter], expected, rtol=1e-3, atol=1e-5, msg=parameter)


def test_the_dense_scorer_runs_on_its_own_road_only(model):
    calls = []
    for indexer in indexers_of(model):
        indexer.scorer.register_forward_hook(lambda *_: calls.append(1))
    handle = enable_indexer_distillation(model)
    model(tokens())
    assert not calls
    model.eval()
    model(tokens())  # no loss, so everything is as transformers does it
    assert len(calls) == len(CSA_LAYERS)
    handle.disable()
    model.train()
    enable_indexer_distillation(model, fused_indexer=False)
    model(tokens())
    assert len(calls) == 2 * len(CSA_LAYERS)


@pytest.mark.parametrize("fused", [True, False])
def test_disable_removes_the_forward_of_the_indexer(model, fused):
    before = [dict(vars(indexer)) for indexer in indexers_of(model)]
    handle = enable_indexer_distillation(model, fused_indexer=fused)
    assert all(("forward" in vars(indexer)) == fused for indexer in indexers_of(model))
    handle.disable()
    assert [dict(vars(indexer)) for indexer in indexers_of(model)] == before


def test_a_forward_of_somebody_else_is_kept(model):
    indexer = indexers_of(model)[0]
    calls, own_forward = [], indexer.forward

    def offloaded(*args):
        calls.append(1)
        return own_forward(*args)

    handle = enable_indexer_distillation(model)
    model(tokens())
    expected = handle.per_layer
    handle.disable()
    indexer.forward = offloaded
    handle = enable_indexer_distillation(model)
    model(tokens())
    assert calls == [1]
    torch.testing.assert_close(handle.per_layer, expected, rtol=1e-5, atol=0)
    handle.disable()
    assert indexer.forward is offloaded


@pytest.mark.parametrize("length", [RATIO - 1, LENGTH, LENGTH + 3])
def test_the_cache_is_filled_as_transformers_fills_it(model, length):
    """A cache that a training pass filled goes on as one that the model's own pass filled."""
    ids = tokens(length=length)
    with torch.no_grad():
        expected_cache = model(ids, use_cache=True)[CACHE]
        expected = model(tokens(length=6, seed=2), **{CACHE: expected_cache}).logits
    handle = enable_indexer_distillation(model)
    outputs = model(ids, use_cache=True)
    assert set(handle.per_layer) == set(CSA_LAYERS)
    for layer in CSA_LAYERS:
        ours, theirs = outputs[CACHE].layers[layer], expected_cache.layers[layer]
        assert ours.entry_count["indexer"] == length // RATIO < theirs.entry_count["indexer"]
    # In training mode with gradients, so that the pass is one of ours, on a cache that is filled.
    actual = model(tokens(length=6, seed=2), **{CACHE: outputs[CACHE]}).logits
    torch.testing.assert_close(actual, expected)
    for layer in CSA_LAYERS:
        ours, theirs = outputs[CACHE].layers[layer], expected_cache.layers[layer]
        for name in ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate"):
            assert torch.equal(getattr(ours, name)["indexer"], getattr(theirs, name)["indexer"]), name


def test_no_matrix_of_queries_by_entries_is_handed_over(model, monkeypatch):
    """The op is stubbed, as on a GPU, where it works in slabs: nothing around it is as large as ``[B, S, P]``."""

    class LargestFloat(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.is_floating_point():
                self.numel = max(self.numel, result.numel())
            return result

    def stub(q, k, weights, *, entry_stop, topk, ratio):
        empty = q.new_zeros(*q.shape[:2], topk)
        return empty, empty.int()

    monkeypatch.setattr(fused_indexer, "indexer_topk", stub)
    indexer, length = indexers_of(model)[0], 1600
    hidden, residual = torch.randn(1, length, 64), torch.randn(1, length, 32)
    with LargestFloat() as largest:
        fused_indexer.select(indexer, hidden, residual, torch.arange(length).unsqueeze(0), None, 0)
    assert 0 < largest.numel < length * (length // RATIO)


def test_bad_fused_indexer(model):
    with pytest.raises(TypeError, match="fused_indexer must be a bool, got str"):
        enable_indexer_distillation(model, fused_indexer="yes")


def test_the_fused_road_learns_in_bfloat16():
    model = small_model((CSA,)).bfloat16()
    handle = enable_indexer_distillation(model)
    model(tokens(), labels=tokens()).loss.backward()
    assert handle.loss.isfinite() and handle.loss > 0
    assert all(p.grad.isfinite().all() and p.grad.any() for p in indexer_parameters(model).values())
