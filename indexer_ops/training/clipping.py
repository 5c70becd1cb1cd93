"""Which parameters are the indexers', and clipping their gradients apart from the model's.

In one norm for all, the indexers' gradients scale those of the model: ByteDance's VeOmni reports that they triggered
clipping in 63 % of the steps.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..modules import LightningIndexer


def split_indexer_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """All other parameters, and those of the indexers, each once, in the model's order.

    An indexer is a ``LightningIndexer`` or a submodule that is called ``indexer``, as in ``transformers``; wrappers
    (``DistributedDataParallel``, ``torch.compile``) do not matter.

    Raises:
        ValueError: the model has no indexer with parameters.
    """
    owned = {id(p) for m in model.modules() if isinstance(m, LightningIndexer) for p in m.parameters()}
    split: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        is_indexer = id(parameter) in owned or ".indexer." in f".{name}"
        split[is_indexer].append(parameter)
    if not split[1]:
        raise ValueError(f"model must have an indexer with parameters, got {type(model).__name__} without")
    return split


def indexer_param_group(model: nn.Module, **options: Any) -> dict[str, Any]:
    """The indexers' trainable parameters as an optimizer's parameter group.

    Args:
        model: as in ``split_indexer_parameters``; give the others to the optimizer as a group of their own.
        options: of the group, such as ``lr`` or ``weight_decay``.

    Raises:
        ValueError: the model has no indexer with parameters.
    """
    return {"params": [p for p in split_indexer_parameters(model)[1] if p.requires_grad], **options}


def clip_indexer_apart(model: nn.Module, max_norm: float, indexer_max_norm: float) -> tuple[Tensor, Tensor]:
    """Clip the gradients of the model and of its indexers by a norm each.

    Args:
        model: as in ``split_indexer_parameters``.
        max_norm: largest 2-norm of all gradients but the indexers'.
        indexer_max_norm: largest 2-norm of the indexers' gradients.

    Returns:
        The two norms before clipping, on the device.

    Raises:
        ValueError: the model has no indexer with parameters, or a norm is not greater than 0.
    """
    for name, value in (("max_norm", max_norm), ("indexer_max_norm", indexer_max_norm)):
        if not value > 0:
            raise ValueError(f"{name} must be greater than 0, got {value}")
    others, indexers = split_indexer_parameters(model)
    clip = torch.nn.utils.clip_grad_norm_
    return clip(others, max_norm), clip(indexers, indexer_max_norm)
