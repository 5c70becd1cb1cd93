"""The picture: the ladder at the shortest length and, with several lengths, growth."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .ladder import PARTS
from .presets import shown_length
from .report import TITLES

# One colour a rung, from what people write today to what is fused; told apart by brightness too.
COLOURS = {
    "eager": "#b9b9b9",
    "compiled": "#7d7d7d",
    "+ three ops": "#e9a23b",
    "+ one pass": "#2a9d8f",
    "+ joint LSE": "#0b3c5d",
    "+ one op": "#2a9d8f",
    "+ fused": "#2a9d8f",
}
STYLES = {"loss": ("-", "o"), "indexer": ("--", "s"), "together": (":", "^")}


def draw(measurements: list[dict], growth: list[dict], description: str, path: Path) -> None:
    """Write the bars of the shortest length, and time and extra memory over several lengths, to ``path``, a PNG."""
    both = [measured for measured in measurements if measured["direction"] == "both"]
    shortest = min(measured["length"] for measured in both)
    parts = [part for part in PARTS if any(measured["part"] == part for measured in both)]
    figure = Figure(figsize=(15, 9.5 if growth else 4.4), layout="constrained")
    figure.suptitle(f"Forward and backward, milliseconds: {description}", fontsize=14)
    upper, lower = figure.subfigures(2, 1, height_ratios=(4, 5)) if growth else (figure, None)
    for axes, part in zip(upper.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        _draw_bars(axes, [m for m in both if m["part"] == part and m["length"] == shortest])
        axes.set_title(f"{TITLES[part]}, {shown_length(shortest)} tokens")
    if lower is not None:
        with_memory = any(measured["extra_bytes"] for measured in both)
        panels = lower.subplots(1, 2 if with_memory else 1, squeeze=False)[0]
        _draw_growth(panels[0], both, growth, "time")
        if with_memory:
            _draw_growth(panels[1], both, growth, "memory")
    figure.savefig(path, dpi=130)


def _draw_bars(axes: Axes, measurements: list[dict]) -> None:
    names = [measured["rung"] for measured in measurements]
    medians = [measured["median_ms"] for measured in measurements]
    spread = [
        [measured["median_ms"] - measured["lower_quartile_ms"] for measured in measurements],
        [measured["upper_quartile_ms"] - measured["median_ms"] for measured in measurements],
    ]
    axes.barh(names, medians, xerr=spread, color=[COLOURS[name] for name in names], height=0.65)
    for row, measured in enumerate(measurements):
        label = f" {measured['median_ms']:.3g} ms"
        if measured["speed_up"] is not None and measured["rung"] != "eager":
            label += f", {measured['speed_up']:.1f}x"
        axes.text(measured["upper_quartile_ms"], row, label, va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(measured["upper_quartile_ms"] for measured in measurements))
    axes.set_xlabel("ms, median and quartiles")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_growth(axes: Axes, measurements: list[dict], growth: list[dict], quantity: str) -> None:
    for line in growth:
        if line[f"{quantity}_exponent"] is None:
            continue
        points = [m for m in measurements if m["part"] == line["part"] and m["rung"] == line["rung"]]
        values = [m["median_ms"] if quantity == "time" else (m["extra_bytes"] or float("nan")) / 2**20 for m in points]
        style, marker = STYLES[line["part"]]
        label = f"{line['part']}, {line['rung'].removeprefix('+ ')}: $S^{{{line[f'{quantity}_exponent']:.2f}}}$"
        lengths = [m["length"] for m in points]
        axes.plot(lengths, values, style, marker=marker, color=COLOURS[line["rung"]], label=label)
    ticks = sorted({measured["length"] for measured in measurements})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [shown_length(S) for S in ticks])
    axes.set_xlabel("tokens S")
    axes.set_ylabel("ms" if quantity == "time" else "MiB")
    axes.set_title("Time" if quantity == "time" else "Peak memory beyond inputs, outputs and gradients")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(title="with fitted exponents", loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
