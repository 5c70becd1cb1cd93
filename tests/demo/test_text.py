"""What the demo trains on, and what it holds out."""

import argparse
from pathlib import Path

import pytest
import torch

from indexer_ops.demo import text

LENGTH, HELD_OUT = 32, 4


@pytest.fixture
def tree(tmp_path):
    for name, size in (("b.txt", 900), ("a/z.txt", 700), (".hidden/x.txt", 50), ("a/.y.txt", 60)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes(i % 251 for i in range(size)))
    return tmp_path


def test_default_is_the_standard_library_without_its_tests():
    files = text.standard_library_files()
    assert Path(argparse.__file__).resolve() in [file.resolve() for file in files]
    assert not [file for file in files if {"test", "tests", "site-packages"} & set(file.parts[-3:-1])]
    assert files == text.standard_library_files()


def test_given_files_come_in_order_and_directories_sorted_without_hidden_files(tree):
    assert text.given_files([tree]) == [tree / "a/z.txt", tree / "b.txt"]
    assert text.given_files([tree / "b.txt", tree / "a"]) == [tree / "b.txt", tree / "a/z.txt"]


def test_last_tenth_is_held_out(tree):
    corpus = text.read_corpus([tree], HELD_OUT, LENGTH)
    assert (corpus.files, len(corpus.training), len(corpus.held_out)) == (2, 1440, 160)
    everything = (tree / "a/z.txt").read_bytes() + (tree / "b.txt").read_bytes()
    assert bytes(torch.cat([corpus.training, corpus.held_out]).tolist()) == everything
    sequences = corpus.held_out_sequences(HELD_OUT, LENGTH)
    assert sequences.dtype == torch.int64
    assert [bytes(row) for row in sequences.tolist()] == [everything[1440 + 40 * i :][:LENGTH] for i in range(HELD_OUT)]


def test_batches_come_from_the_training_part_and_repeat_with_their_seed(tree):
    corpus = text.read_corpus([tree], HELD_OUT, LENGTH)
    batches = torch.stack(list(corpus.training_batches(5, 3, LENGTH, seed=7)))
    assert batches.shape == (5, 3, LENGTH)
    assert torch.equal(batches, torch.stack(list(corpus.training_batches(5, 3, LENGTH, seed=7))))
    assert not torch.equal(batches, torch.stack(list(corpus.training_batches(5, 3, LENGTH, seed=8))))
    training = bytes(corpus.training.tolist())
    assert all(bytes(row) in training for row in batches.flatten(0, 1).tolist())
    # There is only one place to take all of it from.
    whole = torch.stack(list(corpus.training_batches(8, 1, len(training), seed=0)))
    assert (whole == corpus.training).all()
