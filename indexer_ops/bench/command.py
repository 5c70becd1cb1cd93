"""``indexer-ops bench``: its options, the checks before it starts, and its course."""

import argparse
import datetime
import importlib.util
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..command_error import CommandError
from . import ceilings, comparison, gate, ladder
from .growth import growth, training_step
from .inputs import make_case
from .measure import measure, with_speed_ups
from .presets import PRESETS, parsed_lengths, shown_length
from .timing import clock_of

SUMMARY = "measure loss and indexer, from what people write today to the fused ops"
DESCRIPTION = (
    "Measures the distillation loss, the lightning indexer and both together, rung by rung: eager, compiled, and with "
    "one fused op more each time; forward, backward and both. A correctness gate runs first. Several lengths show how "
    "the cost grows. Writes bench.json and bench.png. On a CPU it measures small shapes without fused kernels."
)
EXTRA_PACKAGES = ("matplotlib", "rich")
REPORT_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``indexer-ops bench``."""
    parser.add_argument("--preset", choices=PRESETS, help="widths; unless given, flash on a GPU and small on a CPU")
    parser.add_argument(
        "--lengths",
        type=parsed_lengths,
        help="tokens, such as 4K,16K,64K,128K; unless given, 4K on a GPU and 256 on a CPU",
    )
    parser.add_argument(
        "--indices",
        choices=("causal", "full"),
        default="causal",
        help="what the loss alone selects: entries a query sees, or all slots valid",
    )
    parser.add_argument("--only", choices=ladder.PARTS, help="one part; unless given, all")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="an older bench.json to find regressions from")
    parser.add_argument("--out", type=Path, default=Path("."), help="directory for bench.json and bench.png")
    parser.add_argument("--seed", type=int, default=0, help="of the operands")


def run(arguments: argparse.Namespace) -> None:
    """Check everything, gate, measure, write ``bench.json`` and ``bench.png``, print tables."""
    missing = [name for name in EXTRA_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} not installed: pip install 'indexer-ops[bench]'")
    settings = _settings(arguments)
    older = None if arguments.compare is None else comparison.read_older(arguments.compare)
    if older is not None:
        comparison.check_comparable(older, settings)
    _check_writable(arguments.out)
    measure_and_report(settings, older, arguments.out)


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What is measured, and on what, with the defaults of the device filled in."""
    on_gpu = torch.cuda.is_available()
    name = arguments.preset or ("flash" if on_gpu else "small")
    preset = PRESETS[name]
    lengths = arguments.lengths or [4096 if on_gpu else 256]
    if lengths[0] < preset.ratio:
        raise CommandError(
            f"--lengths {lengths[0]}: shorter than one pool entry, which compresses {preset.ratio} tokens"
        )
    if arguments.indices == "full" and lengths[0] // preset.ratio < preset.K:
        raise CommandError(
            f"--indices full: {lengths[0]} tokens have {lengths[0] // preset.ratio} pool entries, {name} selects "
            f"{preset.K}"
        )
    return {
        "preset": name,
        "lengths": lengths,
        "indices": arguments.indices,
        "only": arguments.only,
        "seed": arguments.seed,
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU ({torch.get_num_threads()} threads)",
        "backend": "triton" if on_gpu else "composite",
    }


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CommandError(f"--out {directory}: {error.strerror}") from error


def _environment() -> dict[str, str | None]:
    has_triton = importlib.util.find_spec("triton") is not None
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if has_triton else None,
        "cuda": torch.version.cuda or torch.version.hip,
        "python": platform.python_version(),
    }


def measure_and_report(settings: dict[str, Any], older: dict | None, out: Path) -> None:
    """Everything after the checks; raises where the gate fails or, at the end, where something became slower."""
    from rich.console import Console

    from . import plot, report

    console = Console()
    if not console.is_terminal:
        console = Console(width=REPORT_WIDTH)  # rich takes a file or a pipe for 80 columns, too few for the tables
    preset = PRESETS[settings["preset"]]
    environment = _environment()
    on_gpu = torch.cuda.is_available()
    rungs = ladder.rungs_of(settings["only"])
    console.print(
        f"Preset {settings['preset']} (H={preset.H} D={preset.D} K={preset.K} Hi={preset.Hi} Di={preset.Di}), "
        f"bfloat16, {settings['indices']} indices, on {settings['device']}, torch {environment['torch']}, triton "
        f"{environment['triton']}.",
        highlight=False,
    )
    if not on_gpu:
        console.print("No GPU: the fused rungs run as the eager composite, which says nothing about the kernels.")
    numbers: dict[str, Any] = {"settings": settings, "environment": environment, "gate": [], "skipped": []}
    device = torch.device("cuda" if on_gpu else "cpu")
    measurements, ceiling = _measure_all(rungs, settings, device, numbers, console)
    numbers["ceilings"] = vars(ceiling)
    numbers["measurements"] = measurements = with_speed_ups(measurements)
    numbers["growth"] = growth(measurements)
    numbers["training_step"] = training_step(preset, measurements, ceiling)
    numbers["comparison"] = [] if older is None else comparison.compare(older["measurements"], measurements)
    (out / "bench.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    description = (
        f"{settings['preset']} widths, {settings['indices']} indices, {settings['backend']} ops on {settings['device']}"
    )
    plot.draw(measurements, numbers["growth"], description, out / "bench.png")

    for table in report.measurement_tables(measurements):
        console.print(table)
    console.print(report.legend(ceiling), highlight=False)
    for skipped in numbers["skipped"]:
        console.print(
            f"Skipped at {shown_length(skipped['length'])}: {skipped['part']}, {skipped['rung']}: {skipped['reason']}.",
            highlight=False,
        )
    if numbers["growth"]:
        console.print(report.growth_table(numbers["growth"]))
    if numbers["training_step"]:
        console.print(report.training_step_table(numbers["training_step"], settings["preset"]))
    if older is not None:
        console.print(report.comparison_table(numbers["comparison"]))
    console.print(f"Wrote {out / 'bench.json'} and {out / 'bench.png'}.", highlight=False)
    if older is not None and not numbers["comparison"]:
        raise CommandError("--compare: the runs have no measurement in common")
    slower = sum(line["verdict"] == "slower" for line in numbers["comparison"])
    if slower:
        raise CommandError(f"{slower} of {len(numbers['comparison'])} became slower by more than the measured noise")


def _measure_all(
    rungs: list[ladder.Rung], settings: dict[str, Any], device: torch.device, numbers: dict[str, Any], console
) -> tuple[list[dict], ceilings.Ceilings]:
    """Gate and measure every rung at every length; fills in ``gate`` and ``skipped`` of ``numbers``."""
    from .report import gate_table

    backend = settings["backend"]
    clock = clock_of(device)
    measurements = []
    with clock.running():
        ceiling = ceilings.measure_ceilings(clock, device)
        for S in settings["lengths"]:
            case = make_case(PRESETS[settings["preset"]], S, settings["indices"], settings["seed"], device)
            # Both together run what the gate checks one by one.
            checked = [rung for rung in ladder.RUNGS if rung.fused and _is_gated(rung, settings["only"])]
            with console.status(f"{shown_length(S)} tokens: checking against float64"):
                checks = [check for rung in checked for check in gate.check(rung, case, backend)]
            numbers["gate"] += [{**vars(check), "passed": check.passed} for check in checks]
            console.print(gate_table(checks))
            failed = [f"{check.rung} ({check.quantity})" for check in checks if not check.passed]
            if failed:
                raise CommandError(f"the correctness gate failed, so nothing was measured: {', '.join(failed)}")
            for rung in rungs:
                reason = rung.why_not(S, device.type == "cuda")
                if reason is None:
                    with console.status(f"{shown_length(S)} tokens: {rung.part}, {rung.name}"):
                        try:
                            measurements += measure(rung, case, backend, clock, ceiling)
                        except torch.OutOfMemoryError:
                            reason = "out of memory"
                if reason is not None:
                    entry = {"length": S, "part": rung.part, "rung": rung.name, "reason": reason}
                    numbers["skipped"].append(entry)
                if device.type == "cuda":
                    # Each rung's blocks have sizes of their own, which the next cannot use.
                    torch.cuda.empty_cache()
            del case
    return measurements, ceiling


def _is_gated(rung: ladder.Rung, only: str | None) -> bool:
    if rung.part == "together":
        return False
    return only in (None, "together", rung.part)
