"""The loss inside a small DeepSeek-V4 of transformers, against the attention probabilities that the model returns."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from indexer_ops.integrations.transformers import enable_indexer_distillation
from small_deepseek_v4 import (
    CHECKPOINTING,
    CSA_LAYERS,
    LENGTH,
    RATIO,
    assert_bitwise_equal,
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


# --- Oracle: the probabilities that transformers' own attention returns -------------------------------------------


def oracle_losses(model, rows, **inputs):
    """KL of each CSA layer, with a graph, of an untouched copy of ``model``; ``rows`` are those of real tokens."""
    model = copy.deepcopy(model)
    seen = {layer: {} for layer in CSA_LAYERS}
    for layer in CSA_LAYERS:
        indexer = model.model.layers[layer].self_attn.compressor.indexer
        indexer.scorer.register_forward_hook(lambda _, args, scores, at=seen[layer]: at.update(scores=scores))
        indexer.register_forward_hook(lambda _, args, selected, at=seen[layer]: at.update(selected=selected))
    attentions = model(**inputs, output_attentions=True).attentions
    losses = {}
    for layer, at in seen.items():
        valid = at["selected"] >= 0
        slots = at["selected"].clamp(min=0)
        entries = at["scores"].shape[-1]
        attention = attentions[layer][..., -entries:].detach().double().sum(1)
        target = attention.gather(-1, slots) * valid
        counted = rows & valid.any(-1)
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-300)
        student = at["scores"].double().gather(-1, slots).masked_fill(~valid, -math.inf)
        student = student.masked_fill(~counted.unsqueeze(-1), 0.0).softmax(-1)
        kl = (target * ((target + 1e-10).log() - (student + 1e-10).log()))[counted & rows].sum(-1)
        losses[layer] = kl.mean()
    return losses, indexer_parameters(model)


@pytest.mark.parametrize(
    "name",
    ["unmasked", "right_padding", "left_padding", "left_padding_with_positions", "packed", "prepared_mask"],
)
def test_value_and_gradient_against_the_attention_that_the_model_computes(model, name):
    case = masked_case(name)
    expected, expected_parameters = oracle_losses(model, case.rows, **case.inputs)
    handle = enable_indexer_distillation(model, coeff=0.5)
    model(**case.inputs)
    assert set(handle.per_layer) == set(expected)
    for layer, loss in expected.items():
        torch.testing.assert_close(handle.per_layer[layer].double(), loss.detach(), rtol=1e-5, atol=1e-7)
        assert handle.per_layer[layer].dtype == torch.float32 and not handle.per_layer[layer].requires_grad
    mean = 0.5 * sum(expected.values()) / len(expected)
    torch.testing.assert_close(handle.loss.double(), mean, rtol=1e-5, atol=1e-7)
    # torch.autograd.grad needs a real graph, which the side channel has.
    actual = torch.autograd.grad(handle.loss, list(indexer_parameters(model).values()))
    wanted = torch.autograd.grad(mean, list(expected_parameters.values()))
    for gradient, reference, parameter in zip(actual, wanted, expected_parameters, strict=True):
        assert reference.abs().max() > 0, parameter
        torch.testing.assert_close(gradient, reference, rtol=1e-3, atol=1e-5 * reference.abs().max().item())


@pytest.mark.parametrize("perturbed", ["self_attn.sinks", "self_attn.kv_proj.weight"])
def test_the_target_moves_with_sink_and_window_keys(model, perturbed):
    handle = enable_indexer_distillation(model)
    model(tokens())
    before = handle.per_layer[0]
    with torch.no_grad():
        model.get_parameter(f"model.layers.0.{perturbed}")[0] += 3.0
    model(tokens())
    assert (handle.per_layer[0] - before).abs() > 1e-4


# --- What the model's own results see of it -----------------------------------------------------------------------


@CHECKPOINTING
def test_only_the_indexers_gradients_change(model, use_reentrant):
    ids = tokens()
    plain = model(ids, labels=ids)
    plain.loss.backward()
    without = gradients(model)
    indexers = indexer_parameters(model)
    assert len(indexers) == 12 and all(without[name] is None for name in indexers)  # why this package exists
    model.zero_grad()

    checkpoint_layers(model, use_reentrant)
    handle = enable_indexer_distillation(model, coeff=0.5)
    outputs = model(ids, labels=ids)
    assert torch.equal(outputs.logits, plain.logits)
    mean = sum(handle.per_layer.values()) / len(CSA_LAYERS)
    torch.testing.assert_close(outputs.loss, plain.loss + 0.5 * mean, rtol=1e-6, atol=0)
    outputs.loss.backward()
    with_loss = gradients(model)
    for name in indexers:
        assert with_loss.pop(name).abs().max() > 0, name
        del without[name]
    assert_bitwise_equal(with_loss, without)


@pytest.mark.parametrize("which_layers", ["all_layers", "first_layer"])
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_checkpointing_counts_nothing_twice(model, use_reentrant, which_layers):
    batches = [
        {"input_ids": tokens(seed=seed), "labels": tokens(seed=seed), "attention_mask": mask}
        for seed, mask in ((1, masked_case("left_padding").rows.long()), (2, masked_case("right_padding").rows.long()))
    ]

    def micro_batches():
        """Both forward passes before either backward pass, with a loss scale: what accumulation and pipelines do."""
        model.zero_grad()
        losses, reports = [], []
        for batch in batches:
            losses.append(model(**batch).loss)
            reports.append(handle.per_layer)
        kept = handle.loss, handle.per_layer
        (losses[0] / 2 * 1024).backward()
        (losses[1] / 2 * 1024).backward()
        assert handle.loss is kept[0] and handle.per_layer == kept[1]
        return torch.stack(losses), reports, gradients(model)

    handle = enable_indexer_distillation(model, coeff=0.5)
    losses, reports, expected = micro_batches()
    checkpoint_layers(model, use_reentrant)
    if which_layers == "first_layer":
        model.model.layers[2].gradient_checkpointing = False
    recomputed_losses, recomputed_reports, recomputed = micro_batches()
    assert torch.equal(losses, recomputed_losses) and reports == recomputed_reports
    assert_bitwise_equal(recomputed, expected)


@CHECKPOINTING
def test_without_labels_the_loss_is_on_the_handle(model, use_reentrant):
    ids = tokens()
    handle = enable_indexer_distillation(model, coeff=0.5)
    model(ids, labels=ids).loss.backward()
    expected = gradients(model)
    indexers = indexer_parameters(model)

    checkpoint_layers(model, use_reentrant)
    model.zero_grad()
    outputs = model(ids)
    assert outputs.loss is None
    own_loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (own_loss + handle.loss).backward()
    for name in indexers:
        torch.testing.assert_close(model.get_parameter(name).grad, expected[name], rtol=0, atol=0)

    model.zero_grad()
    model(ids)
    handle.loss.backward()  # alone: nothing else learns
    for name, parameter in model.named_parameters():
        if name in indexers:
            assert torch.equal(parameter.grad, expected[name]), name
        else:
            assert parameter.grad is None or not parameter.grad.any(), name

    for left_out in (
        lambda: model(ids).logits.sum(),
        lambda: model(ids, output_hidden_states=True).hidden_states[1].sum(),
    ):
        model.zero_grad()
        left_out().backward()
        assert all(p.grad is None or not p.grad.any() for p in indexers.values())


def test_frozen_model_under_reentrant_checkpointing_raises(model):
    checkpoint_layers(model, True)
    model.requires_grad_(False)
    for parameter in indexer_parameters(model).values():
        parameter.requires_grad_(True)
    if hasattr(model, "disable_input_require_grads"):
        model.disable_input_require_grads()
    handle = enable_indexer_distillation(model)
    with pytest.raises(ValueError, match="enable_input_require_grads"):
        model(tokens())
    model.enable_input_require_grads()
    model(tokens())
    handle.loss.backward()
    assert all(p.grad.abs().max() > 0 for p in indexer_parameters(model).values())


def test_base_model_and_tuple_outputs(model):
    ids = tokens()
    handle = enable_indexer_distillation(model, coeff=0.5)
    loss = model(ids, labels=ids).loss
    as_tuple = model(ids, labels=ids, return_dict=False)
    assert torch.equal(as_tuple[0], loss)
    assert torch.equal(model(ids, return_dict=False)[0], as_tuple[1])
    expected = handle.loss
    handle.disable()

    base_handle = enable_indexer_distillation(model.model, coeff=0.5)
    hidden_states = model.model(ids).last_hidden_state
    assert hidden_states.shape == (2, LENGTH, 64)
    assert torch.equal(base_handle.loss, expected)
    base_handle.loss.backward()
    assert all(p.grad.abs().max() > 0 for p in indexer_parameters(model).values())


def test_padding_is_as_if_it_were_not_there(model):
    handle = enable_indexer_distillation(model)
    results = []
    for padding, token in ((0, 0), (13, 5), (13, 7)):
        model.zero_grad()
        ids = F.pad(tokens(batch=1, length=27), (0, padding), value=token)
        mask = (torch.arange(27 + padding) < 27).long().unsqueeze(0)
        model(ids, attention_mask=mask)
        handle.loss.backward()
        results.append((handle.loss, torch.cat([p.grad.flatten() for p in indexer_parameters(model).values()])))
    for loss, gradient in results[1:]:
        torch.testing.assert_close(loss, results[0][0], rtol=1e-5, atol=0)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-4, atol=1e-6)


def test_a_sequence_too_short_for_a_pool_entry(model):
    handle = enable_indexer_distillation(model)
    ids = tokens(length=RATIO - 1)
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    assert handle.loss == 0 and all(value == 0 for value in handle.per_layer.values())
    assert all(p.grad is None or not p.grad.any() for p in indexer_parameters(model).values())


def test_the_indexer_learns(model):
    handle = enable_indexer_distillation(model, coeff=1.0)
    optimizer = torch.optim.Adam(indexer_parameters(model).values(), lr=3e-3)
    history = []
    for _ in range(12):
        optimizer.zero_grad()
        model(tokens())
        handle.loss.backward()
        optimizer.step()
        history.append(handle.loss.item())
    assert history[-1] < 0.6 * history[0], history
