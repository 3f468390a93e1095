"""Text from disk: where a corpus lies, and what counts as one document in it.

`data.path` is one of
  stdlib             the .py files of the running interpreter's standard library, tests excluded, sorted: real text on
                     every machine, and always the same for one interpreter. Each file is a document. The word is no
                     path: a folder of this name is ./stdlib.
  a text file        documents stand between lines that hold only <|endoftext|>; without such a line it is one.
  .jsonl, .ndjson    each line an object; its field `text_field` is a document.
  .parquet           each row a document, in column `text_field`.
  a folder           everything below it in sorted order, hidden files left out: .jsonl and .parquet as above, and every
                     other file as a text file, if it is one.
  .bin               token ids, see `token_file`.
A text file holds UTF-8 and no NUL byte, whatever its name. What a folder holds beside is left out, and counted; named
alone it is refused. A corpus of one single document is cut at line ends (`cut_text`), so that a part of it can be held
out.
"""

import codecs
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxshard.config import DataConfig
from jaxshard.data.file_kinds import kind_of
from jaxshard.errors import InputError, nearest

PIECE = 64 * 1024
"""Largest usual size of the documents that a single text is cut into: characters, or tokens of a .bin file."""

_STDLIB = "stdlib"
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SEPARATOR = re.compile(r"^<\|endoftext\|>[ \t\r]*(?:\n|\Z)", re.MULTILINE)
_KINDS = "a .txt, .jsonl, .parquet or tokenised .bin file, a folder of text files, or stdlib"


class Document(NamedTuple):
    """One text that stands for itself: attention and loss never leave it."""

    source: str
    text: str


class NotText(InputError):
    """A file that is no text at all, and no broken one either."""


def read_documents(data: DataConfig, left_out: list[Path] | None = None) -> Iterator[Document]:
    """Yields the documents of a text corpus in a fixed order, without the empty ones.

    Args:
        data: where it lies.
        left_out: gets what a folder holds that is no text.

    Raises InputError when the path is missing or unreadable, when a file is not UTF-8 (naming its first bad byte), and
    when a record lacks its text field.
    """
    left_out = [] if left_out is None else left_out
    if data.path == _STDLIB:
        documents = _read_stdlib(left_out)
    else:
        path = existing(data.path)
        documents = (
            _read_folder(path, data.text_field, left_out) if path.is_dir() else _read_file(path, data.text_field)
        )
    return _cut_if_single(document for document in documents if document.text)


def whole_path(name: str) -> str:
    """Returns the whole path of a `data.path`, to be found from any folder; the word stdlib stays as it is."""
    return name if name == _STDLIB else str(Path(os.path.expanduser(name)).absolute())


def piece_size(total: int) -> int:
    """Size of the pieces of a single document of `total` characters or tokens: about 32 of them, 1 to 64 Ki each."""
    return min(PIECE, max(1024, total // 32))


def cut_text(text: str) -> list[str]:
    """Cuts a text into pieces of about `piece_size` characters; joined, they are the text again.

    A piece ends at the next line end, at a space where a line is longer than a piece, or else anywhere.
    """
    size, start, pieces = piece_size(len(text)), 0, []
    while start < len(text):
        end = start + size
        for mark in "\n ":
            found = text.find(mark, end, end + size)
            if found >= 0:
                end = found + 1
                break
        pieces.append(text[start:end])
        start = end
    return pieces


def existing(name: str, option: str = "data.path", kinds: str = _KINDS) -> Path:
    """Returns the path, or raises InputError with the nearest name beside it."""
    path = Path(os.path.expanduser(name))
    try:
        if name and (path.is_file() or path.is_dir()):
            return path
        if name and path.exists():
            raise InputError(f"{option} {name!r} is neither a file nor a folder: it must be {kinds}")
        beside = [p.name for p in path.parent.glob("[!.]*")] if path.parent.is_dir() else []
    except OSError as error:
        raise _unreadable(path, error) from error
    raise InputError(f"{option} {name!r} does not exist{nearest(path.name, beside)}: it must be {kinds}")


def read_text(path: Path) -> str:
    """Returns a UTF-8 file's text with its line ends as they are and a byte-order mark dropped.

    Raises InputError when the file is unreadable, or with the offset of the first byte that is not UTF-8.
    """
    return _decode(_read_bytes(path), path, 0)


def _cut_if_single(documents: Iterator[Document]) -> Iterator[Document]:
    first, second = next(documents, None), next(documents, None)
    if first is None:
        return
    if second is None:
        pieces = cut_text(first.text)
        yield from (Document(f"{first.source}, piece {i}", piece) for i, piece in enumerate(pieces, 1))
        return
    yield first
    yield second
    yield from documents


def _read_stdlib(left_out: list[Path]) -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = False
    for path in _files_below(root, lambda name: name in _SKIPPED_FOLDERS):
        if path.suffix != ".py":
            continue
        try:
            text = read_text(path)
        except InputError:  # a few sources declare another encoding
            left_out.append(path)
            continue
        found = True
        yield Document(str(path), text)
    if not found:
        raise InputError(f"data.path stdlib: no .py files below {root} (a zipped interpreter?): give {_KINDS}")


def _read_folder(root: Path, field: str, left_out: list[Path]) -> Iterator[Document]:
    found = False
    for path in _files_below(root, lambda name: name.startswith(".")):
        if path.name.startswith("."):
            continue
        try:
            for document in _RECORDS.get(path.suffix, _read_text_file)(path, field):
                found = True
                yield document
        except NotText:
            left_out.append(path)
    if not found:
        hint = f"; {left_out_text(left_out)}" if left_out else ""
        tokens = "; a .bin file of token ids is named by itself" if any(p.suffix == ".bin" for p in left_out) else ""
        raise InputError(f"data.path {str(root)!r} holds no text{hint}{tokens}: give {_KINDS}")


def left_out_text(paths: list[Path] | tuple[Path, ...]) -> str:
    """Says of files (one at least) that they are left out."""
    n = len(paths)
    return f"{n:,} file{'s' * (n > 1)} left out that {'are' if n > 1 else 'is'} no UTF-8 text, such as {paths[0]}"


def _read_file(path: Path, field: str) -> Iterator[Document]:
    if path.suffix in _RECORDS:
        yield from _RECORDS[path.suffix](path, field)
        return
    if path.suffix == ".json":
        raise InputError(f"data.path {str(path)!r}: .json is not read; put one object a line into a .jsonl file")
    yield from _read_text_file(path, field)


def _read_text_file(path: Path, field: str) -> Iterator[Document]:
    for number, text in enumerate(_SEPARATOR.split(_decode(_text_bytes(path), path, 0)), 1):
        yield Document(f"{path}, document {number}", text)


def _text_bytes(path: Path) -> bytes:
    """Returns the bytes of a text file. Raises NotText for token ids, a known kind of file, and one with a NUL byte."""
    if path.suffix == ".bin" or not path.is_file():
        raise NotText(f"{path} is no text file")
    try:
        with path.open("rb") as file:
            raw = file.read(8192)
            kind = kind_of(raw)
            if kind is None and b"\0" not in raw:
                raw += file.read()
    except OSError as error:
        raise _unreadable(path, error) from error
    if kind:
        raise NotText(f"data.path {str(path)!r} is {kind.what}: {kind.advice}")
    if (at := raw.find(b"\0")) >= 0:
        wide = raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        mend = "it is UTF-16, so convert it with iconv -f UTF-16 -t UTF-8" if wide else f"give {_KINDS}"
        raise NotText(f"data.path {str(path)!r} holds a NUL byte at offset {at:,}, as no UTF-8 text does: {mend}")
    return raw


def _read_jsonl(path: Path, field: str) -> Iterator[Document]:
    offset = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                line = _decode(raw, path, offset)
                offset += len(raw)
                if line.strip():
                    source = f"{path}, line {number}"
                    yield Document(source, _field_of(line, field, source))
    except OSError as error:
        raise _unreadable(path, error) from error


def _field_of(line: str, field: str, source: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{source} is not JSON ({error.msg} at column {error.colno}): each line is one object"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is JSON that cannot be read ({error}): each line is one object") from None
    if not isinstance(record, dict):
        raise InputError(f"{source} is a JSON {type(record).__name__}: each line must be an object with the text")
    if field not in record:
        raise InputError(f"{source} {_no_field(field, list(record))}")
    text = record[field]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise InputError(f"{source}: field {field!r} is a {type(text).__name__}, and must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(text[error.start]):04x}"
        raise InputError(f"{source}: {escape} at character {error.start} is half a surrogate pair, not text") from None
    return text


def _read_parquet(path: Path, field: str) -> Iterator[Document]:
    import pyarrow as pa  # here and below: only parquet needs it
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                raise InputError(f"{path} {_no_field(field, schema.names)}")
            kind = schema.field(field).type
            value = kind.value_type if pa.types.is_dictionary(kind) else kind
            if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
                raise InputError(f"{path}: column {field!r} is of type {kind}, and must be a string")
            for batch in file.iter_batches(columns=[field], batch_size=1024):
                for scalar in batch.column(0):
                    number += 1
                    yield Document(f"{path}, row {number}", scalar.as_py() or "")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}, row {number}: byte {error.start} of its text is not UTF-8") from None
    except pa.ArrowException as error:
        raise InputError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise _unreadable(path, error) from error


_RECORDS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".parquet": _read_parquet,
}


def _no_field(field: str, names: list[str]) -> str:
    return f"has no field {field!r}{nearest(field, names)}, only {', '.join(names) or 'none'}: set data.text_field"


def _files_below(root: Path, skip_folder: Callable[[str], bool]) -> Iterator[Path]:
    """Yields all files below a folder, sorted by their relative path with "/" on every platform.

    Links are among them, also those to nothing or to a folder, which is not entered.
    """

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or root), error) from error

    names = []
    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not skip_folder(name)]
        files += [name for name in folders if os.path.islink(os.path.join(folder, name))]
        names += [(Path(folder) / name).relative_to(root).as_posix() for name in files]
    return (root / name for name in sorted(names))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _decode(raw: bytes, path: Path, offset: int) -> str:
    """Decodes bytes that stand at `offset` of the file."""
    mark = len(codecs.BOM_UTF8) if offset == 0 and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        return raw[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = mark + error.start
        raise InputError(
            f"{path}: byte 0x{raw[at]:02x} at offset {offset + at} is not UTF-8 ({error.reason}): convert the file to "
            "UTF-8 (iconv does) or leave it out"
        ) from None


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path} cannot be read: {error.strerror or error}")
