"""Sets the process up before anything imports Triton or ``indexer_ops``; GPU tests; Python in fresh processes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread a worker: with one a core each, the workers' threads wait for one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
else:
    # A warm cache of compiled graphs would answer for code that has changed since. Workers share it: the compiler's
    # precompiled headers alone take 20 s.
    _inductor_cache = tempfile.TemporaryDirectory(prefix="indexer_ops-inductor-", ignore_cleanup_errors=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = _inductor_cache.name

import torch  # noqa: E402  (reads the environment)

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Triton reads this when its kernels are declared, indexer_ops when it registers its ops.
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parent.parent
GPU_TESTS = ROOT / "tests" / "gpu"
# A fresh process is a user's: it gets none of these from the process of the tests.
NOT_INHERITED = ("PYTHONPATH", "TRITON_INTERPRET", "V4IDX_BACKEND", "V4IDX_DISABLE")

# Runs first in a fresh process. Patched in the path finder, a module looks not installed to import and find_spec both.
_HIDE_MODULES = """
import importlib.machinery
def _without(hidden, find_spec=importlib.machinery.PathFinder.find_spec):
    def find_spec_unless_hidden(name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else find_spec(name, path, target)
    importlib.machinery.PathFinder.find_spec = find_spec_unless_hidden
_without({hidden!r})
"""


def pytest_collection_modifyitems(items):
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker("gpu")
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def fresh_process(tmp_path_factory):
    """``fresh_process(code, cwd=, python=, python_path=, hidden=, **environment)`` runs code, returns what it printed.

    The working directory is an empty one and ``python_path`` the repository root unless given otherwise; ``hidden``
    names top-level modules that shall not be found; ``environment`` adds variables.
    """
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def run(code, *, cwd=elsewhere, python=sys.executable, python_path=(ROOT,), hidden=(), **environment) -> str:
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        if python_path:
            inherited["PYTHONPATH"] = os.pathsep.join(map(str, python_path))
        if hidden:
            code = _HIDE_MODULES.format(hidden=hidden) + code
        process = subprocess.run(
            [python, "-c", code], cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=300
        )
        assert process.returncode == 0, f"exit status {process.returncode}\n{process.stdout}\n{process.stderr}"
        return process.stdout

    return run
