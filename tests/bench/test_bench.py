"""The benchmark: what it counts, fits and compares, its gate, and a whole run of the smallest sizes."""

import contextlib
import dataclasses
import json
import struct

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
from indexer_ops import cli, reference, reference_indexer  # noqa: E402
from indexer_ops.bench import (  # noqa: E402
    ceilings,
    comparison,
    eager,
    gate,
    growth,
    inputs,
    ladder,
    measure,
    presets,
    timing,
    work,
)

CPU = torch.device("cpu")
# More tokens than two windows, more entries than selected from the middle on; with few index heads whole scores are 0,
# and ties, which torch.topk breaks as it likes, would tell the rungs apart.
WIDTHS = presets.Preset(H=3, D=16, K=10, Hi=16, Di=16, window=13)
LENGTH = 90
RUNGS = {(rung.part, rung.name): rung for rung in ladder.RUNGS}


@pytest.fixture(scope="module", params=["causal", "full"])
def case(request):
    return inputs.make_case(WIDTHS, LENGTH, request.param, 0, CPU)


@pytest.fixture(scope="module")
def causal_case():
    return inputs.make_case(WIDTHS, LENGTH, "causal", 0, CPU)


def run(*arguments):
    return cli.main(["bench", *map(str, arguments)])


# --- Inputs -------------------------------------------------------------------------------------------------------


def test_lengths_as_people_write_them():
    assert presets.parsed_lengths("16K,4k,1000,4096") == [1000, 4096, 16384]
    assert [presets.shown_length(S) for S in (1000, 4096, 131072)] == ["1000", "4K", "128K"]


def test_causal_indices_are_the_visible_ones_and_full_ones_fill_every_slot(monkeypatch):
    monkeypatch.setattr(inputs, "SLAB_ELEMENTS", 5 * (LENGTH // 4))  # five rows at once
    for indices in ("causal", "full"):
        idxs = inputs.make_case(WIDTHS, LENGTH, indices, 0, CPU).topk_idxs
        for t, row in enumerate(idxs[0].tolist()):
            chosen = [index for index in row if index >= 0]
            assert len(set(chosen)) == len(chosen)
            visible = (t + 1) // 4 if indices == "causal" else LENGTH // 4
            assert len(chosen) == min(WIDTHS.K, visible) and all(index < visible for index in chosen)


def test_joint_lse_is_that_of_window_sink_and_selection(case):
    window = reference.window_lse(case.query, case.window_kv, case.sink, None, WIDTHS.window, WIDTHS.scale)
    without, with_joint = (
        reference.distill_target(case.query, case.pool, case.topk_idxs, *lses, WIDTHS.scale, normalize=False)
        for lses in ((window, None), (None, case.joint_lse))
    )
    torch.testing.assert_close(with_joint, without, rtol=1e-4, atol=1e-7)


# --- Counts -------------------------------------------------------------------------------------------------------


def brute_force_pairs(case):
    window = sum(1 for t in range(case.S) for j in range(case.S) if t - WIDTHS.window < j <= t)
    valid = sum(1 for row in case.topk_idxs[0].tolist() for index in row if 0 <= index < case.P)
    visible = [sum(1 for p in range(case.P) if (p + 1) * WIDTHS.ratio <= t + 1) for t in range(case.S)]
    return window, valid, sum(visible), sum(min(WIDTHS.K, count) for count in visible)


def test_operations_against_a_count_of_pairs(case):
    window, valid, visible, selected = brute_force_pairs(case)
    loss, index = 2 * WIDTHS.H * WIDTHS.D, 2 * WIDTHS.Hi * WIDTHS.Di
    expected = {
        ("loss", "eager"): (loss * (window + valid), 0),
        ("loss", "+ one pass"): (loss * (window + valid), 0),
        ("loss", "+ joint LSE"): (loss * valid, 0),
        ("indexer", "+ one op"): (index * visible, 3 * index * selected),
        ("together", "+ fused"): (loss * (window + selected) + index * visible, 3 * index * selected),
    }
    for rung, (forward, backward) in expected.items():
        counted = [work.floating_point_operations(RUNGS[rung], case, direction) for direction in ladder.DIRECTIONS]
        assert counted == [forward, backward, forward + backward], rung


def test_bytes_and_the_bound_on_extra_memory(causal_case):
    rung, S, P = RUNGS["loss", "+ one pass"], LENGTH, LENGTH // 4
    teacher = 2 * WIDTHS.D * (S * WIDTHS.H + S + P) + 4 * WIDTHS.H
    forward, backward = teacher + 4 * S + 8 * S * WIDTHS.K, 4 * S + 12 * S * WIDTHS.K
    counted = [work.compulsory_bytes(rung, causal_case, direction) for direction in ladder.DIRECTIONS]
    assert counted == [forward, backward, forward + backward]
    assert work.extra_bytes_bound(rung, causal_case) == 4 * S * (2 * WIDTHS.H + 3 * WIDTHS.K)
    assert work.extra_bytes_bound(RUNGS["loss", "eager"], causal_case) is None


# --- Statistics and comparison ------------------------------------------------------------------------------------


def test_quantiles():
    measured = timing.Timing.of([float(i) for i in range(101)][::-1], "wall clock")
    quantiles = (measured.low, measured.lower_quartile, measured.median, measured.upper_quartile, measured.high)
    assert quantiles == pytest.approx((5, 25, 50, 75, 95))
    assert measured.repetitions == 101


def test_clock_leaves_out_what_goes_before():
    calls = []
    measured = timing.CpuClock().measure(lambda: calls.append("prepare") or 7, calls.append, as_graph=False)
    assert calls.count("prepare") == calls.count(7) == measured.repetitions + 2
    assert calls[:2] == ["prepare", 7]
    assert timing.LEAST_REPETITIONS <= measured.repetitions <= timing.MOST_REPETITIONS


class FakeEvent:
    """Stands for a CUDA event: a millisecond passes at each record."""

    now = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.now += 1
        self.time = FakeEvent.now

    def elapsed_time(self, stop):
        return float(stop.time - self.time)


class FakeGraph:
    replays = 0

    def replay(self):
        FakeGraph.replays += 1


@pytest.mark.parametrize("as_graph", [False, True])
def test_gpu_clock_records_a_graph_once_and_launches_otherwise(monkeypatch, as_graph):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, stream: contextlib.nullcontext())
    for name in ("Stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(timing, "FLUSHED_BYTES", 8)
    monkeypatch.setattr(FakeGraph, "replays", 0)
    calls = []
    measured = timing.GpuClock(CPU).measure(lambda: calls.append("prepare") or 7, calls.append, as_graph)
    timed = measured.repetitions + timing.LEAST_REPETITIONS
    assert (measured.method, measured.low, measured.high) == ("graph" if as_graph else "launched", 1.0, 1.0)
    assert FakeGraph.replays == (timed if as_graph else 0)
    assert calls == ["prepare", 7] * (timing.WARM_UP_CALLS + (1 if as_graph else timed))


def test_fitted_exponent():
    lengths = [4096, 16384, 65536, 131072]
    assert growth.fitted_exponent(lengths, [3e-5 * S**1.3 for S in lengths]) == pytest.approx(1.3)
    # By hand: x = 0, 1, 2 and y = 0, 1, 3 in powers of two; slope = ((-1)(-4/3) + (1)(5/3)) / 2 = 1.5.
    assert growth.fitted_exponent([1, 2, 4], [1.0, 2.0, 8.0]) == pytest.approx(1.5)


def measurement(median, noise=0.0, **changes):
    entry = {"length": 4096, "part": "loss", "rung": "+ one pass", "direction": "both", "median_ms": median}
    return entry | {"low_ms": median - noise / 2, "high_ms": median + noise / 2, "extra_bytes": 1000} | changes


def test_growth_takes_both_directions_of_rungs_with_two_lengths():
    measured = [
        measurement(1.0),
        measurement(4.0, length=16384, extra_bytes=2000),
        measurement(9.0, direction="forward"),
        measurement(7.0, rung="eager"),
    ]
    (line,) = growth.growth(measured)
    assert (line["rung"], line["lengths"]) == ("+ one pass", [4096, 16384])
    assert line["time_exponent"] == pytest.approx(1.0) and line["memory_exponent"] == pytest.approx(0.5)
    (line,) = growth.growth([measurement(1.0, extra_bytes=None), measurement(4.0, length=16384, extra_bytes=None)])
    assert line["memory_exponent"] is None


def test_training_step_is_computed_from_both_together():
    measured = [measurement(2.0, part="together", rung="+ fused"), measurement(1.0)]
    ceiling = ceilings.Ceilings(800.0, 4.0, "")
    (step,) = growth.training_step(presets.PRESETS["pro"], measured, ceiling)
    assert step["milliseconds"] == pytest.approx(30 * 2.0)
    assert step["step_at_ceiling_ms"] == pytest.approx(1e3 * 6 * 49e9 * 4096 / 800e12)
    assert step["share_at_most"] == pytest.approx(step["milliseconds"] / step["step_at_ceiling_ms"])
    assert growth.training_step(presets.PRESETS["small"], measured, ceiling) == []


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        (measurement(1.0, 0.02), measurement(1.04, 0.01), "slower"),
        (measurement(1.0, 0.03), measurement(1.04, 0.02), "same"),
        (measurement(1.0, 0.02), measurement(0.9, 0.05), "faster"),
        (measurement(1.0, 0.2), measurement(0.9, 0.05), "same"),
    ],
)
def test_comparison_allows_for_the_noise_of_both_runs(old, new, verdict):
    (line,) = comparison.compare([old, measurement(5.0, length=1024)], [new, measurement(9.0, part="indexer")])
    assert line["verdict"] == verdict


# --- Rungs and gate -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def float32_case(causal_case):
    """The same operands, so that the eager rungs round nothing to bfloat16 and select what the others select."""
    operands = {
        name: value.detach().float().requires_grad_(value.requires_grad)
        for name, value in vars(causal_case).items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    return dataclasses.replace(causal_case, **operands)


@pytest.mark.parametrize("part", ladder.PARTS)
def test_rungs_of_a_part_agree(float32_case, part, monkeypatch):
    for rows in ("LOSS_ROWS", "INDEX_ROWS"):
        monkeypatch.setattr(eager, rows, 32)  # two chunks and a shorter one
    results = []
    for rung in ladder.rungs_of(part):
        if not rung.compiled:
            outputs = rung.forward(float32_case, "composite")
            results.append((outputs[0].detach(), *ladder.gradients(rung, float32_case, outputs)))
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            assert gate.relative_error(actual, expected.double()) < 1e-5


@pytest.mark.parametrize(
    "rung", [rung for rung in ladder.RUNGS if rung.fused and rung.part != "together"], ids=lambda rung: rung.name
)
def test_gate_passes_what_is_right(case, rung):
    checks = gate.check(rung, case, "composite")
    assert len(checks) == (2 if rung.part == "loss" else 5)
    assert all(check.passed for check in checks), checks


def test_gate_looks_at_the_first_the_last_and_some_rows_between():
    assert gate.checked_runs(40) == [slice(0, 40)]
    assert gate.checked_runs(4096) == [slice(start, start + 16) for start in (0, 1360, 2720, 4080)]


@pytest.mark.parametrize("row", [0, LENGTH // 2, LENGTH - 1])
@pytest.mark.parametrize("wrong", [1e-3, float("nan")], ids=str)
def test_gate_sees_one_wrong_row(causal_case, monkeypatch, row, wrong):
    monkeypatch.setattr(gate, "RUNS", 6)
    right = reference.distill_loss

    def off(*arguments):
        kl = right(*arguments)
        return kl + torch.zeros_like(kl).index_fill(1, torch.tensor([row]), wrong)

    monkeypatch.setattr(reference, "distill_loss", off)
    kl, gradient = gate.check(RUNGS["loss", "+ one pass"], causal_case, "composite")
    assert not kl.passed and gradient.passed


def test_gate_sees_a_composite_that_is_as_wrong(causal_case, monkeypatch):
    right = reference.distill_target
    monkeypatch.setattr(reference, "distill_target", lambda *arguments: 1.01 * right(*arguments))
    assert not any(check.passed for check in gate.check(RUNGS["loss", "+ three ops"], causal_case, "composite"))


def test_gate_sees_a_selection_that_is_not_the_best(causal_case, monkeypatch):
    right = reference_indexer.indexer_topk

    def second_best(q, k, weights, entry_start, entry_stop, topk, ratio, query_offset):
        scores, idxs = right(q, k, weights, entry_start, entry_stop, topk + 1, ratio, query_offset)
        keep = [*range(topk - 1), topk]
        return scores[..., keep], idxs[..., keep]

    monkeypatch.setattr(reference_indexer, "indexer_topk", second_best)
    failed = {c.quantity for c in gate.check(RUNGS["indexer", "+ one op"], causal_case, "composite") if not c.passed}
    assert {"scores", "selection"} <= failed


# --- The command --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """What two small lengths on a CPU wrote, and the directory."""
    out = tmp_path_factory.mktemp("bench") / "made by it"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert run("--lengths", "64,128", "--out", out) == 0
    return json.loads((out / "bench.json").read_text()), out


def test_json_holds_every_number(finished_run):
    numbers, _ = finished_run
    assert set(numbers) == set(
        "settings environment ceilings gate measurements skipped growth training_step comparison".split()
    )
    assert numbers["settings"]["preset"] == "small" and numbers["settings"]["backend"] == "composite"
    assert numbers["settings"]["device"].startswith("CPU")
    assert set(numbers["environment"]) == {"date", "torch", "triton", "cuda", "python"}
    assert numbers["ceilings"]["matrix_tflops"] > 0 and numbers["ceilings"]["copy_terabytes_per_second"] > 0
    assert len(numbers["gate"]) == 2 * (3 * 2 + 5) and all(check["passed"] for check in numbers["gate"])
    measured = {(m["length"], m["part"], m["rung"], m["direction"]): m for m in numbers["measurements"]}
    run_rungs = [rung for rung in ladder.RUNGS if not rung.compiled]
    assert len(measured) == len(numbers["measurements"]) == 2 * 3 * len(run_rungs)
    for entry in measured.values():
        assert 0 < entry["low_ms"] <= entry["lower_quartile_ms"] <= entry["median_ms"] <= entry["upper_quartile_ms"]
        eager_ms = measured[entry["length"], entry["part"], "eager", entry["direction"]]["median_ms"]
        assert entry["speed_up"] == pytest.approx(eager_ms / entry["median_ms"])
        assert entry["tflops"] == pytest.approx(entry["operations"] / entry["median_ms"] / 1e9)
    compiled = {(line["length"], line["part"]) for line in numbers["skipped"] if line["rung"] == "compiled"}
    assert compiled == {(S, part) for S in (64, 128) for part in ladder.PARTS}
    assert all(line["reason"] for line in numbers["skipped"])
    assert len(numbers["growth"]) == len(run_rungs)


def test_png_is_a_picture_of_readable_size(finished_run):
    content = (finished_run[1] / "bench.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1200 and height >= 500


@pytest.mark.parametrize(("old_ms", "status"), [(0.9, 1), (0.99, 0), (1.1, 0)])
def test_compare_flags_a_regression(finished_run, capsys, monkeypatch, tmp_path, old_ms, status):
    steady = timing.Timing(1.0, 0.99, 1.01, low=0.98, high=1.02, repetitions=5, method="none")
    monkeypatch.setattr(timing.CpuClock, "measure", lambda *arguments: steady)
    numbers = json.loads(json.dumps(finished_run[0]))
    for measured in numbers["measurements"]:
        measured |= {"median_ms": old_ms, "low_ms": old_ms - 0.01, "high_ms": old_ms + 0.01}
    old = tmp_path / "old.json"
    old.write_text(json.dumps(numbers))
    assert run("--only", "indexer", "--lengths", 64, "--compare", old, "--out", tmp_path) == status
    captured = capsys.readouterr()
    assert ("slower" in captured.out) == bool(status)
    assert ("6 of 6 became slower by more than the measured noise" in captured.err) == bool(status)


def test_nothing_in_common_is_no_comparison(finished_run, capsys, tmp_path):
    old = finished_run[1] / "bench.json"
    assert run("--only", "indexer", "--lengths", 32, "--compare", old, "--out", tmp_path) == 1
    assert "the runs have no measurement in common" in capsys.readouterr().err


def test_failed_gate_prints_no_speed_up_and_measures_nothing(monkeypatch, capsys, tmp_path):
    right = reference.distill_loss
    monkeypatch.setattr(reference, "distill_loss", lambda *arguments: right(*arguments) * 1.001)
    monkeypatch.setattr(measure, "measure", lambda *arguments: pytest.fail("measured"))
    assert run("--only", "loss", "--lengths", 64, "--out", tmp_path) == 1
    captured = capsys.readouterr()
    assert "FAILED" in captured.out and "x eager" not in captured.out
    assert "the correctness gate failed, so nothing was measured: + one pass (KL)" in captured.err
    assert list(tmp_path.iterdir()) == []


def test_out_of_memory_is_a_reason(monkeypatch, tmp_path):
    def exhausted(case, *arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(eager, "indexer", exhausted)
    assert run("--only", "indexer", "--lengths", 64, "--out", tmp_path) == 0
    numbers = json.loads((tmp_path / "bench.json").read_text())
    assert {"length": 64, "part": "indexer", "rung": "eager", "reason": "out of memory"} in numbers["skipped"]
    assert all(measured["speed_up"] is None for measured in numbers["measurements"])


def test_unfused_rungs_stop_where_they_say():
    for rung in ladder.RUNGS:
        assert rung.why_not(16 * 1024, on_gpu=True) is None
        assert (rung.why_not(16 * 1024 + 1, on_gpu=True) is None) == rung.fused


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--lengths", "2"), "--lengths 2: shorter than one pool entry"),
        (
            ("--indices", "full", "--lengths", "64,256"),
            "--indices full: 64 tokens have 16 pool entries, small selects 32",
        ),
        (("--compare", "absent.json"), "--compare absent.json: No such file or directory"),
    ],
)
def test_errors_in_one_line(capsys, monkeypatch, tmp_path, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert f"indexer-ops bench: error: {named}" in captured.err
    assert list(tmp_path.iterdir()) == []


def test_runs_of_other_settings_are_not_compared(finished_run, capsys, tmp_path):
    old = finished_run[1] / "bench.json"
    assert run("--indices", "full", "--lengths", 128, "--compare", old, "--out", tmp_path) == 1
    assert "--compare: indices was causal, is full" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["4Q", "", "0", "4K,,8K", "-4K"])
def test_wrong_lengths(capsys, text):
    with pytest.raises(SystemExit) as stop:
        run(f"--lengths={text}")
    assert stop.value.code == 2
    assert "must be positive lengths such as 4K,16K or 1000" in capsys.readouterr().err
