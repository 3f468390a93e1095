"""Kinds of files that are neither text nor token ids, known by their first bytes."""

import re
from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of file: what it is, and what to do with it instead."""

    what: str
    advice: str


_UNPACK = "unpack it first"
_NO_CORPUS = "it holds no corpus"

_KINDS = (
    (rb"\x93NUMPY", Kind("a NumPy array", "write its ids alone: numpy.load(FILE).astype('uint16').tofile('ids.bin')")),
    (rb"\x1f\x8b\x08", Kind("compressed by gzip", f"{_UNPACK} (gunzip)")),
    (rb"\x28\xb5\x2f\xfd", Kind("compressed by zstd", f"{_UNPACK} (unzstd)")),
    (rb"\xfd7zXZ\0", Kind("compressed by xz", f"{_UNPACK} (unxz)")),
    (rb"BZh[1-9]1AY&SY", Kind("compressed by bzip2", f"{_UNPACK} (bunzip2)")),
    (rb"PK\x03\x04", Kind("a zip archive, as torch.save writes them too", _UNPACK)),
    (rb"PAR1", Kind("a parquet file", "name it .parquet")),
    (rb"ARROW1\0\0", Kind("an Arrow file", "write it as .parquet")),
    (rb"\x89HDF\r\n", Kind("an HDF5 file", "write its texts as .jsonl, or its ids as .bin")),
    (rb"%PDF-", Kind("a PDF file", "write its text as .txt")),
    (rb"\x80\x02\x8a\x0al\xfc\x9cF\xf9", Kind("a file of torch.save", _NO_CORPUS)),
    (rb".{5}\0\0\0\{\"", Kind("a safetensors file", f"{_NO_CORPUS}, but the weights of a model")),
    (rb"GGUF", Kind("a GGUF file", f"{_NO_CORPUS}, but the weights of a model")),
    (rb"(?:MMIDIDX|TNTIDX)\0\0", Kind("the index of a dataset of Megatron-LM or fairseq", "its ids lie in the .bin")),
)


def kind_of(head: bytes) -> Kind | None:
    """Returns what a file with these first bytes (16 or more) is, or None for text, token ids and unknown kinds."""
    return next((kind for pattern, kind in _KINDS if re.match(pattern, head, re.DOTALL)), None)
