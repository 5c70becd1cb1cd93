"""Averaging what the indexers' layers measured over micro-batches and ranks, without waiting for the device."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed
from torch import Tensor

from .report import DistillReport

KL = "kl"
Layer = str | int


class DistillLossTracker:
    """Means of the distillation loss, and of other metrics, of every layer that has an indexer.

    In every training step, on every rank::

        tracker.record(layer, kl, training=module.training)  # in each layer with an indexer, each micro-batch
        tracker.step(skipped)                                # after the optimizer
        tracker.report(step_number)                          # now and then

    What counts:

    - A layer's first run in a forward pass. What is recorded while a backward pass runs comes from activation
      checkpointing, of either kind, that runs the layer again, and is ignored.
    - Training. With ``training=False`` nothing is recorded. Gradient mode is not asked, because reentrant checkpointing
      switches gradients off in training too.
    - Finished steps. ``step(skipped=True)``, after an overflow for example, drops what the step recorded; what is
      recorded after the last ``step()`` waits for the next report.

    Nothing is read back to the host before ``report``. In a graph of ``torch.compile``, ``record`` is traced, but do
    not combine it with checkpointing inside that graph: record what the graph returns.

    Args:
        layers: the layers of *this rank* that have an indexer: names, or numbers from 1, counted in the whole model.
            Empty on a rank without any. Replicas of a layer on several ranks (data, tensor or context parallel) give
            the same name there and are averaged.
        device: where values are accumulated and reduced; that of the recorded tensors and of the group's backend.
        metrics: names that ``record`` takes beside ``"kl"``; the same on every rank.
        group: process group to average over; None is the world, or this process alone where ``torch.distributed`` is
            not initialised. Making a tracker is a collective of the group: the ranks exchange their layers, so that
            reports have the same shape everywhere, and all raise where one was given something wrong.
        writers: called with each report, usually on one rank only; see ``indexer_ops.training.writers``.

    Raises:
        TypeError: a layer is neither a string nor an integer, or ``layers`` or ``metrics`` is a bare string.
        ValueError: a layer has no number or name (None, 0, an empty string), is there twice, no rank has a layer, or
            ``metrics`` differs between ranks, names one twice, or contains ``"kl"``.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        *,
        device: torch.device | str,
        metrics: Sequence[str] = (),
        group: "torch.distributed.ProcessGroup | None" = None,
        writers: Sequence[Callable[[DistillReport], None]] = (),
    ) -> None:
        # A bare string is refused below, on every rank and not on this one alone.
        own = tuple(given if isinstance(given, str) else tuple(given) for given in (layers, metrics))
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._group = group
        self._ranks = torch.distributed.get_world_size(group) if is_distributed else 1
        everyone: list = [own]
        if self._ranks > 1:
            everyone = [None] * self._ranks
            torch.distributed.all_gather_object(everyone, own, group=group)
        # From here to the end every rank sees the same, so an error is raised on all or none.
        self._layers = _agreed_layers([theirs for theirs, _ in everyone])
        self._metrics = _agreed_metrics([theirs for _, theirs in everyone])
        self._slots = {layer: slot for slot, layer in enumerate(self._layers) if layer in own[0]}
        self._writers = tuple(writers)
        # [sum or count, metric, layer]
        shape = (2, len(self._metrics), len(self._layers))
        self._this_step = torch.zeros(shape, dtype=torch.float32, device=device)
        self._finished = torch.zeros_like(self._this_step)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of all ranks: numbers in order, names as the ranks gave them."""
        return self._layers

    def record(
        self,
        layer: Layer,
        kl: Tensor | float,
        metrics: Mapping[str, Tensor | float] | None = None,
        *,
        training: bool = True,
    ) -> None:
        """Add what one micro-batch measured in one layer.

        Args:
            layer: one of this rank's, as registered.
            kl: the layer's mean divergence without its coefficient: one element on the tracker's kind of device, any
                floating-point dtype, or a number. Its graph is not kept.
            metrics: values of the registered names, any of them.
            training: ``module.training`` of the layer; False records nothing.

        Raises:
            ValueError: the layer or a metric is not registered, or a tensor has not one element or is on another kind
                of device, which would make the host wait.
        """
        if layer not in self._slots:
            raise ValueError(f"layer must be one registered on this rank, {list(self._slots)}, got {layer!r}")
        values = {KL: kl, **(metrics or {})}
        for name, value in values.items():
            if name not in self._metrics:
                raise ValueError(f"metrics must be among those registered, {list(self._metrics[1:])}, got {name!r}")
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"{name} must have one element, got shape {list(value.shape)}")
            if isinstance(value, Tensor) and value.device.type != self._this_step.device.type:
                raise ValueError(f"{name} must be on {self._this_step.device.type}, got a tensor on {value.device}")
        if not training or _in_backward():
            return
        slot = self._slots[layer]
        for name, value in values.items():
            if isinstance(value, Tensor):
                value = value.detach().to(self._this_step).reshape(())
            self._this_step[0, self._metrics.index(name), slot] += value
            self._this_step[1, self._metrics.index(name), slot] += 1

    def step(self, skipped: bool | Tensor = False) -> None:
        """End a training step: what it recorded counts in the next report.

        Args:
            skipped: whether the optimizer skipped the step, which is dropped then. A tensor of one element (a gradient
                scaler's ``found_inf``) is not read back to the host.

        Raises:
            ValueError: a tensor has not one element.
        """
        if isinstance(skipped, Tensor):
            if skipped.numel() != 1:
                raise ValueError(f"skipped must have one element, got shape {list(skipped.shape)}")
            skipped = skipped.to(self._this_step.device).reshape(()).bool()
            # Selected, not multiplied: what a skipped step recorded may be NaN.
            self._finished += torch.where(skipped, 0.0, self._this_step)
        elif not skipped:
            self._finished += self._this_step
        self._this_step.zero_()

    def report(self, step: int) -> DistillReport:
        """Average over ranks and finished steps, start over, and call the writers.

        Every rank of the group calls this, one without an indexer too: exactly one ``all_reduce``, of two numbers per
        layer and metric. The host waits for the device here.

        Args:
            step: the number to report under.

        Returns:
            The same on every rank. What nobody recorded since the last report is absent; before anything was recorded
            the report is empty.
        """
        totals = self._finished.clone()
        self._finished.zero_()
        if self._ranks > 1:
            torch.distributed.all_reduce(totals, group=self._group)
        sums, counts = totals.double().tolist()
        per_layer: dict[Layer, dict[str, float]] = {}
        mean: dict[str, float] = {}
        for metric, layer_sums, layer_counts in zip(self._metrics, sums, counts, strict=True):
            slots = zip(self._layers, layer_sums, layer_counts, strict=True)
            means = {layer: total / count for layer, total, count in slots if count > 0}
            if means:
                mean[metric] = sum(means.values()) / len(means)
            for layer, value in means.items():
                per_layer.setdefault(layer, {})[metric] = value
        report = DistillReport(step=step, per_layer=per_layer, mean=mean)
        for write in self._writers:
            write(report)
        return report


def _in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread; ``torch.utils.checkpoint`` asks the same way."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _agreed_layers(layers_of_ranks: Sequence[tuple[Layer, ...]]) -> tuple[Layer, ...]:
    for rank, layers in enumerate(layers_of_ranks):
        if isinstance(layers, str):
            raise TypeError(f"layers must be a list of names or numbers, got the string {layers!r} on rank {rank}")
        for layer in layers:
            if layer is None or layer == "" or (isinstance(layer, int) and layer < 1):
                raise ValueError(f"layers must have names, or numbers from 1, got {layer!r} on rank {rank}")
            if isinstance(layer, bool) or not isinstance(layer, (str, int)):
                raise TypeError(f"layers must be strings or integers, got {type(layer).__name__} on rank {rank}")
        if len(set(layers)) != len(layers):
            raise ValueError(f"layers must differ from one another, got {list(layers)} on rank {rank}")
    union = list(dict.fromkeys(layer for layers in layers_of_ranks for layer in layers))
    if not union:
        raise ValueError("layers must hold at least one layer on some rank, got none on any")
    numbers = sorted(layer for layer in union if isinstance(layer, int))
    return (*numbers, *(layer for layer in union if isinstance(layer, str)))


def _agreed_metrics(metrics_of_ranks: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    if any(isinstance(metrics, str) for metrics in metrics_of_ranks):
        raise TypeError(f"metrics must be a list of names, got {metrics_of_ranks}")
    names = (KL, *metrics_of_ranks[0])
    if any(metrics != metrics_of_ranks[0] for metrics in metrics_of_ranks):
        raise ValueError(f"metrics must be the same on every rank, got {metrics_of_ranks}")
    if len(set(names)) != len(names):
        raise ValueError(f"metrics must be names that differ from one another and from {KL!r}, got {names[1:]}")
    return names
