"""The tracker counts each layer, micro-batch and rank once, and says the same on every rank."""

import json

import pytest
import torch
import torch.distributed
from torch.utils.checkpoint import checkpoint

from indexer_ops.training import DistillLossTracker, json_lines, tensorboard, text_line
from processes import run_on_ranks


def tracker_of(layers, **options):
    return DistillLossTracker(layers, device="cpu", **options)


def test_mean_over_micro_batches_then_layers():
    tracker = tracker_of([3, 1], metrics=["recall"])
    for kl in (1.0, 3.0):
        tracker.record(1, torch.tensor([kl], dtype=torch.bfloat16, requires_grad=True))
    tracker.record(3, torch.tensor(10.0), {"recall": 0.5})
    tracker.step()
    report = tracker.report(7)
    assert tracker.layers == (1, 3)
    assert report.step == 7
    assert report.per_layer == {1: {"kl": 2.0}, 3: {"kl": 10.0, "recall": 0.5}}
    assert report.mean == {"kl": 6.0, "recall": 0.5}
    assert report.scalars() == {
        "indexer_kl": 6.0,
        "indexer_recall": 0.5,
        "indexer_kl/layer_1": 2.0,
        "indexer_kl/layer_3": 10.0,
        "indexer_recall/layer_3": 0.5,
    }


def test_a_report_starts_over_and_is_empty_before_anything_was_recorded():
    tracker = tracker_of(["a", "b"])
    assert tracker.report(0).mean == {} and tracker.report(0).per_layer == {}
    tracker.record("a", 1.0)
    assert tracker.report(1).mean == {}, "the step is not over"
    tracker.step()
    assert tracker.report(2).per_layer == {"a": {"kl": 1.0}}, "a layer without a value is not a zero"
    assert tracker.report(3).mean == {}


@pytest.mark.parametrize("as_tensor", [False, True])
def test_skipped_steps_do_not_count(as_tensor):
    tracker = tracker_of(["a"])
    for kl, skipped in ((1.0, False), (float("nan"), True), (3.0, False)):
        tracker.record("a", torch.tensor(kl))
        tracker.step(torch.tensor([float(skipped)]) if as_tensor else skipped)
    assert tracker.report(0).mean == {"kl": 2.0}


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_recompute_and_evaluation_do_not_count(use_reentrant):
    tracker = tracker_of(["a"])
    layer = torch.nn.Linear(2, 2)
    runs = []

    def forward(x):
        runs.append(None)
        output = layer(x)
        tracker.record("a", output.square().mean(), training=layer.training)
        return output.sin()

    x = torch.ones(1, 2, requires_grad=True)
    if use_reentrant is None:
        output = forward(x)
    else:
        output = checkpoint(forward, x, use_reentrant=use_reentrant)
    expected = layer(x).square().mean().item()
    output.sum().backward()
    assert len(runs) == (1 if use_reentrant is None else 2)
    layer.eval()
    forward(x + 1)
    tracker.step()
    assert tracker._finished[1].item() == 1  # a mean of equal values would not show that they were counted twice
    assert tracker.report(0).mean["kl"] == pytest.approx(expected)


def test_recording_is_traced():
    tracker = tracker_of(["a"])

    @torch.compile(fullgraph=True, backend="eager")
    def forward(x):
        tracker.record("a", x.mean())
        return x + 1

    for value in (1.0, 2.0):
        forward(torch.full((2,), value))
    tracker.step()
    assert tracker.report(0).mean == {"kl": 1.5}


def test_writers(tmp_path, capsys):
    class Summary:
        def __init__(self):
            self.calls = []

        def add_scalar(self, *call):
            self.calls.append(call)

    summary, reports, path = Summary(), [], tmp_path / "log.jsonl"
    tracker = tracker_of(["a"], writers=[text_line(), tensorboard(summary), json_lines(path), reports.append])
    tracker.report(1)
    tracker.record("a", float("nan"))
    tracker.step()
    last = tracker.report(2)
    assert capsys.readouterr().out.splitlines() == [
        "step 1 nothing recorded",
        "step 2 indexer_kl nan indexer_kl/a nan",
    ]
    assert [(tag, step) for tag, _, step in summary.calls] == [("indexer_kl", 2), ("indexer_kl/a", 2)]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1}, {"step": 2, "indexer_kl": "nan", "indexer_kl/a": "nan"}]
    assert reports[-1] is last


def test_tensorboard_files(tmp_path):
    tensorboard_package = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tensorboard_package.SummaryWriter(tmp_path) as summary:
        tracker = tracker_of([2], writers=[tensorboard(summary)])
        tracker.record(2, 0.5)
        tracker.step()
        tracker.report(3)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("indexer_kl/layer_2")] == [(3, 0.5)]


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (ValueError, {"layers": [None]}),
        (ValueError, {"layers": [0]}),
        (ValueError, {"layers": [-1]}),
        (ValueError, {"layers": [""]}),
        (ValueError, {"layers": [2, 2]}),
        (ValueError, {"layers": []}),
        (TypeError, {"layers": [True]}),
        (TypeError, {"layers": [1.5]}),
        (TypeError, {"layers": "ab"}),
        (TypeError, {"layers": [1], "metrics": "recall"}),
        (ValueError, {"layers": [1], "metrics": ["kl"]}),
        (ValueError, {"layers": [1], "metrics": ["recall", "recall"]}),
    ],
)
def test_bad_registration(error, options):
    name = "metrics" if "metrics" in options else "layers"
    with pytest.raises(error, match=f"^{name} must"):
        tracker_of(**options)


def test_bad_records():
    tracker = tracker_of([1])
    for arguments, named in (
        ((2, 1.0), "layer"),
        ((None, 1.0), "layer"),
        ((1, torch.ones(2)), "kl"),
        ((1, torch.ones((), device="meta")), "kl"),
        ((1, 1.0, {"recall": 1.0}), "metrics"),
    ):
        with pytest.raises(ValueError, match=f"^{named} must"):
            tracker.record(*arguments)
    with pytest.raises(ValueError, match="^skipped must"):
        tracker.step(torch.zeros(2))


LAYERS_OF_RANKS = {2: [[1, 2, 4], []], 4: [["a", "b"], [], ["c"], ["a", "b"]]}


def report_on_every_rank(rank, world_size, directory):
    store = torch.distributed.FileStore(f"{directory}/store", world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mine = LAYERS_OF_RANKS[world_size][rank]
    tracker = tracker_of(mine, metrics=["recall"])
    calls = []
    collectives = [name for name in vars(torch.distributed) if name.startswith(("all_", "reduce", "gather", "broad"))]
    for name in collectives:
        original = getattr(torch.distributed, name)
        if callable(original):
            setattr(
                torch.distributed,
                name,
                lambda *args, _name=name, _original=original, **kwargs: (
                    calls.append(_name) or _original(*args, **kwargs)
                ),
            )
    reports = [tracker.report(0)]
    for layer in mine:
        for micro_batch in range(2):
            tracker.record(layer, float(10 * rank + micro_batch + mine.index(layer)))
    tracker.step()
    reports.append(tracker.report(1))
    assert calls == ["all_reduce"] * 2, calls
    for wrong in ({"layers": [None] if rank == 0 else [5]}, {"layers": [5], "metrics": ["x"] if rank else []}):
        with pytest.raises(ValueError):
            tracker_of(**wrong)
    with open(f"{directory}/{rank}", "w") as file:
        file.write(repr(reports))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_agree_in_one_collective(world_size, tmp_path):
    run_on_ranks(report_on_every_rank, world_size, str(tmp_path))
    reports = {(tmp_path / str(rank)).read_text() for rank in range(world_size)}
    (report,) = reports
    if world_size == 2:
        assert "per_layer={1: {'kl': 0.5}, 2: {'kl': 1.5}, 4: {'kl': 2.5}}, mean={'kl': 1.5}" in report
    else:  # a and b on ranks 0 and 3 count as one layer each
        assert "per_layer={'a': {'kl': 15.5}, 'b': {'kl': 16.5}, 'c': {'kl': 20.5}}, mean={'kl': 17.5}" in report
