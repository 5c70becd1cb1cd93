"""Which implementation of the ops the demo trains with."""

import torch
from transformers import DeepseekV4Config

from ..api import distill_loss


def backend_in_use(config: DeepseekV4Config, length: int, device: torch.device) -> str:
    """What ``backend="auto"`` comes to at the demo's shapes on ``device``, in words; found out by a call."""
    if device.type != "cuda":
        return f"the eager composite on {device.type}"
    name = torch.cuda.get_device_name(device)
    query = torch.zeros(1, length, config.num_attention_heads, config.head_dim, device=device)
    pool = query[:, : length // 4, 0]
    topk_idxs = torch.zeros(1, length, config.index_topk, dtype=torch.int64, device=device)
    index_scores = torch.zeros(topk_idxs.shape, device=device, requires_grad=True)
    try:
        loss = distill_loss(
            index_scores,
            topk_idxs,
            query,
            pool,
            scale=config.head_dim**-0.5,
            window_kv=query[:, :, 0],
            window=config.sliding_window,
            backend="triton",
        )
        loss.backward()
    except Exception as error:  # a compiler may fail in any way; "auto" falls back from all of them
        return f"the eager composite on {name} (no fused kernels: {str(error).splitlines()[0]})"
    return f"fused Triton kernels on {name}"
