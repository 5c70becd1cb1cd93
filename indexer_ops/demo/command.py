"""``indexer-ops demo``: its options, the checks before it starts, and its course."""

import argparse
import copy
import importlib.util
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ..command_error import CommandError
from .text import Corpus, read_corpus

SUMMARY = "train a small DeepSeek-V4 with the distillation loss and without it"
DESCRIPTION = (
    "Trains a small byte-level DeepSeek-V4 on real text twice, from the same start on the same batches: with the "
    "distillation loss of its lightning indexers and without it. Shows on held-out text how many of the pool entries "
    "that attention wants most the indexers select, and how many a random choice would. Takes a few minutes on two "
    "CPU cores. Writes demo.json and demo.png."
)
EXTRA_PACKAGES = ("transformers", "matplotlib", "rich")
HELD_OUT_SEQUENCES = 16


def _at_least(least: int):
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    parse.__name__ = "int"  # argparse names it where the text is no number
    return parse


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be greater than 0 and finite, got {text}")
    return value


_positive.__name__ = "float"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``indexer-ops demo``."""
    parser.add_argument("--steps", type=_at_least(1), default=200, help="training steps of each run")
    parser.add_argument("--coeff", type=_positive, default=1.0, help="factor on the distillation loss")
    parser.add_argument("--seed", type=_at_least(0), default=0, help="of the model's start and of the batches")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: the GPU if there is one)")
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="files or directories to train on (default: the sources of Python's standard library)",
    )
    parser.add_argument(
        "--trainer",
        action="store_true",
        help="one run with the loss in transformers.Trainer instead, which logs the KL of each layer; writes "
        "demo_trainer.json",
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="directory for what is written")


def run(arguments: argparse.Namespace) -> None:
    """Check everything, train twice, write ``demo.json`` and ``demo.png``, print a table."""
    _check_packages((*EXTRA_PACKAGES, "accelerate") if arguments.trainer else EXTRA_PACKAGES)
    from .model import SEQUENCE_LENGTH

    device = _checked_device(arguments.device)
    corpus = read_corpus(arguments.text, HELD_OUT_SEQUENCES, SEQUENCE_LENGTH)
    _check_writable(arguments.out)
    threads = torch.get_num_threads()
    if device.type == "cpu":
        # A model this small gains nothing from more, and threads that wait for a busy core made it three times slower.
        torch.set_num_threads(1)
    try:
        if arguments.trainer:
            from .trainer import train_with_trainer

            train_with_trainer(arguments, device, corpus, HELD_OUT_SEQUENCES)
        else:
            train_and_report(arguments, device, corpus)
    finally:
        torch.set_num_threads(threads)


def _check_packages(names: tuple[str, ...]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} not installed: pip install 'indexer-ops[demo]'")
    if importlib.util.find_spec("transformers.models.deepseek_v4") is None:
        raise CommandError("this transformers has no DeepSeek-V4: pip install -U 'indexer-ops[demo]'")


def _checked_device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.zeros(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise CommandError(f"--device {name}: {str(error).splitlines()[0]}") from error


def _check_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CommandError(f"--out {directory}: {error.strerror}") from error


def train_and_report(arguments: argparse.Namespace, device: torch.device, corpus: Corpus) -> None:
    """Both runs, then ``demo.json``, ``demo.png``, the table and what it says."""
    from rich.console import Console

    from . import plot, report
    from .backend import backend_in_use
    from .model import SEQUENCE_LENGTH, small_model
    from .progress import training_progress
    from .training import BATCH, train

    console = Console()
    initial = small_model(arguments.seed).to(device)
    config = initial.config
    parameters = sum(parameter.numel() for parameter in initial.parameters())
    backend = backend_in_use(config, SEQUENCE_LENGTH, device)
    console.print(
        f"DeepSeek-V4, {parameters / 1e6:.1f} M parameters, float32; {config.num_hidden_layers} CSA layers, "
        f"{config.index_topk} of up to {SEQUENCE_LENGTH // 4} pool entries a query."
    )
    console.print(f"Text: {corpus.description}, {len(corpus.training) / 1e6:.1f} MB, a tenth more held out.")
    console.print(f"The ops run as {backend}.", highlight=False)
    held_out = corpus.held_out_sequences(HELD_OUT_SEQUENCES, SEQUENCE_LENGTH).to(device)
    runs, seconds = {}, {}
    with training_progress(console, arguments.steps) as follow:
        for name, coeff in (("with_loss", arguments.coeff), ("without_loss", None)):
            start = time.perf_counter()
            runs[name] = train(
                copy.deepcopy(initial),
                corpus.training_batches(arguments.steps, BATCH, SEQUENCE_LENGTH, arguments.seed),
                arguments.steps,
                held_out,
                coeff,
                follow(name.replace("_", " the ", 1)),
            )
            seconds[name] = time.perf_counter() - start
    settings: dict[str, Any] = {
        "steps": arguments.steps,
        "coeff": arguments.coeff,
        "seed": arguments.seed,
        "device": str(device),
        "backend": backend,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "text": corpus.description,
        "training_bytes": len(corpus.training),
        "held_out_sequences": HELD_OUT_SEQUENCES,
        "sequence_length": SEQUENCE_LENGTH,
        "batch": BATCH,
        "topk": config.index_topk,
        "parameters": parameters,
        "model": config.to_diff_dict(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    numbers = report.as_json(settings, **runs)
    (arguments.out / "demo.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    plot.draw(**runs, topk=config.index_topk, path=arguments.out / "demo.png")
    console.print(report.table(numbers["layers"], config.index_topk))
    console.print(report.verdict(numbers["layers"], numbers["lm_loss"]), highlight=False)
    written = " and ".join(str(arguments.out / name) for name in ("demo.json", "demo.png"))
    console.print(f"Wrote {written} after {sum(seconds.values()):.0f} s of training.", highlight=False)
