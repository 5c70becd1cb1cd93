"""The model of the demo: DeepSeek-V4's architecture, byte level, at a size that two CPU cores train in minutes."""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

LAYERS = 3
# Every row has many more entries to choose from than it keeps: with 512 tokens up to 128, so chance is low.
SEQUENCE_LENGTH = 512
INDEX_TOPK = 12


def small_config() -> DeepseekV4Config:
    """Compressed sparse attention in every layer; hyper-connections and routed experts are there, but small."""
    return DeepseekV4Config(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=LAYERS,
        layer_types=["compressed_sparse_attention"] * LAYERS,
        num_attention_heads=4,
        head_dim=64,
        # The defaults turn a small part of each head, slowly, for a million tokens; these are for 512.
        partial_rotary_factor=0.5,
        compress_rope_theta=1000.0,
        q_lora_rank=64,
        o_groups=2,
        o_lora_rank=64,
        sliding_window=32,
        # With 4, all heads of a layer went dead in one run (no q . k was positive, so nothing learned any more).
        index_n_heads=16,
        index_head_dim=32,
        index_topk=INDEX_TOPK,
        mlp_layer_types=["moe"] * LAYERS,
        moe_intermediate_size=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        max_position_embeddings=SEQUENCE_LENGTH,
        # The default of 0.02 is for a width of thousands; at this one the layers would start almost silent.
        initializer_range=0.06,
        num_nextn_predict_layers=0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )


def small_model(seed: int) -> DeepseekV4ForCausalLM:
    """The model, the same for the same seed, in float32: its memory and time do not ask for less."""
    torch.manual_seed(seed)
    return DeepseekV4ForCausalLM(small_config())
