"""This run beside an older one: what has become slower by more than both runs' noise."""

import json
from pathlib import Path

from ..command_error import CommandError

# Runs that differ in one of these measured different things.
SAME_SETTINGS = ("preset", "indices", "device", "backend")


def read_older(path: Path) -> dict:
    """An older ``bench.json``."""
    try:
        older = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"--compare {path}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(f"--compare {path}: no JSON ({error})") from error
    if not isinstance(older, dict) or not {"settings", "measurements"} <= set(older):
        raise CommandError(f"--compare {path}: not a bench.json")
    return older


def check_comparable(older: dict, settings: dict) -> None:
    """Raise where the older run measured something else."""
    for name in SAME_SETTINGS:
        if older["settings"].get(name) != settings[name]:
            raise CommandError(f"--compare: {name} was {older['settings'].get(name)}, is {settings[name]}")


def _noise(measured: dict) -> float:
    return measured["high_ms"] - measured["low_ms"]


def compare(older: list[dict], newer: list[dict]) -> list[dict]:
    """Measurements that both runs have. The noise is the sum of both spreads, 5th to 95th percentile."""

    def key(measured: dict) -> tuple:
        return tuple(measured[name] for name in ("length", "part", "rung", "direction"))

    before = {key(measured): measured for measured in older}
    compared = []
    for measured in newer:
        old = before.get(key(measured))
        if old is not None:
            difference = measured["median_ms"] - old["median_ms"]
            noise = _noise(measured) + _noise(old)
            compared.append(
                {
                    **{name: measured[name] for name in ("length", "part", "rung", "direction")},
                    "old_ms": old["median_ms"],
                    "new_ms": measured["median_ms"],
                    "noise_ms": noise,
                    "verdict": "slower" if difference > noise else "faster" if -difference > noise else "same",
                }
            )
    return compared
