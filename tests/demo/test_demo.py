"""The demo from end to end, at two steps, and what its runs stand on."""

import argparse
import copy
import json
import struct
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers.models.deepseek_v4")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")
import small_deepseek_v4 as small  # noqa: E402
from indexer_ops import cli  # noqa: E402
from indexer_ops.demo import evaluation, measure, training  # noqa: E402

STEPS = 2


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The directory that a two-step demo wrote to, which it made itself."""
    out = tmp_path_factory.mktemp("demo") / "made" / "by it"
    text = str(Path(argparse.__file__))
    assert cli.main(["demo", "--steps", str(STEPS), "--device", "cpu", "--text", text, "--out", str(out)]) == 0
    return out


def test_json_holds_every_number(demo):
    numbers = json.loads((demo / "demo.json").read_text())
    assert set(numbers) == {"settings", "lm_loss", "layers", "curves"}
    assert numbers["settings"]["steps"] == STEPS
    assert numbers["settings"]["backend"].startswith("the eager composite on cpu")
    assert numbers["settings"]["held_out_sequences"] >= 16
    assert [line["layer"] for line in numbers["layers"]] == [0, 1, 2]
    topk, length = numbers["settings"]["topk"], numbers["settings"]["sequence_length"]
    counts = [count for count in ((t + 1) // 4 for t in range(length)) if count > topk]
    for line in numbers["layers"]:
        assert line["chance"] == pytest.approx(sum(topk / count for count in counts) / len(counts))
        for run in ("with_loss", "without_loss"):
            assert 0 < line[f"recall_{run}"] < 1
            assert line[f"kl_{run}"] > 0
        assert 0 < line["captured_with_loss"] < line["captured_best"] < 1
        assert 0 < line["captured_without_loss"] < line["captured_best_without_loss"] < 1


def test_both_runs_start_alike_and_only_one_has_the_loss(demo):
    curves = json.loads((demo / "demo.json").read_text())["curves"]
    taught, untaught = curves["with_loss"], curves["without_loss"]
    assert [point["step"] for point in taught["held_out"]] == list(range(STEPS + 1))
    assert taught["held_out"][0] == untaught["held_out"][0]
    # The distillation loss is taken off again: a difference in rounding is left.
    assert taught["training"]["lm_loss"][0] == pytest.approx(untaught["training"]["lm_loss"][0], abs=1e-5)
    assert [(line["layer"], len(line["kl"])) for line in taught["training"]["kl"]] == [(i, STEPS) for i in range(3)]
    assert untaught["training"]["kl"] == []


def test_png_is_a_picture_of_readable_size(demo):
    content = (demo / "demo.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1200 and height >= 400


@pytest.fixture
def model_that_selects_everything():
    """With every visible entry selected, no selection stands between the indexer and the model."""
    model = small.small_model()
    model.config.index_topk = small.LENGTH // small.RATIO
    for layer in small.CSA_LAYERS:
        model.model.layers[layer].self_attn.compressor.indexer.index_topk = model.config.index_topk
    return model


def test_observed_attention_is_the_model_s_own(model_that_selects_everything):
    model = model_that_selects_everything.eval()
    input_ids = small.tokens()
    views, lm_loss = evaluation.observe(model, input_ids)
    outputs = model(input_ids=input_ids, labels=input_ids, use_cache=False, output_attentions=True)
    assert lm_loss == pytest.approx(outputs.loss.item())
    assert tuple(views) == small.CSA_LAYERS
    visible = measure.visible_entries(small.LENGTH, small.LENGTH // small.RATIO, small.RATIO)
    for layer, view in views.items():
        attention = measure.joint_attention(
            view.query, view.window_kv, view.pool, view.sink, visible, view.scale, view.window
        )
        expected = outputs.attentions[layer][..., small.LENGTH :].sum(1)
        torch.testing.assert_close(attention, expected, rtol=1e-4, atol=1e-6)


def test_observing_leaves_the_model_as_it_was(model_that_selects_everything):
    model = model_that_selects_everything
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    configs = [layer.self_attn.config for layer in model.model.layers]
    evaluation.evaluate(model, small.tokens())
    assert model.training
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert all(layer.self_attn.config is config for layer, config in zip(model.model.layers, configs, strict=True))


def test_the_loss_moves_the_indexer_and_nothing_else(model_that_selects_everything):
    initial = model_that_selects_everything
    steps, held_out = 3, small.tokens(seed=9)
    models = {}
    for coeff in (1.0, None):
        models[coeff] = copy.deepcopy(initial)
        batches = [small.tokens(seed=step) for step in range(steps)]
        training.train(models[coeff], batches, steps, held_out, coeff, on_step=lambda run: None)
    parameters = zip(initial.named_parameters(), models[1.0].parameters(), models[None].parameters(), strict=True)
    for (name, start), taught, untaught in parameters:
        if ".indexer." in name:
            assert torch.equal(untaught, start), name
            assert not torch.equal(taught, start), name
        else:
            assert torch.equal(taught, untaught), name
            assert not torch.equal(taught, start), name


def test_trainer_logs_the_kl_of_each_layer(tmp_path, capsys):
    pytest.importorskip("accelerate")
    text = str(Path(argparse.__file__))
    arguments = ["demo", "--trainer", "--steps", "2", "--device", "cpu", "--text", text, "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    numbers = json.loads((tmp_path / "demo_trainer.json").read_text())
    logged = [entry for entry in numbers["log"] if "indexer_kl" in entry]
    assert [entry["step"] for entry in logged] == [1, 2]
    for entry in logged:
        layers = [entry[f"indexer_kl/layers.{layer}"] for layer in range(3)]
        assert entry["indexer_kl"] == pytest.approx(sum(layers) / 3) and min(layers) > 0
    assert [line["layer"] for line in numbers["layers"]] == [0, 1, 2]
    assert "KL of each CSA layer" in capsys.readouterr().out
