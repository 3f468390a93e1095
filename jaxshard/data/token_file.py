"""A file of token ids, and files that only look like one.

A .bin file holds little-endian ids and nothing else. Any bytes at all can be read as such ids, so a file that is known
to be something else is refused by name before it becomes a corpus of noise. llm.c's token files are read by their
header: 256 int32, of which the first three are magic, version and number of tokens; magic and version say the type.
"""

import codecs
import os
import re
import struct
from pathlib import Path

import numpy as np

from jaxshard.config import DataConfig
from jaxshard.data.corpus import existing
from jaxshard.data.file_kinds import kind_of
from jaxshard.errors import InputError

HEADER = 256 * 4
"""Bytes of the header of llm.c's files."""

LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Type of the ids by (magic, version): write_datafile of llm.c's dev/data/data_common.py, for GPT-2 and Llama 3."""

_LLM_C_OTHERS = {
    20240326: "a model",
    20240327: "a debugging state",
    20240328: "a tokenizer",
    20240522: "an evaluation set",
    20240527: "an optimizer's state",
}
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_SAMPLE = 1 << 16
"""Bytes from which a file is judged."""
_ENOUGH = 64
"""Bytes from which a judgement by likelihood is sure enough."""
_MANY = 16
"""Kinds of ids that no mere chance leaves out at every second position."""


def read_bin(data: DataConfig) -> np.ndarray:
    """Maps a file of token ids [N] without reading it: uint16 or uint32, little-endian.

    Raises InputError when the file is missing or empty, is of another kind, does not have the size that its header
    says, contradicts data.bin_dtype, or has no whole number of ids.
    """
    path = existing(data.path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_SAMPLE)
        _refuse_other_kinds(path, head)
        header = _llm_c_dtype(path, head, size)
        _refuse_other_dtype(data, path, head, header)
        dtype = np.dtype(header or data.bin_dtype or "uint16").newbyteorder("<")
        offset = HEADER if header else 0
        _check_size(path, size - offset, dtype, int.from_bytes(head[8:12], "little") if header else None)
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _refuse_other_kinds(path: Path, head: bytes) -> None:
    if kind := kind_of(head):
        raise InputError(f"data.path {str(path)!r} is {kind.what}, not a file of token ids: {kind.advice}")
    if len(head) >= _ENOUGH and _is_text(head):
        raise InputError(f"data.path {str(path)!r} is text, beginning with {head[:20]!r}, not token ids: name it .txt")
    index = path.with_suffix(".idx")
    if index.is_file():
        with index.open("rb") as file:
            found = re.match(rb"MMIDIDX\0\0.{8}(.)|TNTIDX", file.read(18), re.DOTALL)
        if found:
            raise InputError(_megatron(path, index, _MEGATRON_TYPES.get(found[1][0]) if found[1] else None))


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)  # a character may be cut at the end
    except UnicodeDecodeError:
        return False
    return not re.search(r"[\0-\x08\x0e-\x1f]", text)


def _megatron(path: Path, index: Path, kind: str | None) -> str:
    """What to say of the data file of an indexed dataset whose ids are of this type (None: not known)."""
    said = f"data.path {str(path)!r} is half of a dataset of Megatron-LM or fairseq: {index.name} beside it says where "
    said += "its documents end, which is not read"
    dtype = {"uint16": "uint16", "int32": "uint32"}.get(kind or "")
    if not dtype:
        return f"{said}; convert its {kind or 'ids'} to a .bin file of uint16 or uint32"
    return (
        f"{said}. If each ends with an id of its own, link the file elsewhere (ln -s) and take the link with "
        f"--data.bin_dtype {dtype} --data.tokenizer ids:EOD"
    )


def _llm_c_dtype(path: Path, head: bytes, size: int) -> str | None:
    """Returns the type that the header of one of llm.c's token files says, or None without such a header."""
    if len(head) < 12:
        return None
    magic, version, count = struct.unpack("<3i", head[:12])
    if other := _LLM_C_OTHERS.get(magic):
        raise InputError(f"data.path {str(path)!r} is {other} of llm.c (magic {magic}), not a file of token ids")
    counted = count > 0 and size - HEADER in (2 * count, 4 * count) and not any(head[12:HEADER])
    if magic not in {known for known, _ in LLM_C} and not counted:
        return None
    if (magic, version) not in LLM_C or len(head) < HEADER:
        known = ", ".join(f"{number} of magic {each} ({dtype})" for (each, number), dtype in LLM_C.items())
        raise InputError(
            f"data.path {str(path)!r} begins like a token file of llm.c, with magic {magic} and version {version} in "
            f"{min(len(head), HEADER):,} bytes of header: known are, of {HEADER:,} bytes, version {known}"
        )
    return LLM_C[magic, version]


def _refuse_other_dtype(data: DataConfig, path: Path, head: bytes, header: str | None) -> None:
    """Raises InputError where the ids are not of the type that they would be read as."""
    if header and data.bin_dtype not in (None, header):
        raise InputError(
            f"data.bin_dtype is {data.bin_dtype}, but the header of {str(path)!r} says {header}: leave the option out"
        )
    halves = np.frombuffer(head[: len(head) // 4 * 4], "<u2")
    if header or data.bin_dtype is not None or len(head) < _ENOUGH or path.stat().st_size % 4:
        return
    if (halves[1::2] < 4).all() and len(np.unique(halves[::2])) >= _MANY:
        raise InputError(
            f"data.path {str(path)!r} holds uint32 ids as it seems: of its first {len(halves):,} uint16 every second "
            f"one is below 4, such as {', '.join(map(str, halves[:6]))}: give --data.bin_dtype uint32 (or uint16, if "
            "that is what they are)"
        )


def _check_size(path: Path, size: int, dtype: np.dtype, count: int | None) -> None:
    """Raises InputError unless `size` bytes are a whole number of ids, `count` of them where a header says so."""
    if count is not None and size != count * dtype.itemsize:
        raise InputError(
            f"data.path {str(path)!r} is damaged or cut off: its header says {count:,} tokens of {dtype.itemsize} "
            f"bytes, {count * dtype.itemsize:,} in all, and {size:,} follow it"
        )
    if size == 0:
        raise InputError(f"data.path {str(path)!r} is empty: give a file with token ids")
    if size % dtype.itemsize:
        raise InputError(
            f"data.path {str(path)!r} has {size:,} bytes, which is no multiple of the {dtype.itemsize} bytes of one "
            f"{dtype.name} id: it is cut off, or data.bin_dtype is wrong"
        )


def is_tokenised(data: DataConfig) -> bool:
    """Whether the corpus holds token ids instead of text."""
    return data.path.endswith(".bin") and not os.path.isdir(os.path.expanduser(data.path))
