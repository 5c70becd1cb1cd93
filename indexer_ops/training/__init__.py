"""Training with the distillation loss: attach it, record and report it, freeze and clip around it.

``attach`` sends a loss into the backward pass of a stack that cannot return it; ``tracker`` averages what the layers
measured over micro-batches and ranks, and ``writers`` show it; ``freezing``, ``clipping`` and ``coefficient`` are the
recipes, ``zero_loss`` what is left of the loss at coefficient 0.
"""

from .attach import attach_aux_loss
from .clipping import clip_indexer_apart, indexer_param_group, split_indexer_parameters
from .coefficient import CoefficientSchedule
from .freezing import FrozenModel, freeze_all_but_indexer
from .report import DistillReport
from .tracker import DistillLossTracker
from .writers import json_lines, tensorboard, text_line
from .zero_loss import zero_loss

__all__ = [
    "CoefficientSchedule",
    "DistillLossTracker",
    "DistillReport",
    "FrozenModel",
    "attach_aux_loss",
    "clip_indexer_apart",
    "freeze_all_but_indexer",
    "indexer_param_group",
    "json_lines",
    "split_indexer_parameters",
    "tensorboard",
    "text_line",
    "zero_loss",
]
