"""The command line: help, and errors that come in one line before anything is written or trained."""

import argparse
from pathlib import Path

import pytest

from indexer_ops import __version__, cli
from indexer_ops.demo import command

LONG_ENOUGH = Path(argparse.__file__)


@pytest.fixture
def no_training(monkeypatch):
    def fail(*arguments):
        raise AssertionError("the demo started")

    pytest.importorskip("transformers.models.deepseek_v4")
    monkeypatch.setattr(command, "train_and_report", fail)


def error_of(capsys, *arguments):
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("indexer-ops demo: error: ") and captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--help"], "train a small DeepSeek-V4"),
        (["demo", "--help"], "(default: 1.0)"),
        (["demo", "--help"], "of the batches (default: 0)"),
        (["--version"], __version__),
    ],
)
def test_help_and_version(capsys, arguments, shown):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert shown in printed
    assert "default: None" not in printed and "default: False" not in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["train"], "invalid choice: 'train'"),
        (["demo", "--steps", "0"], "--steps: must be at least 1, got 0"),
        (["demo", "--steps", "many"], "--steps: invalid int value: 'many'"),
        (["demo", "--coeff", "0"], "--coeff: must be greater than 0 and finite, got 0"),
        (["demo", "--coeff", "nan"], "--coeff: must be greater than 0 and finite, got nan"),
        (["demo", "--seed", "-1"], "--seed: must be at least 0, got -1"),
    ],
)
def test_wrong_usage(capsys, arguments, named):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert named in capsys.readouterr().err


def test_text_that_does_not_exist(no_training, capsys, tmp_path):
    error = error_of(capsys, "demo", "--text", str(tmp_path / "absent"), "--out", str(tmp_path / "out"))
    assert f"--text {tmp_path / 'absent'}: no such file or directory" in error
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_too_short(no_training, capsys, tmp_path):
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 81_919)
    error = error_of(capsys, "demo", "--text", str(short), "--out", str(tmp_path / "out"))
    assert "has 81,919 bytes, the demo needs 81,920" in error
    assert list(tmp_path.iterdir()) == [short]


def test_out_that_cannot_be_written(no_training, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    error = error_of(capsys, "demo", "--text", str(LONG_ENOUGH), "--out", str(tmp_path / "file" / "out"))
    assert f"--out {tmp_path / 'file' / 'out'}: Not a directory" in error


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_device_that_is_not_there(no_training, capsys, tmp_path, device):
    out = tmp_path / "out"
    assert f"--device {device}: " in error_of(capsys, "demo", "--device", device, "--out", str(out))
    assert not out.exists()


def test_interrupted(no_training, capsys, monkeypatch, tmp_path):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "train_and_report", interrupt)
    assert cli.main(["demo", "--text", str(LONG_ENOUGH), "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "indexer-ops demo: interrupted\n"


def test_missing_package_is_named_with_the_extra_that_brings_it(fresh_process):
    printed = fresh_process(
        """
import contextlib, io
from indexer_ops import cli
errors = io.StringIO()
with contextlib.redirect_stderr(errors):
    status = cli.main(["demo"])
print(status, errors.getvalue(), end="")
""",
        hidden=("rich", "matplotlib"),
    )
    assert printed == ("1 indexer-ops demo: error: matplotlib, rich not installed: pip install 'indexer-ops[demo]'\n")


def test_module_is_the_command_and_help_needs_no_extra_package(fresh_process):
    printed = fresh_process(
        """
import runpy, sys
sys.argv = ["indexer_ops", "demo", "--help"]
try:
    runpy.run_module("indexer_ops", run_name="__main__")
except SystemExit as stop:
    print("status", stop.code)
""",
        hidden=("transformers", "rich", "matplotlib"),
    )
    assert "usage: indexer-ops demo" in printed and printed.endswith("status 0\n")
