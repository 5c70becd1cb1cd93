"""The text the demo trains on, as bytes: real, on every machine, and the same on each run."""

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..command_error import CommandError

SKIPPED_DIRECTORIES = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__"})
HELD_OUT_FRACTION = 0.1


@dataclass(frozen=True)
class Corpus:
    """All files in a row; the last tenth is held out, so no file but one is in both parts."""

    description: str
    files: int
    training: Tensor  # [bytes] uint8
    held_out: Tensor  # [bytes] uint8

    def training_batches(self, steps: int, batch: int, length: int, seed: int) -> Iterable[Tensor]:
        """``steps`` batches ``[batch, length]`` int64 from random places, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            starts = torch.randint(len(self.training) - length + 1, (batch,), generator=generator).tolist()
            yield torch.stack([self.training[start : start + length] for start in starts]).long()

    def held_out_sequences(self, count: int, length: int) -> Tensor:
        """``[count, length]`` int64, evenly spread over the held-out part, none overlapping another."""
        stride = len(self.held_out) // count
        return torch.stack([self.held_out[i * stride : i * stride + length] for i in range(count)]).long()


def standard_library_files() -> list[Path]:
    """Python's own standard library in source, without its tests and whatever else is installed beside it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if not SKIPPED_DIRECTORIES & set(path.relative_to(root).parts))
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def given_files(paths: list[Path]) -> list[Path]:
    """The files of ``paths`` in order; of a directory all files below it, but for hidden ones, sorted."""
    files = []
    for path in paths:
        if path.is_dir():
            below = (file for file in path.rglob("*") if file.is_file())
            visible = (file for file in below if not any(p.startswith(".") for p in file.relative_to(path).parts))
            files += sorted(visible, key=lambda file: file.relative_to(path).as_posix())
        elif path.exists():
            files.append(path)
        else:
            raise CommandError(f"--text {path}: no such file or directory")
    return files


def read_corpus(paths: list[Path] | None, held_out_sequences: int, length: int) -> Corpus:
    """Read ``paths``, by default Python's standard library; enough for ``held_out_sequences`` of ``length`` bytes."""
    files = given_files(paths) if paths else standard_library_files()
    if paths:
        description = " ".join(map(str, paths))
    else:
        description = "the sources of Python's standard library"
    try:
        text = bytearray(b"".join(file.read_bytes() for file in files))
    except OSError as error:
        raise CommandError(f"cannot read {error.filename}: {error.strerror}") from error
    held_out_bytes = int(len(text) * HELD_OUT_FRACTION)
    if held_out_bytes < held_out_sequences * length:
        least = round(held_out_sequences * length / HELD_OUT_FRACTION)
        raise CommandError(
            f"too little text: {description} has {len(text):,} bytes, the demo needs {least:,}, of which it holds out "
            f"{HELD_OUT_FRACTION:.0%} to measure on"
        )
    everything = torch.frombuffer(text, dtype=torch.uint8)
    return Corpus(description, len(files), everything[:-held_out_bytes], everything[-held_out_bytes:])
