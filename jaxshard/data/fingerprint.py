"""What decides which rows a run trains on and in which order, so that a change between two runs is noticed.

The text itself is hashed and not the files that hold it: a corpus that was moved, or kept in files of another kind, has
the same documents and the same fingerprint, on every machine and process and whatever the mesh. The hash is taken of
what is read anyway; `text` and `tokenizer` together name the token ids, the rest says how they become rows.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jaxshard.data.corpus import Document

DIGITS = 16
"""Hex digits that are kept of a hash."""
_WORDS = {"tokenizer": "data.tokenizer", "seed": "train.seed"}


class TextHash:
    """SHA-256 of a corpus while it is read: of every document's length and text, or of the ids of a .bin file.

    Ids come faster from a disk than one core can hash them. So each part of them is hashed by a thread of its own, and
    what counts is the hash of these hashes.
    """

    def __init__(self):
        self._hash = hashlib.sha256()
        self._threads = ThreadPoolExecutor()  # None is started before there is something to do.
        self._parts: list[Future[bytes]] = []

    def watch(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yields the documents as they come."""
        for document in documents:
            raw = document.text.encode("utf-8", errors="surrogatepass")
            self._hash.update(len(raw).to_bytes(8, "little"))
            self._hash.update(raw)
            yield document

    def add(self, ids: np.ndarray) -> None:
        """Adds the next ids [n] of a file without text. Other parts of the same ids give another hash."""
        self._parts.append(self._threads.submit(lambda: hashlib.sha256(np.ascontiguousarray(ids).data).digest()))

    def finish(self) -> str:
        """Returns the hash of all that came; nothing may follow."""
        for part in self._parts:
            self._hash.update(part.result())
        self._threads.shutdown()
        return self._hash.hexdigest()[:DIGITS]


@dataclass(frozen=True)
class Fingerprint:
    """What decides the rows of a run and their order: equal fingerprints give equal batches.

    Attributes:
        text: hash of the documents, or of the ids of a .bin file.
        documents: in training and held out.
        tokens: in these documents.
        tokenizer: its `identity`.
        seq_len, pack, eval_fraction: of `DataConfig`.
        seed: of the rows' order.
    """

    text: str
    documents: int
    tokens: int
    tokenizer: str
    seq_len: int
    pack: bool
    eval_fraction: float
    seed: int

    def changes_since(self, before: Mapping[str, Any], order: bool = True) -> list[str]:
        """What differs from an earlier fingerprint, in words.

        Args:
            before: the earlier one as plain values; what it does not have is not compared.
            order: whether the order of the rows counts.
        """
        now, found = asdict(self), []
        if before.get("text", self.text) != self.text:
            sizes = [_sizes(each) for each in (before, now)]
            found.append(f"the text was {before['text']}{sizes[0]} and is {self.text}{sizes[1]}")
        for name in ("tokenizer", "seq_len", "pack", "eval_fraction", *["seed"] * order):
            if name in before and before[name] != now[name]:
                found.append(f"{_WORDS.get(name, f'data.{name}')} was {before[name]} and is {now[name]}")
        return found


def _sizes(values: Mapping[str, Any]) -> str:
    if not {"documents", "tokens"} <= set(values):
        return ""
    return f" ({values['documents']:,} documents, {values['tokens']:,} tokens)"
