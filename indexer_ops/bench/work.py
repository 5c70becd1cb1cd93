"""What a rung has to do at least: operations on valid entries, bytes read once and written once.

One multiply-add is two operations and only matrix products count. A backward of the indexer forms the products of the
selected entries again, then two gradients of the same size.
"""

from torch import Tensor

from .inputs import Case
from .ladder import Rung


def window_pairs(S: int, window: int) -> int:
    """Query-key pairs of a causal window over ``S`` tokens."""
    full = max(0, S - window)
    ramp = min(S, window)
    return ramp * (ramp + 1) // 2 + full * window


def visible_pairs(S: int, P: int, ratio: int) -> int:
    """Query-entry pairs with ``(p+1)*ratio <= t+1``."""
    return sum(max(0, S - ((p + 1) * ratio - 1)) for p in range(P))


def selected_pairs(S: int, P: int, K: int, ratio: int) -> int:
    """Slots that the indexer fills: of each query ``min(K, visible)``."""
    return sum(min(K, P, (t + 1) // ratio) for t in range(S))


def floating_point_operations(rung: Rung, case: Case, direction: str) -> int:
    """Of matrix products over valid entries alone."""
    preset = case.preset
    selected = selected_pairs(case.S, case.P, preset.K, preset.ratio)
    forward = backward = 0
    if rung.part != "indexer":
        # The backward of the loss is elementwise. Together, the loss runs on what the indexer selects.
        valid = int((case.topk_idxs >= 0).sum()) if rung.part == "loss" else selected
        pairs = valid + (window_pairs(case.S, preset.window) if rung.needs_window else 0)
        forward += 2 * preset.H * preset.D * pairs
    if rung.part != "loss":
        forward += 2 * preset.Hi * preset.Di * visible_pairs(case.S, case.P, preset.ratio)
        backward += 3 * 2 * preset.Hi * preset.Di * selected
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def bytes_of(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def compulsory_bytes(rung: Rung, case: Case, direction: str) -> int:
    """Inputs read once, outputs written once, caches of any size granted."""
    forward = backward = 0
    kl, selection = case.grad_kl, (case.index_scores, case.topk_idxs)
    if rung.part != "indexer":
        teacher = (case.query, case.pool, *((case.window_kv, case.sink) if rung.needs_window else (case.joint_lse,)))
        forward += bytes_of(*teacher, kl)
    if rung.part == "loss":
        forward += bytes_of(*selection)
        backward += bytes_of(kl, case.index_scores, case.topk_idxs, case.index_scores)
    else:
        indexer = (case.q, case.k, case.weights)
        forward += bytes_of(*indexer) + (bytes_of(*selection) if rung.part == "indexer" else 0)
        # Scores' gradient or the KL's, the operands, the selection; then the gradients of the operands.
        backward += bytes_of(rung.grad_output(case), *indexer, *indexer, case.topk_idxs)
    return {"forward": forward, "backward": backward, "both": forward + backward}[direction]


def extra_bytes_bound(rung: Rung, case: Case) -> int | None:
    """What a fused loss may take beyond inputs, outputs and gradients: ``4 bytes * B*S * (2H + 3K)``."""
    if rung.part != "loss" or not rung.fused:
        return None
    return 4 * case.S * (2 * case.preset.H + 3 * case.preset.K)
