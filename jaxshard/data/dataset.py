"""The corpus of a run: documents encoded, split into training and held-out ones, and seen as rows."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxshard.config import DataConfig
from jaxshard.data.corpus import Document, left_out_text, piece_size, read_documents, whole_path
from jaxshard.data.fingerprint import Fingerprint, TextHash
from jaxshard.data.packing import Rows
from jaxshard.data.token_file import is_tokenised, read_bin
from jaxshard.data.tokenizer import IdTokenizer, Tokenizer, load_tokenizer, started, whole_tokenizer_path
from jaxshard.errors import InputError

_CHUNK = 1 << 22  # characters encoded together, ids scanned and hashed together: fingerprints of .bin files hang on it


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and held-out rows of one corpus, and what they were made with."""

    data: DataConfig
    tokenizer: Tokenizer
    train: Rows
    eval: Rows
    max_id: int
    """Largest token id of the corpus."""
    text: str
    """Hash of the corpus, whatever files hold it."""
    left_out: tuple[Path, ...] = ()
    """What the corpus's folder holds that is no text."""

    def describe(self) -> str:
        """Returns one line: the corpus, its size, the split, and what was left out."""
        train, held = self.train, self.eval
        slots = len(train) * self.data.seq_len
        padded = "" if self.data.pack else f" ({(slots - train.n_targets) / slots:.0%} of them padding)"
        return (
            f"{self.data.path}: {train.n_tokens + held.n_tokens:,} tokens of {self.tokenizer.vocab_size:,} kinds "
            f"({self.tokenizer.name}); training on {train.documents:,} documents in {len(train):,} rows of "
            f"{self.data.seq_len}{padded}, {held.documents:,} documents in {len(held):,} rows held out"
            f"{'; ' + left_out_text(self.left_out) if self.left_out else ''}"
        )

    def fingerprint(self, seed: int) -> Fingerprint:
        """What decides the rows and, with the seed of the run, their order."""
        data, parts = self.data, (self.train, self.eval)
        documents, tokens = sum(rows.documents for rows in parts), sum(rows.n_tokens for rows in parts)
        settings = (data.seq_len, data.pack, data.eval_fraction)
        return Fingerprint(self.text, documents, tokens, self.tokenizer.identity, *settings, seed)


def with_whole_paths(data: DataConfig) -> DataConfig:
    """The configuration with files by their whole path; reserved words such as stdlib, bytes and ids:0 stay words."""
    return dataclasses.replace(data, path=whole_path(data.path), tokenizer=whole_tokenizer_path(data.tokenizer))


def build(data: DataConfig) -> Dataset:
    """Reads, encodes and splits the corpus. The same on every process.

    Raises InputError for data that is missing, empty, broken, shorter than one sequence, or cannot be split, and for
    token ids that the tokenizer does not have.
    """
    tokenizer, text = load_tokenizer(data.tokenizer), TextHash()
    left_out: list[Path] = []
    if is_tokenised(data):
        tokens, ends, max_id = _scan(read_bin(data), tokenizer.eod, text)
        tokenizer = _check_ids(data, tokenizer, tokens, max_id)
    else:
        if isinstance(tokenizer, IdTokenizer):
            raise InputError(f"data.tokenizer={tokenizer.name} is for .bin files: {data.path!r} is text; use bytes")
        tokens, ends = _encode(text.watch(read_documents(data, left_out)), tokenizer)
        max_id = int(tokens.max(initial=0))
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    lengths = ends - starts
    keep = lengths >= 2  # one token alone has no target
    starts, lengths = starts[keep], lengths[keep]
    if not len(starts):
        raise InputError(f"data.path {data.path!r} holds no text: give a corpus of at least one sequence")
    everything = Rows(tokens, starts, lengths, data.seq_len, data.pack)
    _check_length(data, everything)
    held = _held_out(data, len(starts))
    train = dataclasses.replace(everything, starts=starts[~held], lengths=lengths[~held])
    _check_length(data, train)
    held_out = dataclasses.replace(everything, starts=starts[held], lengths=lengths[held])
    return Dataset(data, tokenizer, train, held_out, max_id, text.finish(), tuple(left_out))


def check_vocabulary(dataset: Dataset, vocab_size: int) -> None:
    """Raises InputError unless a model with ids [0, vocab_size) can take every id of the corpus and its tokenizer.

    On a device an id out of range would clamp or give NaN without a word.
    """
    tokenizer = dataset.tokenizer
    needed = max(tokenizer.vocab_size, dataset.max_id + 1)
    if dataset.max_id >= vocab_size and is_tokenised(dataset.data):
        raise InputError(
            f"model.vocab_size is {vocab_size:,}, but {_too_large(dataset.data, dataset.train.tokens, vocab_size)}; or "
            f"set --model.vocab_size to {needed:,} or more, or leave it out"
        )
    if needed > vocab_size:
        raise InputError(
            f"model.vocab_size is {vocab_size:,}, but data.tokenizer {tokenizer.name!r} has {tokenizer.vocab_size:,} "
            f"tokens and the largest id in {dataset.data.path!r} is {dataset.max_id:,}: set --model.vocab_size to "
            f"{needed:,} or more, or leave it out, or choose the model's own tokenizer with --data.tokenizer"
        )


def _encode(documents: Iterator[Document], tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns all ids [N], each document between the tokenizer's start and its eod, and the documents' ends.

    A text that begins or ends with these, written out, gets no second ones.
    """
    assert tokenizer.eod is not None
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    end = np.array([tokenizer.eod], dtype)
    parts: list[np.ndarray] = []
    lengths: list[int] = []
    for texts in _chunks(documents):
        for ids in tokenizer.encode_batch(texts):
            ids = started(tokenizer, ids).astype(dtype)
            ids = ids if len(ids) > len(tokenizer.start) and ids[-1] == tokenizer.eod else np.append(ids, end)
            parts.append(ids)
            lengths.append(len(ids))
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype)
    return tokens, np.cumsum(np.array(lengths, np.int64))


def _chunks(documents: Iterator[Document]) -> Iterator[list[str]]:
    texts, size = [], 0
    for document in documents:
        texts.append(document.text)
        size += len(document.text)
        if size >= _CHUNK:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def _scan(tokens: np.ndarray, eod: int | None, text: TextHash) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the ids of a .bin file [N], where its documents end (each behind its eod), and its largest id.

    The ids are added to the hash. A file of one document, or whose eod is not known, is cut into pieces.
    """
    max_id, found = 0, []
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        text.add(chunk)
        max_id = max(max_id, int(chunk.max()))
        if eod is not None:
            found.append(np.flatnonzero(chunk == eod) + start + 1)
    ends = np.concatenate(found) if found else np.zeros(0, np.int64)
    if not len(ends) or ends[-1] < len(tokens):
        ends = np.append(ends, len(tokens))
    if len(ends) == 1:
        size = piece_size(len(tokens))
        ends = np.append(np.arange(size, len(tokens), size), len(tokens))
    return tokens, ends.astype(np.int64), max_id


def _too_large(data: DataConfig, tokens: np.ndarray, limit: int) -> str:
    """Says which ids of a .bin file are `limit` or more (one at least), and why that may be."""
    count, first = 0, -1
    for start in range(0, len(tokens), _CHUNK):
        at = np.flatnonzero(tokens[start : start + _CHUNK] >= limit)
        first = start + int(at[0]) if len(at) and not count else first
        count += len(at)
    return (
        f"{count:,} of the {len(tokens):,} ids of {data.path!r} are {limit:,} or more, the first of them "
        f"{tokens[first]:,} at position {first:,}: the file may not hold {tokens.dtype.name} ids (--data.bin_dtype), "
        "or begin with a header that is none of llm.c's, or be of another tokenizer"
    )


def _check_ids(data: DataConfig, tokenizer: Tokenizer, tokens: np.ndarray, max_id: int) -> Tokenizer:
    """Returns the tokenizer of a .bin file, or raises InputError when it cannot be the one that wrote the file."""
    if max_id >= 2**31:  # also where no vocabulary is known; batches hold int32
        raise InputError(f"{_too_large(data, tokens, 2**31)}. No vocabulary has so many ids")
    if isinstance(tokenizer, IdTokenizer):
        if tokenizer.eod is not None and tokenizer.eod > max_id:
            raise InputError(
                f"data.tokenizer {tokenizer.name!r}: the largest id in {data.path!r} is {max_id:,}, so "
                f"{tokenizer.eod:,} ends no document: give the file's own end-of-document id, or ids alone"
            )
        return dataclasses.replace(tokenizer, vocab_size=max_id + 1)
    if max_id >= tokenizer.vocab_size:
        raise InputError(
            f"data.tokenizer {tokenizer.name!r} has only {tokenizer.vocab_size:,} tokens, but "
            f"{_too_large(data, tokens, tokenizer.vocab_size)}: give the tokenizer.json that wrote it, or ids:EOD "
            "(such as ids:50256 for GPT-2) when it is not at hand"
        )
    return tokenizer


def _held_out(data: DataConfig, documents: int) -> np.ndarray:
    """Returns bool [documents]: those held out, a fixed choice by index alone, whatever the seed or seq_len."""
    if data.eval_fraction == 0:
        return np.zeros(documents, bool)
    if documents < 2:
        raise InputError(
            f"data.path {data.path!r} is a single document, so data.eval_fraction={data.eval_fraction} cannot hold one "
            "out: set --data.eval_fraction 0, or give more text"
        )
    count = min(max(round(data.eval_fraction * documents), 1), documents - 1)
    held = np.zeros(documents, bool)
    held[np.argsort(_hash(np.arange(documents, dtype=np.uint64)), kind="stable")[:count]] = True
    return held


def _hash(x: np.ndarray) -> np.ndarray:
    """SplitMix64's mixer (Steele, Lea, Flood 2014): numpy's own generators may change between versions."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _check_length(data: DataConfig, rows: Rows) -> None:
    """Raises InputError when packed documents do not fill one row; unpacked ones are padded and may be short."""
    if data.pack and rows.n_targets < data.seq_len:
        raise InputError(
            f"data.path {data.path!r} has {rows.n_tokens:,} tokens in {rows.documents:,} documents to train on, too "
            f"few for one sequence of data.seq_len={data.seq_len}: set --data.seq_len to {rows.n_targets:,} or less, "
            "or give more text"
        )
