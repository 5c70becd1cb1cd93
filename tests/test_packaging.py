"""Every way to install imports the same package: wheel, sdist, editable, plain checkout."""

import ast
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from indexer_ops import __version__

ROOT = Path(__file__).resolve().parent.parent
KERNEL_MODULES = sorted(path.stem for path in (ROOT / "csrc_triton").glob("*.py") if path.stem != "__init__")
DIST_INFO = f"indexer_ops-{__version__}.dist-info"
OFFLINE = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")

# Imports everything, runs an op, tells which files were imported.
TELL_ORIGINS = f"""
import importlib
import torch, indexer_ops
one = torch.ones(1, 1, 1)
assert indexer_ops.distill_kl(one, one, torch.zeros(1, 1, 1, dtype=torch.int32)).tolist() == [[0.0]]
print(indexer_ops.__file__)
for name in {KERNEL_MODULES!r}:
    print(importlib.import_module("indexer_ops._triton." + name).__file__)
"""
TELL_TOP_LEVEL_KERNELS = "import importlib.util; print(importlib.util.find_spec('csrc_triton'))"


def lines_of_origins(package: Path, kernels: Path) -> list[str]:
    return [str(package / "__init__.py"), *(str(kernels / f"{name}.py") for name in KERNEL_MODULES)]


def build(builder: str, source: Path, out: Path) -> Path:
    """Build with the backend that pyproject.toml names: what pip and build do, without an environment of its own."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.{builder}({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, text=True, timeout=120)
    (built,) = out.iterdir()
    return built


def pip(*arguments: str | Path, python: str | Path = sys.executable) -> None:
    process = subprocess.run([python, "-m", "pip", *arguments], capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stdout + process.stderr


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources: builds write beside them."""
    copy = tmp_path_factory.mktemp("checkout") / "indexer_ops"
    left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "build", "dist", "*.egg-info")
    return shutil.copytree(ROOT, copy, ignore=left_out)


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    return build("build_wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", *OFFLINE, "--no-compile", "--target", folder, wheel)
    return folder


@pytest.fixture(scope="module")
def unpacked_sdist(checkout, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    shutil.unpack_archive(build("build_sdist", checkout, folder / "archive"), folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


def test_wheel_holds_the_package_and_nothing_else(wheel):
    files = contents(wheel)
    assert {name.split("/")[0] for name in files} == {"indexer_ops", DIST_INFO}
    packaged = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "indexer_ops").rglob("*.py")}
    # The kernels take the place of the checkout's shim.
    packaged |= {f"indexer_ops/_triton/{path.name}": path for path in (ROOT / "csrc_triton").glob("*.py")}
    assert packaged.keys() == {name for name in files if not name.startswith(DIST_INFO)}
    assert all(files[name] == path.read_bytes() for name, path in packaged.items())


def test_wheel_metadata(wheel):
    files = contents(wheel)
    metadata = message_from_bytes(files[f"{DIST_INFO}/METADATA"])
    named = [metadata[field] for field in ("Name", "Version", "Requires-Python")]
    assert named == ["indexer-ops", __version__, ">=3.10"]
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert required == ["torch>=2.11", 'triton>=3.6; platform_system == "Linux"']
    assert set(metadata.get_all("Provides-Extra")) == {"bench", "demo", "tensorboard", "test"}
    assert any(name.startswith(DIST_INFO) and name.endswith("LICENSE") for name in files)


def test_installed_wheel_imports_from_elsewhere(installed, fresh_process):
    expected = lines_of_origins(installed / "indexer_ops", installed / "indexer_ops" / "_triton")
    assert fresh_process(TELL_ORIGINS, python_path=[installed]).splitlines() == expected
    assert fresh_process(TELL_TOP_LEVEL_KERNELS, python_path=[installed]) == "None\n"


def test_console_script_of_the_wheel_loads(installed, fresh_process):
    code = """
from importlib.metadata import distribution
(script,) = distribution("indexer-ops").entry_points
print(script.name, script.load().__module__)
"""
    assert fresh_process(code, python_path=[installed]) == "indexer-ops indexer_ops.cli\n"


def test_sdist_builds_the_same_wheel(wheel, unpacked_sdist, tmp_path):
    assert contents(build("build_wheel", unpacked_sdist, tmp_path)) == contents(wheel)


def test_unpacked_sdist_imports_like_a_checkout_and_holds_the_tests(unpacked_sdist, fresh_process):
    expected = lines_of_origins(unpacked_sdist / "indexer_ops", unpacked_sdist / "csrc_triton")
    assert fresh_process(TELL_ORIGINS, python_path=[unpacked_sdist]).splitlines() == expected
    tests = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")}
    assert tests == {path.relative_to(unpacked_sdist) for path in (unpacked_sdist / "tests").rglob("*.py")}


def test_editable_install_imports_from_elsewhere(checkout, tmp_path, fresh_process):
    venv.create(tmp_path, with_pip=False, symlinks=True)
    python = tmp_path / "bin" / "python"
    # Torch, pip and setuptools come from the environment of the tests. Its .pth files, so its own editable
    # installs, do not take part.
    site_packages = sysconfig.get_path("purelib", "posix_prefix", {"base": str(tmp_path)})
    Path(site_packages, "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("install", *OFFLINE, "--editable", checkout, python=python)
    expected = lines_of_origins(checkout / "indexer_ops", checkout / "csrc_triton")
    assert fresh_process(TELL_ORIGINS, python=python, python_path=()).splitlines() == expected
    assert fresh_process(TELL_TOP_LEVEL_KERNELS, python=python, python_path=()) == "None\n"


def test_plain_checkout_imports_from_its_root_and_from_elsewhere(checkout, fresh_process):
    expected = lines_of_origins(checkout / "indexer_ops", checkout / "csrc_triton")
    assert fresh_process(TELL_ORIGINS, cwd=checkout, python_path=()).splitlines() == expected
    assert fresh_process(TELL_ORIGINS, python_path=[checkout]).splitlines() == expected


def test_setup_runs_without_torch(checkout, fresh_process):
    run_setup = "import runpy, sys; sys.argv = ['setup.py', '--name', '--version']; runpy.run_path('setup.py')"
    missing = ("torch", "triton", "numpy")
    assert fresh_process(run_setup, cwd=checkout, python_path=(), hidden=missing) == f"indexer-ops\n{__version__}\n"


def imported_modules(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(node.module)
    return modules


def test_nothing_imports_the_kernels_as_a_top_level_package():
    for folder in ("indexer_ops", "csrc_triton", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            top_level = {module.partition(".")[0] for module in imported_modules(path)}
            assert "csrc_triton" not in top_level, path.relative_to(ROOT)
