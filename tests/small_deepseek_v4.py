"""A small DeepSeek-V4 of transformers, token batches with every kind of mask, and what tests compare of it."""

import inspect
from dataclasses import dataclass

import pytest
import torch

deepseek_v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM  # noqa: E402

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
CSA_LAYERS = (0, 2)
VOCABULARY, RATIO, TOPK, LENGTH = 61, 4, 4, 40
# transformers renamed the argument and the field in which a model takes and returns its cache.
CACHE = "cache" if "cache" in inspect.signature(deepseek_v4.DeepseekV4Model.forward).parameters else "past_key_values"
# How a training pass runs its layers: each way has to give the same loss and gradients.
CHECKPOINTING = pytest.mark.parametrize(
    "use_reentrant", [None, False, True], ids=["plain", "non_reentrant", "reentrant"]
)


def small_model(layer_types=(CSA, HCA, CSA), model_class=DeepseekV4ForCausalLM):
    torch.manual_seed(0)
    config = DeepseekV4Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        mlp_layer_types=["moe"] * len(layer_types),
        compress_rates={CSA: RATIO, HCA: 16},
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        partial_rotary_factor=0.5,
        max_position_embeddings=256,
        hc_mult=2,
        hc_sinkhorn_iters=2,
        sliding_window=8,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=TOPK,
        initializer_range=0.3,
    )
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "position_bias")):  # zeros otherwise, and then no test would miss them
                parameter.normal_()
    return model.train()


def tokens(batch=2, length=LENGTH, seed=1):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def checkpoint_layers(model, use_reentrant):
    if use_reentrant is not None:
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": use_reentrant})


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def indexer_parameters(model):
    return {name: p for name, p in model.named_parameters() if ".indexer." in name}


def assert_bitwise_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] is None) == (value is None), name
        assert value is None or torch.equal(actual[name], value), name


@dataclass
class Case:
    inputs: dict
    rows: torch.Tensor


def masked_case(name):
    ids, mask = tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    rows = torch.ones(2, LENGTH, dtype=torch.bool)
    inputs = {"input_ids": ids}
    if name == "packed":
        lengths = (13, 19, 8)
        inputs |= {"position_ids": torch.cat([torch.arange(n) for n in lengths]).expand(2, -1), "use_cache": False}
    elif name != "unmasked":
        if name == "right_padding":
            mask[0, 27:] = 0
        else:
            mask[0, :11] = mask[1, :2] = 0
        rows = mask.bool()
        inputs["attention_mask"] = mask
    if name == "left_padding_with_positions":
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    if name == "prepared_mask":
        key, query = torch.arange(LENGTH), torch.arange(LENGTH).unsqueeze(-1)
        visible = (key <= query) & (key > query - 8) & rows[:, None, None, :]
        inputs["attention_mask"] = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    return Case(inputs, rows)
