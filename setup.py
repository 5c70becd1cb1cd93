"""Metadata and the package map only: building needs setuptools, not torch."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "indexer_ops/__init__.py").read_text(), re.MULTILINE)[1]
DEMO = ["transformers>=5.17", "accelerate", "matplotlib", "rich"]

setup(
    name="indexer-ops",
    version=VERSION,
    description="Differentiable ops that teach a DeepSeek-V4 lightning indexer which tokens to look at",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["indexer_ops", "indexer_ops.*"]),
    # In a checkout indexer_ops/_triton is a shim that points at csrc_triton; installed, the kernels take its place.
    package_dir={"indexer_ops._triton": "csrc_triton"},
    # Would copy that shim over the kernels' own __init__.py, since MANIFEST.in lists it.
    include_package_data=False,
    install_requires=["torch>=2.11", 'triton>=3.6; platform_system == "Linux"'],
    extras_require={
        "demo": DEMO,
        "bench": ["matplotlib", "rich"],
        "tensorboard": ["tensorboard"],
        # Triton 3.6's interpreter takes int() of arrays of one element, which NumPy 2.4 refuses. The packaging tests
        # build with setuptools.
        "test": [
            *DEMO,
            "expecttest",
            "hypothesis",
            'megatron-core==0.16.1; platform_system == "Linux" and python_version < "3.14"',
            "numpy<2.4",
            "pytest",
            "pytest-xdist",
            "setuptools>=70.1",
            "tensorboard",
        ],
    },
    entry_points={"console_scripts": ["indexer-ops = indexer_ops.cli:main"]},
    classifiers=[
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
