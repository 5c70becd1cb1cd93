"""``nn.Module``s of one CSA layer: the lightning indexer, and what it learns from.

Symbols as in api.py; besides, ``Hi, Di`` are index heads and their dim, ``ratio`` the tokens that a pool entry
compresses, ``hidden`` and ``q_rank`` the widths of the layer's hidden states and of its low-rank query.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .api import distill_loss, indexer_topk

# Where ``transformers``' DeepseekV4Indexer keeps what LightningIndexer has under other names.
_TRANSFORMERS_NAMES = {
    "q_up_proj.weight": "q_b_proj.weight",
    "value_proj.weight": "kv_proj.weight",
    "gate_proj.weight": "gate_proj.weight",
    "position_bias": "position_bias",
    "key_norm.weight": "kv_norm.weight",
    "weights_proj.weight": "scorer.weights_proj.weight",
}


def pool_overlapping_windows(values: Tensor, gates: Tensor) -> Tensor:
    """One entry a window: the softmax-gated mean of its tokens and those of the window before.

    A token has two values and two gates: the first half of the last dim is for the window after its own, the second for
    its own. Entry n is ``sum_j softmax_j(gate)_j * value_j``, for each channel, over the first halves of window n-1 and
    the second halves of window n; the first window has none before it.

    Args:
        values: ``[B, N, ratio, 2*Di]``.
        gates: ``[B, N, ratio, 2*Di]``, the bias of each position in a window included.

    Returns:
        ``[B, N, Di]`` in the dtype of ``values``; the softmax is taken in float32.

    Source: DeepSeek-V4 (section 2.3.1, eqs. 9 to 12).
    """
    N, Di = values.shape[1], values.shape[3] // 2
    # Shifted by one window: what stands before the first gets a weight of exactly 0.
    values_before = F.pad(values[..., :Di], (0, 0, 0, 0, 1, 0))[:, :N]
    gates_before = F.pad(gates[..., :Di], (0, 0, 0, 0, 1, 0), value=float("-inf"))[:, :N]
    values = torch.cat([values_before, values[..., Di:]], 2)
    shares = torch.cat([gates_before, gates[..., Di:]], 2).softmax(2, dtype=torch.float32)
    return (values * shares.to(values.dtype)).sum(2)


def _rotate_trailing_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last ``2*R`` channels of ``x``, neighbours as pairs; ``cos`` and ``sin`` are ``[..., R]``."""
    kept, turned = x.split([x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], -1)
    first, second = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.float(), sin.float()
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    return torch.cat([kept, turned.to(x.dtype)], -1)


def _hadamard_matrix(size: int) -> Tensor:
    """Orthonormal, symmetric; ``size`` is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


class _KeyNorm(nn.RMSNorm):
    """RMSNorm in float32, whatever comes in, with one rounding at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class LightningIndexer(nn.Module):
    """DeepSeek-V4's lightning indexer: which pool entries each query of a CSA layer attends to, differentiably.

    Queries are projected up from the layer's low-rank query; keys come from a compressor of the indexer's own, one for
    ``ratio`` tokens, pooled over overlapping windows and normalised. Both carry rotary position in their last
    ``rope_dim`` channels, a query at its own position and key p at ``p * ratio``. Head weights are a projection of the
    hidden states times ``Hi**-0.5 * Di**-0.5``. Scores and selection are ``indexer_ops.indexer_topk``.

    Args:
        hidden_size: width of the hidden states.
        q_rank: width of the low-rank query.
        num_heads, head_dim: ``Hi`` and ``Di``.
        topk: entries to select for a query.
        ratio: tokens that a pool entry compresses, 1 or more.
        inverse_frequencies: of the rotary embedding, float32 ``[rope_dim / 2]``, one a pair of channels.
        rope_scaling: factor on its cosines and sines, 1 but for YaRN.
        norm_eps: of the keys' RMSNorm.
        hadamard: rotate q and k by an orthonormal Hadamard matrix. Scores stay the same up to rounding; outliers among
            channels spread out, which is what quantised keys need.
        backend: see api.py.

    Raises:
        ValueError: a size is not positive, the rotary dim is larger than ``head_dim``, or ``hadamard`` with a
            ``head_dim`` that is not a power of two.

    Source: DeepSeek-V4 (section 2.3.1, eqs. 9 to 17).
    """

    def __init__(
        self,
        hidden_size: int,
        q_rank: int,
        num_heads: int,
        head_dim: int,
        *,
        topk: int,
        ratio: int,
        inverse_frequencies: Tensor,
        rope_scaling: float = 1.0,
        norm_eps: float = 1e-6,
        hadamard: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "q_rank": q_rank, "num_heads": num_heads, "head_dim": head_dim}
        for name, size in (sizes | {"ratio": ratio}).items():
            if size < 1:
                raise ValueError(f"{name} must be 1 or greater, got {size}")
        if topk < 0:
            raise ValueError(f"topk must be 0 or greater, got {topk}")
        if inverse_frequencies.dim() != 1 or 2 * inverse_frequencies.shape[0] > head_dim:
            raise ValueError(
                f"inverse_frequencies must be [rope_dim / 2] with rope_dim at most head_dim = {head_dim}, got "
                f"{list(inverse_frequencies.shape)}"
            )
        if hadamard and head_dim & (head_dim - 1):
            raise ValueError(f"hadamard needs a head_dim that is a power of two, got {head_dim}")
        self.num_heads, self.head_dim, self.topk, self.ratio = num_heads, head_dim, topk, ratio
        self.rope_scaling, self.backend = rope_scaling, backend
        self.q_up_proj = nn.Linear(q_rank, num_heads * head_dim, bias=False)
        self.value_proj = nn.Linear(hidden_size, 2 * head_dim, bias=False)
        self.gate_proj = nn.Linear(hidden_size, 2 * head_dim, bias=False)
        self.position_bias = nn.Parameter(torch.zeros(ratio, 2 * head_dim))
        self.key_norm = _KeyNorm(head_dim, eps=norm_eps)
        self.weights_proj = nn.Linear(hidden_size, num_heads, bias=False)
        self.register_buffer("inverse_frequencies", inverse_frequencies.detach().float().clone(), persistent=False)
        self.register_buffer("hadamard", _hadamard_matrix(head_dim) if hadamard else None, persistent=False)

    @classmethod
    def from_transformers(
        cls, indexer: nn.Module, *, hadamard: bool = False, backend: str = "auto"
    ) -> "LightningIndexer":
        """A copy of a ``DeepseekV4Indexer`` of ``transformers``: sizes, rotary frequencies, weights, dtypes, device.

        Raises:
            NotImplementedError: its rotary frequencies change with the length of the sequence.
        """
        rotary, rope = indexer.rotary_emb, indexer.rope_layer_type
        if rotary.rope_type[rope] in ("dynamic", "longrope"):
            raise NotImplementedError(f"rotary frequencies must not depend on length, got {rotary.rope_type[rope]!r}")
        frequencies = getattr(rotary, f"{rope}_inv_freq")
        copy = cls(
            indexer.kv_proj.in_features,
            indexer.q_b_proj.in_features,
            indexer.num_heads,
            indexer.head_dim,
            topk=indexer.index_topk,
            ratio=indexer.compress_rate,
            inverse_frequencies=frequencies,
            rope_scaling=getattr(rotary, f"{rope}_attention_scaling"),
            norm_eps=indexer.kv_norm.variance_epsilon,
            hadamard=hadamard,
            backend=backend,
        ).to(frequencies.device)
        state = indexer.state_dict()
        for own, other in _TRANSFORMERS_NAMES.items():
            parameter = copy.get_parameter(own)
            parameter.data = parameter.data.to(state[other])
        copy.load_transformers_state_dict(state)
        return copy

    def load_transformers_state_dict(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        """Load the weights of a ``DeepseekV4Indexer``, whose names begin with ``prefix`` in ``state_dict``.

        ``prefix`` is for example ``"model.layers.2.self_attn.compressor.indexer."``; other names are left alone.

        Raises:
            KeyError: a weight is missing.
            RuntimeError: a weight has another shape.
        """
        missing = [prefix + other for other in _TRANSFORMERS_NAMES.values() if prefix + other not in state_dict]
        if missing:
            raise KeyError(f"state_dict has no {', '.join(missing)}")
        self.load_state_dict({own: state_dict[prefix + other] for own, other in _TRANSFORMERS_NAMES.items()})

    def queries(self, q_residual: Tensor, positions: Tensor) -> Tensor:
        """Index queries ``[B, S, Hi, Di]`` of low-rank queries ``[B, S, q_rank]`` at ``positions``, ``[B or 1, S]``."""
        q = self.q_up_proj(q_residual).unflatten(-1, (self.num_heads, self.head_dim))
        return self._rotated(q, positions.unsqueeze(-1))

    def keys(self, hidden_states: Tensor) -> Tensor:
        """Index keys ``[B, T // ratio, Di]`` of whole sequences ``[B, T, hidden]``; a rest of a window gives none."""
        entries = hidden_states.shape[1] // self.ratio
        windows = hidden_states[:, : entries * self.ratio]
        values, gates = (
            projection(windows).view(windows.shape[0], entries, self.ratio, 2 * self.head_dim)
            for projection in (self.value_proj, self.gate_proj)
        )
        keys = self.key_norm(pool_overlapping_windows(values, gates + self.position_bias))
        return self._rotated(keys, torch.arange(entries, device=keys.device).unsqueeze(0) * self.ratio)

    def head_weights(self, hidden_states: Tensor) -> Tensor:
        """Weights of the heads, ``[B, S, Hi]`` float32, ``Hi**-0.5 * Di**-0.5`` included."""
        return self.weights_proj(hidden_states).float() * (self.num_heads * self.head_dim) ** -0.5

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions.unsqueeze(-1).float() * self.inverse_frequencies
        # Rounded to the dtype of x before they meet it, as the models are trained.
        cos, sin = ((part * self.rope_scaling).to(x.dtype) for part in (angles.cos(), angles.sin()))
        x = _rotate_trailing_pairs(x, cos, sin)
        return x if self.hadamard is None else (x.float() @ self.hadamard.float()).to(x.dtype)

    def forward(
        self,
        hidden_states: Tensor,
        q_residual: Tensor,
        positions: Tensor | None = None,
        entry_start: Tensor | None = None,
        entry_stop: Tensor | None = None,
        *,
        keys: Tensor | None = None,
        query_offset: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Scores and indices of the selected entries.

        Args:
            hidden_states: input of the layer, ``[B, S, hidden]``.
            q_residual: its low-rank query after the norm, ``[B, S, q_rank]``.
            positions: of the queries in their sequence, ``[B or 1, S]`` integers; by default they count up from
                ``query_offset``. Entry p is visible iff ``(p+1)*ratio <= position+1``.
            entry_start, entry_stop: ``[B, S]`` bounds of the visible entries; see ``indexer_topk``. ``entry_stop``
                replaces the rule by position.
            keys: index keys ``[B, P, Di]`` of the whole sequence, for queries that are a part of it; else those of
                ``hidden_states``.
            query_offset: position of the first query.

        Returns:
            ``index_scores`` float32 and ``topk_idxs`` int32, ``[B, S, topk]``: best first, ties to the lowest index;
            unused slots are ``-inf`` and ``-1``, at the end.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape, dtype or device.
        """
        B, S, _ = hidden_states.shape
        if positions is None:
            positions = (query_offset + torch.arange(S, device=hidden_states.device)).unsqueeze(0)
        elif entry_stop is None:
            entry_stop = ((positions + 1) // self.ratio).expand(B, S)
        q = self.queries(q_residual, positions)
        keys = self.keys(hidden_states) if keys is None else keys
        return indexer_topk(
            q,
            keys.to(q.dtype),  # autocast may leave them in float32, and the fused op takes one dtype
            self.head_weights(hidden_states),
            entry_start,
            entry_stop,
            topk=self.topk,
            ratio=self.ratio,
            query_offset=query_offset,
            backend=self.backend,
        )


class CompressedAttentionDistillation(nn.Module):
    """A lightning indexer and its loss in one CSA layer: selects, and says what it should have selected.

    Only the indexer learns from the loss, and it learns from nothing else: its inputs are detached, and attention, the
    teacher, receives no gradient.

    Args:
        indexer: a module that returns ``(index_scores, topk_idxs)``, such as ``LightningIndexer``.
        scale: of attention's logits, usually ``D**-0.5``.
        window: raw keys that a query sees, itself included.
    """

    def __init__(self, indexer: nn.Module, *, scale: float, window: int) -> None:
        super().__init__()
        self.indexer, self.scale, self.window = indexer, scale, window

    def forward(self, hidden_states: Tensor, q_residual: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """``(index_scores, topk_idxs)`` of the indexer for detached inputs, which are those of its own ``forward``."""
        inputs = (hidden_states, q_residual, *args)
        detached = (value.detach() if isinstance(value, Tensor) else value for value in inputs)
        kwargs = {name: value.detach() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
        return self.indexer(*detached, **kwargs)

    def loss(
        self,
        index_scores: Tensor,
        topk_idxs: Tensor,
        query: Tensor,
        pool: Tensor,
        window_kv: Tensor,
        sink: Tensor | None = None,
        **options,
    ) -> Tensor:
        """``indexer_ops.distill_loss`` with this layer's ``scale`` and ``window``.

        Args:
            index_scores, topk_idxs: what ``forward`` returned.
            query: ``[B, S, H, D]``.
            pool: ``[B, P, D]``.
            window_kv: ``[B, T, D]``.
            sink: ``[H]``.
            options: ``doc_start``, ``query_offset``, ``eps``, ``reduction``, ``row_weight``, ``divisor``,
                ``head_group``, ``backend``, ``check_inputs`` of ``distill_loss``.

        Returns:
            float32, a scalar but for ``reduction="none"``. Its gradient reaches the indexer's parameters alone.
        """
        return distill_loss(
            index_scores,
            topk_idxs,
            query,
            pool,
            scale=self.scale,
            window_kv=window_kv,
            sink=sink,
            window=self.window,
            **options,
        )
