"""Rows against a plain loop, and what must hold for each token of a corpus."""

import numpy as np
import pytest

from jaxshard.data.packing import Rows


def make(lengths: list[int], seq_len: int, pack: bool, gap: int = 0, first: int = 0) -> Rows:
    """Documents of these lengths whose tokens count up; `gap` ids between documents belong to none."""
    starts = np.cumsum([0, *[n + gap for n in lengths[:-1]]])
    tokens = np.arange(first, first + sum(lengths) + gap * len(lengths), dtype=np.uint32)
    return Rows(tokens, starts, np.array(lengths), seq_len, pack)


def everything(rows: Rows) -> dict[str, np.ndarray]:
    return rows.batch(np.arange(len(rows)))


def by_hand(rows: Rows) -> dict[str, list[list[int]]]:
    """The same rows, slot by slot."""
    slots: list[tuple[int, int, int, int]] = []  # input, target, document from 1, offset in the document
    for d, (start, length) in enumerate(zip(rows.starts, rows.lengths, strict=True), 1):
        for i in range(length - 1):
            slots.append((int(rows.tokens[start + i]), int(rows.tokens[start + i + 1]), d, i))
        while not rows.pack and len(slots) % rows.seq_len:
            slots.append((0, -1, 0, 0))
    while len(slots) % rows.seq_len:
        slots.append((0, -1, 0, 0))
    result: dict[str, list[list[int]]] = {"inputs": [], "targets": [], "segments": [], "positions": []}
    for at in range(0, len(slots), rows.seq_len):
        row = slots[at : at + rows.seq_len]
        seen = {d: (n, i) for n, (_, _, d, i) in list(enumerate(row))[::-1]}  # document -> its first slot, offset
        order = sorted((d for d in seen if d), key=lambda d: seen[d][0])
        result["inputs"].append([slot[0] for slot in row])
        result["targets"].append([slot[1] for slot in row])
        result["segments"].append([order.index(d) + 1 if d else 0 for _, _, d, _ in row])
        result["positions"].append([i - seen[d][1] if d else 0 for _, _, d, i in row])
    return result


RANDOM = [np.random.default_rng(seed).integers(2, 30, 40).tolist() for seed in range(4)]
CASES = [[4, 3], [2], [2, 2, 2, 2, 2], [100], [3, 50, 2], *RANDOM]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("seq_len", [1, 4, 7, 64])
@pytest.mark.parametrize("lengths", CASES, ids=range(len(CASES)))
def test_rows_equal_a_plain_loop(lengths, seq_len, pack):
    rows = make(lengths, seq_len, pack, gap=1)
    batch = everything(rows)
    assert all(a.dtype == np.int32 and a.shape == (len(rows), seq_len) for a in batch.values())
    assert {name: a.tolist() for name, a in batch.items()} == by_hand(rows)


def test_the_picture_in_the_module():
    batch = everything(Rows(np.array([1, 2, 3, 4, 7, 8, 9]), np.array([0, 4]), np.array([4, 3]), 4))
    assert batch["inputs"].tolist() == [[1, 2, 3, 7], [8, 0, 0, 0]]
    assert batch["targets"].tolist() == [[2, 3, 4, 8], [9, -1, -1, -1]]
    assert batch["segments"].tolist() == [[1, 1, 1, 2], [1, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("lengths", RANDOM, ids=range(len(RANDOM)))
def test_each_token_is_a_target_once_except_the_first_of_a_document(lengths, pack):
    rows = make(lengths, 8, pack)
    targets = everything(rows)["targets"]
    found = np.sort(targets[targets >= 0])
    np.testing.assert_array_equal(found, np.delete(np.arange(sum(lengths)), rows.starts))
    assert len(found) == rows.n_targets == rows.n_tokens - rows.documents


@pytest.mark.parametrize("pack", [True, False])
def test_nothing_crosses_a_boundary(pack):
    rows = make(RANDOM[0], 8, pack, gap=3)  # within a document ids are consecutive, between documents they are not
    batch = everything(rows)
    valid = batch["targets"] >= 0
    assert (batch["targets"] - batch["inputs"])[valid].tolist() == [1] * rows.n_targets
    document = np.searchsorted(rows.starts, batch["inputs"], side="right")
    same_segment = (batch["segments"][:, :, None] == batch["segments"][:, None, :]) & valid[:, :, None]
    same_document = document[:, :, None] == document[:, None, :]
    both = same_segment & valid[:, None, :]
    assert same_document[both].all() and (both.sum() > valid.sum())
    assert not (same_document & ~same_segment & valid[:, :, None] & valid[:, None, :]).any()
    assert (batch["segments"] > 0).tolist() == valid.tolist()


def test_padding_is_known_by_position_not_by_id():
    rows = Rows(np.zeros(9, np.uint16), np.array([0, 3]), np.array([3, 6]), 4, pack=False)
    batch = everything(rows)
    assert batch["targets"].tolist() == [[0, 0, -1, -1], [0, 0, 0, 0], [0, -1, -1, -1]]
    assert batch["segments"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]


def test_rows_stand_alone_and_rows_behind_the_end_are_padding():
    rows = make(RANDOM[1], 8, pack=True)
    whole = everything(rows)
    pick = np.array([3, 0, len(rows) - 1, 3, len(rows), len(rows) + 10**6])
    batch = rows.batch(pick)
    for name in whole:
        np.testing.assert_array_equal(batch[name][:4], whole[name][pick[:4]])
    assert (batch["targets"][4:] == -1).all() and not batch["segments"][4:].any() and not batch["inputs"][4:].any()


def test_ids_above_two_to_the_15_survive():
    rows = make([40], 8, pack=True, first=2**31 - 41)
    assert everything(rows)["targets"].max() == 2**31 - 2
