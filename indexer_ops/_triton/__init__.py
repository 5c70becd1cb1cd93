"""The kernels of a checkout: this package's modules lie in ``csrc_triton/`` beside ``indexer_ops/``.

An installed package holds those files here instead (``package_dir`` in setup.py).
"""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "csrc_triton")]
