"""The distillation loss inside Hugging Face ``transformers``' DeepSeek-V4 models.

``transformers``' lightning indexer returns integers, so none of its parameters ever receives a gradient. Here every
compressed-sparse-attention (CSA) layer gets ``KL(attention || indexer)`` over the entries that its own indexer
selected. Hooks and a registered attention function see what a layer computes (``layer_tap``), its indexer scores and
selects through ``indexer_ops.indexer_topk`` (``fused_indexer``), and the losses of one forward pass are collected
(``training_pass``) and added to the model's (``handle``). No class of ``transformers`` is changed.
"""

from .handle import IndexerDistillation, enable_indexer_distillation

__all__ = ["IndexerDistillation", "enable_indexer_distillation"]
