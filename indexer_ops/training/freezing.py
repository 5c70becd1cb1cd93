"""The warm-up stage: only the indexers learn."""

from torch import nn

from .clipping import split_indexer_parameters


class FrozenModel:
    """A model whose parameters outside its indexers are frozen; made by ``freeze_all_but_indexer``.

    ``restore()`` ends that, and so does leaving a ``with`` block.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._thawed = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in self._thawed:
            parameter.requires_grad_(False)
            parameter.grad = None  # an optimizer would go on applying it

    def restore(self) -> None:
        """Let what learned before learn again; calling it again does nothing."""
        for parameter in self._thawed:
            parameter.requires_grad_(True)
        self._thawed = []

    def __enter__(self) -> "FrozenModel":
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def freeze_all_but_indexer(model: nn.Module) -> FrozenModel:
    """Freeze every parameter of ``model`` that is not an indexer's, and drop its gradient.

    The indexers are left as they are. Wrap in ``DistributedDataParallel`` afterwards, and again after ``restore()``:
    it looks at what needs gradients when it is made.

    Args:
        model: as in ``split_indexer_parameters``.

    Returns:
        A handle with ``.restore()``, also a context manager.

    Raises:
        ValueError: the model has no indexer with parameters.
    """
    return FrozenModel(split_indexer_parameters(model)[0])
