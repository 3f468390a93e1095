"""The order of batches is a pure function of corpus, seed and step; evaluation sees every held-out token once."""

import dataclasses
import itertools
import json
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxshard.config import DataConfig
from jaxshard.data import Dataset, TrainLoader, build, eval_batches


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    generator = np.random.default_rng(0)
    texts = ["".join(map(chr, generator.integers(97, 123, n))) for n in generator.integers(1, 90, 40)]
    path = tmp_path_factory.mktemp("data") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return build(DataConfig(str(path), seq_len=16, eval_fraction=0.2))


def key(batch: dict[str, np.ndarray]) -> list[bytes]:
    """Each row of a batch as bytes."""
    return [b"".join(batch[name][i].tobytes() for name in sorted(batch)) for i in range(len(batch["inputs"]))]


def take(loader: TrainLoader, steps: int) -> list[list[bytes]]:
    return [key(batch) for batch in itertools.islice(loader, steps)]


def every_row(dataset: Dataset) -> list[bytes]:
    return key(dataset.train.batch(np.arange(len(dataset.train))))


def test_batches_are_the_epochs_laid_end_to_end(dataset):
    rows, n = every_row(dataset), len(dataset.train)
    assert n > 20 and n % 7
    stream = list(itertools.chain(*take(TrainLoader(dataset, 7, seed=1), 3 * n // 7 + 1)))
    epochs = [stream[i * n : (i + 1) * n] for i in range(3)]
    assert all(sorted(epoch) == sorted(rows) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != rows


@pytest.mark.parametrize("start", [0, 1, 5, 11, 1000])
def test_seeking_equals_iterating(dataset, start):
    whole = TrainLoader(dataset, 7, seed=1)
    expected = take(whole, start + 4)[start:]
    assert take(TrainLoader(dataset, 7, seed=1, start_row=7 * start), 4) == expected
    assert [key(whole.batch(step)) for step in range(start, start + 4)] == expected


def test_far_steps_are_found_at_once(dataset):
    assert len(take(TrainLoader(dataset, 7, seed=1, start_row=7 * 10**12), 2)) == 2


def test_stream_of_rows_does_not_depend_on_the_batch_size(dataset):
    streams = [list(itertools.chain(*take(TrainLoader(dataset, b, seed=4), 60 // b))) for b in (1, 4, 10, 60)]
    assert all(stream == streams[0] for stream in streams)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_of_processes_make_the_global_batch(dataset, parts):
    whole = take(TrainLoader(dataset, 8, seed=2, start_row=24), 5)
    size = 8 // parts
    loaders = [TrainLoader(dataset, 8, 2, 24, slice(p * size, (p + 1) * size)) for p in range(parts)]
    for step, together in enumerate(zip(*[take(loader, 5) for loader in loaders], strict=True)):
        assert list(itertools.chain(*together)) == whole[step]


def test_seeds_differ_and_any_integer_is_one(dataset):
    orders = [str(take(TrainLoader(dataset, 8, seed), 2)) for seed in (0, 1, 2, -1, 2**31, 2**32, 2**32 + 1, 2**70 + 5)]
    assert len(set(orders)) == len(orders)


def test_order_has_not_changed_since_it_was_written_down():
    """A resumed run relies on it: if a new version of a library changes the order, this must be known."""
    order = Dataset.__new__(Dataset)
    object.__setattr__(order, "train", _Numbers(10))
    loader = TrainLoader(order, 10, seed=0)
    assert [loader.batch(step)["inputs"].tolist() for step in range(2)] == GOLDEN


class _Numbers:
    """Rows that are their own number."""

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def batch(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"inputs": rows}


GOLDEN = [[1, 2, 4, 5, 9, 7, 8, 6, 0, 3], [9, 6, 1, 8, 2, 0, 3, 5, 4, 7]]


def test_threads_end_with_the_iterator(dataset):
    others = set(threading.enumerate())
    iterator = iter(TrainLoader(dataset, 4, seed=0))
    next(iterator)
    threads = [thread for thread in set(threading.enumerate()) - others if thread.name.startswith("grain")]
    assert threads
    iterator.close()  # pyright: ignore[reportAttributeAccessIssue] - grain's iterator has it
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()


@pytest.mark.parametrize("batch", [1, 3, 8, 1000])
def test_evaluation_sees_each_held_out_token_once_whatever_the_batch_size(dataset, batch):
    batches = list(eval_batches(dataset, batch))
    assert len(batches) == -(-len(dataset.eval) // batch)
    assert all(array.shape == (batch, 16) for one in batches for array in one.values())
    targets = np.concatenate([one["targets"] for one in batches])
    expected = dataset.eval.batch(np.arange(len(dataset.eval)))["targets"]
    np.testing.assert_array_equal(targets[: len(expected)], expected)
    assert (targets[len(expected) :] == -1).all()
    assert (targets >= 0).sum() == dataset.eval.n_targets > 0


def test_limited_evaluation_spreads_over_the_set_and_parts_make_a_batch(dataset):
    n = len(dataset.eval)
    limited = list(eval_batches(dataset, 2, limit=3))
    rows = list(itertools.chain(*[key(batch) for batch in limited]))
    every = key(dataset.eval.batch(np.arange(n)))
    assert n > 12 and len(rows) == len(set(rows)) == 6
    assert rows == [every[i * n // 6] for i in range(6)]
    parts = [list(eval_batches(dataset, 2, limit=3, rows=slice(p, p + 1))) for p in range(2)]
    assert [key(a) + key(b) for a, b in zip(*parts, strict=True)] == [key(batch) for batch in limited]
    assert len(list(eval_batches(dataset, 2, limit=10**6))) == len(list(eval_batches(dataset, 2)))


def test_split_is_by_document_and_does_not_depend_on_the_sequence_length(dataset):
    other = build(dataclasses.replace(dataset.data, seq_len=5, pack=False))
    for part in ("train", "eval"):
        np.testing.assert_array_equal(getattr(other, part).starts, getattr(dataset, part).starts)
    assert not set(dataset.train.starts) & set(dataset.eval.starts)
    assert (dataset.train.documents, dataset.eval.documents) == (32, 8)
    assert dataset.eval.starts.tolist() != np.sort(np.r_[dataset.train.starts, dataset.eval.starts])[:8].tolist()


@pytest.mark.parametrize(("fraction", "held"), [(0.0, 0), (0.001, 1), (0.5, 20), (0.999, 39)])
def test_split_leaves_a_document_on_each_side(dataset, fraction, held):
    other = build(dataclasses.replace(dataset.data, eval_fraction=fraction, pack=False))
    assert (other.train.documents, other.eval.documents) == (40 - held, held)
    if not held:
        assert list(eval_batches(other, 4)) == []


def test_reading_data_imports_no_jax():
    code = (
        "import sys, jaxshard.data as d, jaxshard.config as c; d.build(c.DataConfig()); assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
