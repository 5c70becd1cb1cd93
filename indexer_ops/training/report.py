"""What a tracker reports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DistillReport:
    """Means over micro-batches and ranks since the last report; the same on every rank.

    What nobody recorded is absent: before anything was recorded, ``per_layer`` and ``mean`` are empty.
    """

    step: int
    per_layer: dict[str | int, dict[str, float]]
    """By layer and metric; ``"kl"`` is the divergence without its coefficient, in nats."""
    mean: dict[str, float]
    """By metric, the mean over the layers in ``per_layer`` that have it: each layer counts once."""

    def scalars(self) -> dict[str, float]:
        """Flat names for a log: ``indexer_kl`` is the mean, ``indexer_kl/layer_3`` or ``indexer_kl/NAME`` a layer's."""
        scalars = {f"indexer_{metric}": value for metric, value in self.mean.items()}
        for layer, metrics in self.per_layer.items():
            label = f"layer_{layer}" if isinstance(layer, int) else layer
            scalars |= {f"indexer_{metric}/{label}": value for metric, value in metrics.items()}
        return scalars
