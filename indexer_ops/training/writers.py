"""Where reports go. A writer is a callable that takes a ``DistillReport``; these make some."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .report import DistillReport

Writer = Callable[[DistillReport], None]


def text_line(write: Callable[[str], Any] = print) -> Writer:
    """A line a report: ``step 20 indexer_kl 0.1235 indexer_kl/layer_1 0.1235``.

    Args:
        write: called with the line, without its end; ``logger.info`` for example.
    """

    def write_report(report: DistillReport) -> None:
        values = [f"{name} {value:.4g}" for name, value in report.scalars().items()]
        write(" ".join([f"step {report.step}", *(values or ["nothing recorded"])]))

    return write_report


def tensorboard(summary_writer: Any) -> Writer:
    """A curve a scalar.

    Args:
        summary_writer: has ``add_scalar(tag, value, step)``, as ``torch.utils.tensorboard.SummaryWriter`` does.
    """

    def write_report(report: DistillReport) -> None:
        for name, value in report.scalars().items():
            summary_writer.add_scalar(name, value, report.step)

    return write_report


def json_lines(path: str | Path) -> Writer:
    """One JSON object a report, ``step`` and the scalars, appended to ``path``.

    A value that is not finite, which JSON cannot hold, becomes the string ``"nan"``, ``"inf"`` or ``"-inf"``.
    """
    path = Path(path)

    def write_report(report: DistillReport) -> None:
        scalars = {name: value if math.isfinite(value) else str(value) for name, value in report.scalars().items()}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": report.step, **scalars}) + "\n")

    return write_report
