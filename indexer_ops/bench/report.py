"""The tables on the screen."""

from rich import box
from rich.table import Table

from .ceilings import Ceilings
from .gate import Check
from .ladder import PARTS
from .presets import PRESETS, shown_length

TITLES = {
    "loss": "Distillation loss",
    "indexer": "Lightning indexer, causal",
    "together": "Indexer and loss together, causal",
}


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _milliseconds(value: float) -> str:
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.0995 else f"{share:.0%}"


def _mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.1f}"


def gate_table(checks: list[Check]) -> Table:
    """Each quantity's relative error against float64."""
    table = _table(
        "Correctness gate: relative errors against float64",
        ("length", "part", "rung", "quantity"),
        ("error", "composite's", "bound", ""),
    )
    for check in checks:
        numbers = (check.error, check.composite_error, check.bound)
        verdict = "[green]ok[/]" if check.passed else "[bold red]FAILED[/]"
        names = (shown_length(check.length), check.part, check.rung, check.quantity)
        table.add_row(*names, *(f"{number:.1e}" for number in numbers), verdict)
    return table


def measurement_tables(measurements: list[dict]) -> list[Table]:
    """One per length and part, three lines a rung."""
    tables = []
    for length in sorted({measured["length"] for measured in measurements}):
        for part in PARTS:
            chosen = [m for m in measurements if m["length"] == length and m["part"] == part]
            if chosen:
                tables.append(_measurement_table(f"{TITLES[part]}, {shown_length(length)} tokens", chosen))
    return tables


def _measurement_table(title: str, measurements: list[dict]) -> Table:
    numbers = ("ms", "quartiles", "x eager", "TFLOP/s", "matrix", "copy", "extra MiB", "bound", "timed")
    table = _table(title, ("rung", ""), numbers)
    for measured in measurements:
        first, last = measured["direction"] == "forward", measured["direction"] == "both"
        quartiles = (_milliseconds(measured[f"{name}_quartile_ms"]) for name in ("lower", "upper"))
        table.add_row(
            measured["rung"] if first else "",
            measured["direction"],
            _milliseconds(measured["median_ms"]),
            "-".join(quartiles),
            "" if measured["speed_up"] is None else f"{measured['speed_up']:.2f}",
            f"{measured['tflops']:.3g}" if measured["operations"] else "",
            _percent(measured["share_of_matrix_ceiling"]) if measured["operations"] else "",
            _percent(measured["share_of_copy_bandwidth"]),
            _mebibytes(measured["extra_bytes"]),
            _mebibytes(measured["extra_bytes_bound"]),
            measured["method"],
            end_section=last,
        )
    return table


def legend(ceilings: Ceilings) -> str:
    """What the columns mean, and the ceilings they refer to."""
    return (
        f"Ceilings ({ceilings.description}): {ceilings.matrix_tflops:.4g} TFLOP/s, "
        f"{ceilings.copy_terabytes_per_second:.3g} TB/s read and written. TFLOP/s: matrix products over valid entries. "
        "copy: inputs read and outputs written once, over the measured bandwidth. extra MiB: peak beyond inputs, "
        "outputs and gradients. timed: graph, replayed as a CUDA graph; launched, from Python; both from a flushed L2."
    )


def growth_table(growth: list[dict]) -> Table:
    """Fitted exponents of the tokens."""
    table = _table(
        "Growth, forward and backward: fitted exponents of S", ("part", "rung"), ("lengths", "time", "extra memory")
    )
    for line in growth:
        lengths = ", ".join(map(shown_length, line["lengths"]))
        memory = "" if line["memory_exponent"] is None else f"{line['memory_exponent']:.2f}"
        table.add_row(line["part"], line["rung"], lengths, f"{line['time_exponent']:.2f}", memory)
    return table


def training_step_table(steps: list[dict], preset: str) -> Table:
    """Computed from the measurements."""
    table = _table(
        f"A training step of V4-{preset.capitalize()}, computed from the measurements: "
        f"{steps[0]['csa_layers']} CSA layers",
        ("length", "indexer and loss"),
        ("ms a step", "step at the matrix ceiling, ms", "share at most"),
    )
    table.caption = (
        f"Step at the matrix ceiling: 6 x {PRESETS[preset].active_parameters / 1e9:.0f}e9 active parameters x tokens. "
        "A real step takes longer: the share is an upper bound."
    )
    table.caption_justify = "left"
    for step in steps:
        table.add_row(
            shown_length(step["length"]),
            step["rung"],
            f"{step['milliseconds']:.1f}",
            f"{step['step_at_ceiling_ms']:.0f}",
            _percent(step["share_at_most"]),
        )
    return table


def comparison_table(compared: list[dict]) -> Table:
    """Old beside new; slower means by more than both runs' spread from the 5th to the 95th percentile."""
    table = _table("Compared with the older run", ("length", "part", "rung", ""), ("old ms", "new ms", "noise ms", ""))
    colours = {"slower": "bold red", "faster": "green", "same": "dim"}
    for line in compared:
        table.add_row(
            shown_length(line["length"]),
            line["part"],
            line["rung"],
            line["direction"],
            *(_milliseconds(line[name]) for name in ("old_ms", "new_ms", "noise_ms")),
            f"[{colours[line['verdict']]}]{line['verdict']}[/]",
        )
    return table
