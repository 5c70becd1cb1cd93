"""The picture of the two runs."""

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .training import Run

# One colour a layer, one line style a run; told apart by brightness too.
LAYER_COLOURS = ("#0b3c5d", "#2a9d8f", "#e9a23b", "#c8553d", "#7b5ea7")
WITH_COLOUR, WITHOUT_COLOUR, GREY = "#0b3c5d", "#c8553d", "#777777"
# A training batch is two sequences: its curves are averages over this part of the steps.
SMOOTHED_FRACTION = 0.05


def draw(with_loss: Run, without_loss: Run, topk: int, path: Path) -> None:
    """Write LM loss, KL and recall over the steps to ``path``, a PNG."""
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    figure.suptitle(
        "Only with the distillation loss does the lightning indexer learn which entries attention wants", fontsize=14
    )
    language, divergence, found = figure.subplots(1, 3)
    _draw_language(language, with_loss, without_loss)
    _draw_divergence(divergence, with_loss)
    _draw_recall(found, with_loss, without_loss, topk)
    for axes in (language, divergence, found):
        axes.set_xlabel("training step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=130)


def _draw_language(axes: Axes, with_loss: Run, without_loss: Run) -> None:
    runs = ((with_loss, "with the loss", "-", WITH_COLOUR, "o"), (without_loss, "without", "--", WITHOUT_COLOUR, "x"))
    for run, label, style, colour, marker in runs:
        axes.plot(*_smoothed(run.lm_loss), style, color=colour, linewidth=1.2, label=f"{label}, training")
        steps = sorted(run.evaluations)
        held_out = [run.evaluations[step].lm_loss for step in steps]
        axes.plot(steps, held_out, marker, color=colour, markersize=7, label=f"{label}, held out")
    axes.set(title="The model learns the same", ylabel="LM loss [nats per byte]")
    axes.legend()


def _draw_divergence(axes: Axes, with_loss: Run) -> None:
    for (layer, kl), colour in zip(with_loss.kl.items(), _colours(with_loss), strict=True):
        axes.plot(*_smoothed(kl), color=colour, label=f"layer {layer}")
    axes.set(title="The indexers approach attention", ylabel="KL(attention || indexer) [nats]")
    axes.set_ylim(bottom=0)
    axes.legend(title="with the loss, training")


def _draw_recall(axes: Axes, with_loss: Run, without_loss: Run, topk: int) -> None:
    for layer, colour in zip(with_loss.last.layers, _colours(with_loss), strict=True):
        for run, style, marker in ((with_loss, "-", "o"), (without_loss, "--", "x")):
            steps = sorted(run.evaluations)
            axes.plot(
                steps,
                [run.evaluations[step].layers[layer].recall for step in steps],
                style,
                color=colour,
                marker=marker,
            )
    # All layers see the same number of entries, so one line stands for the chance of each.
    chance = next(iter(with_loss.last.layers.values())).chance
    axes.axhline(chance, color=GREY, linestyle=":")
    axes.set(
        title=f"They select the right {topk} entries", ylabel=f"recall@{topk} against the oracle, held out", ylim=(0, 1)
    )
    key = [
        Line2D([], [], color=colour, label=f"layer {layer}")
        for layer, colour in zip(with_loss.last.layers, _colours(with_loss), strict=True)
    ]
    key += [
        Line2D([], [], color=GREY, linestyle="-", marker="o", label="with the loss"),
        Line2D([], [], color=GREY, linestyle="--", marker="x", label="without"),
        Line2D([], [], color=GREY, linestyle=":", label=f"chance, {chance:.2f}"),
    ]
    axes.legend(handles=key, ncols=2, loc="upper left")


def _colours(run: Run) -> list[str]:
    return [LAYER_COLOURS[i % len(LAYER_COLOURS)] for i in range(len(run.last.layers))]


def _smoothed(values: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps, and the mean of the values up to each, over SMOOTHED_FRACTION of all or as many as there are."""
    width = max(1, round(SMOOTHED_FRACTION * len(values)))
    step = torch.arange(1, len(values) + 1)
    total = torch.tensor([0.0, *values], dtype=torch.float64).cumsum(0)
    start = (step - width).clamp(min=0)
    return step, (total[step] - total[start]) / (step - start)
