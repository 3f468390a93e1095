"""Documents from files: what is read, in which order, and what a mistake says."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxshard.config import DataConfig
from jaxshard.data.corpus import PIECE, cut_text, read_documents
from jaxshard.data.dataset import build, check_vocabulary
from jaxshard.errors import InputError

SMALL = DataConfig(seq_len=8)


def config(path: Path | str, **fields) -> DataConfig:
    return dataclasses.replace(SMALL, path=str(path), **fields)


def texts(path: Path | str, **fields) -> list[str]:
    return [document.text for document in read_documents(config(path, **fields))]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jsonl(path: Path, records: list) -> Path:
    return write(path, "".join(json.dumps(record) + "\n" for record in records))


def message(data: DataConfig) -> str:
    with pytest.raises(InputError) as caught:
        build(data)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_stdlib_is_the_same_each_time_and_holds_no_tests():
    first, second = list(read_documents(DataConfig())), list(read_documents(DataConfig()))
    assert first == second
    sources = [document.source for document in first]
    assert len(sources) > 100 and any("/json/decoder.py" in source for source in sources)
    assert not any(f"/{folder}/" in s for s in sources for folder in ("test", "tests", "idle_test", "site-packages"))


def test_stdlib_trains_on_millions_of_tokens():
    dataset = build(DataConfig())
    assert dataset.train.n_tokens > 3_000_000 and dataset.eval.documents > 5
    assert dataset.describe().startswith("stdlib: ") and "\n" not in dataset.describe()


def test_text_file_is_split_at_separator_lines_only(tmp_path):
    path = write(
        tmp_path / "a.txt",
        "one\r\n<|endoftext|>\r\ntwo <|endoftext|> two<|endoftext|>\n<|endoftext|>\n<|endoftext|>\nthree",
    )
    assert texts(path) == ["one\r\n", "two <|endoftext|> two<|endoftext|>\n", "three"]


@pytest.mark.parametrize("text", ["a line of text\n" * 90_000, "word " * 9_000, "x" * 5_000, "é\n" * 40_000, "short"])
def test_single_document_is_cut_into_pieces_that_are_the_text_again(tmp_path, text):
    pieces = texts(write(tmp_path / "a.txt", text))
    assert "".join(pieces) == text and pieces == cut_text(text)
    assert (len(pieces) > 3) == (len(text) > 4096)
    assert max(map(len, pieces)) <= PIECE + 15
    for mark in "\n ":
        if mark in text.strip():
            assert all(piece.endswith(mark) for piece in pieces[:-1])
            break


def test_folder_is_read_recursively_in_order_without_hidden_and_binary_files(tmp_path):
    write(tmp_path / "b.txt", "two")
    write(tmp_path / "a" / "z.md", "one")
    write(tmp_path / "c.py", "three\n<|endoftext|>\nfour")
    jsonl(tmp_path / "d.jsonl", [{"text": "five"}, {"text": "six"}])
    write(tmp_path / "image.png", b"\x89PNG\0\0")
    write(tmp_path / ".git" / "config", "hidden")
    write(tmp_path / ".env", "hidden")
    write(tmp_path / "empty.txt", "")
    assert texts(tmp_path) == ["one", "two", "three\n", "four", "five", "six"]


def test_jsonl_and_parquet_give_the_same_documents(tmp_path):
    rows = ["first\nline", "", None, "zweite Zeile ü", "三"]
    parquet = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(5), "body": rows}), parquet)
    lines = jsonl(tmp_path / "a.jsonl", [{"id": i, "body": row} for i, row in enumerate(rows)])
    assert (
        texts(parquet, text_field="body") == texts(lines, text_field="body") == ["first\nline", "zweite Zeile ü", "三"]
    )


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_string_types(tmp_path, kind):
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).cast(kind)}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["a", "b", "a"]


def test_byte_order_mark_is_dropped(tmp_path):
    assert texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfhi")) == ["hi"]
    assert texts(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "hi"}')) == ["hi"]


@pytest.mark.parametrize(
    ("name", "content", "offset"),
    [
        ("a.txt", b"good\n\xff bad", 5),
        ("a.txt", b"\xef\xbb\xbfgood\xc3", 7),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xe9"}\n', 25),
        ("a.py", "é".encode() + b"\x80", 2),
    ],
)
def test_bad_utf8_names_file_and_offset(tmp_path, name, content, offset):
    path = write(tmp_path / name, content)
    assert f"{path}: byte 0x" in message(config(path)) and f"at offset {offset} " in message(config(path))


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.txt", "", ["holds no text"]),
        ("a.jsonl", "\n\n", ["holds no text"]),
        ("a.bin", b"", ["is empty"]),
        ("a.bin", b"123", ["3 bytes", "no multiple of the 2 bytes"]),
        ("a.json", "{}", [".jsonl"]),
        ("a.gz", b"\x1f\x8b\x08\0", ["compressed by gzip: unpack it first"]),
        ("a.npy", b"\x93NUMPY\1\0", ["a NumPy array", "tofile('ids.bin')"]),
        ("a.txt", b"abc\0", ["NUL byte at offset 3", ".parquet"]),
        ("a.md", b"abc\0", ["NUL byte at offset 3", ".parquet"]),
        ("a.txt", b"x" * 10_000 + b"\0", ["NUL byte at offset 10,000"]),
        ("a.txt", "hi".encode("utf-16"), ["NUL byte at offset 3", "UTF-16", "iconv"]),
        ("a.jsonl", '{"text": "a"}\nnonsense\n', ["line 2 is not JSON"]),
        ("a.jsonl", '["a"]', ["line 1 is a JSON list"]),
        ("a.jsonl", '{"txt": "a"}', ["no field 'text'", "did you mean 'txt'", "data.text_field"]),
        ("a.jsonl", '{"text": 3}', ["line 1: field 'text' is a int"]),
        ("a.jsonl", '{"text": "a\\ud800"}', ["line 1: \\ud800 at character 1"]),
        ("a.parquet", "no parquet", ["cannot be read as parquet"]),
        ("a.txt", "tiny", ["5 tokens in 1 documents", "data.seq_len=8", "--data.seq_len to 4 or less"]),
        ("a.txt", "one document of some length", ["single document", "--data.eval_fraction 0"]),
    ],
)
def test_bad_data_says_what_and_how_to_mend_it(tmp_path, name, content, parts):
    path = write(tmp_path / name, content)
    text = message(config(path))
    assert all(part in text for part in parts) and str(path) in text


def test_missing_path_names_the_nearest(tmp_path):
    write(tmp_path / "corpus.txt", "x")
    text = message(config(tmp_path / "corpsu.txt"))
    assert "does not exist (did you mean 'corpus.txt'?)" in text and "data.path" in text
    assert "data.path '' does not exist" in message(config(""))
    assert "does not exist" in message(config(tmp_path / "none" / "a.bin"))


def test_folder_says_in_one_line_what_it_left_out(tmp_path):
    write(tmp_path / "train.bin", b"abab")
    text = message(config(tmp_path))
    assert f"1 file left out that is no UTF-8 text, such as {tmp_path / 'train.bin'}; a .bin file of token ids" in text
    write(tmp_path / "a.txt", b"one\n<|endoftext|>\nNUL \0")
    write(tmp_path / "b.md", b"NUL \0")
    write(tmp_path / "c.txt", b"NUL " * 5_000 + b"\0")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "folder").symlink_to(tmp_path.parent)
    write(tmp_path / "z.txt", "two and three\n<|endoftext|>\nfour and five")
    dataset = build(config(tmp_path))
    assert dataset.train.documents + dataset.eval.documents == 2
    assert dataset.describe().endswith(f"; 6 files left out that are no UTF-8 text, such as {tmp_path / 'a.txt'}")
    assert "left out" not in build(config(tmp_path / "z.txt")).describe()


def test_parquet_without_the_field_or_with_numbers_in_it(tmp_path):
    pq.write_table(pa.table({"texts": ["a"], "n": [1]}), tmp_path / "a.parquet")
    assert "did you mean 'texts'?" in message(config(tmp_path / "a.parquet"))
    assert "column 'n' is of type int64" in message(config(tmp_path / "a.parquet", text_field="n"))


def test_short_text_needs_no_full_sequence_when_padded(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "de"}])
    assert "too few" in message(config(path))
    dataset = build(config(path, pack=False))
    assert (len(dataset.train), len(dataset.eval)) == (1, 1)
    assert f"in 1 rows of 8 ({(8 - dataset.train.n_targets) / 8:.0%} of them padding)" in dataset.describe()


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin_file_is_mapped_and_split_at_its_end_of_document_ids(tmp_path, dtype):
    ids = np.array([5, 6, 7, 9, 1, 2, 9, 9, 3, 4], dtype)
    path = write(tmp_path / "a.bin", ids.tobytes())
    dataset = build(config(path, tokenizer="ids:9", bin_dtype=dtype, pack=False, eval_fraction=0))
    assert isinstance(dataset.train.tokens.base, np.memmap)
    assert dataset.train.starts.tolist() == [0, 4, 8] and dataset.train.lengths.tolist() == [4, 3, 2]
    assert (dataset.max_id, dataset.tokenizer.vocab_size, dataset.tokenizer.name) == (9, 10, "ids:9")


def test_bin_file_without_known_ends_is_cut_into_pieces(tmp_path):
    path = write(tmp_path / "a.bin", np.arange(10_000, dtype=np.uint16).tobytes())
    dataset = build(config(path, tokenizer="ids"))
    assert dataset.train.documents + dataset.eval.documents == 10
    assert dataset.train.n_tokens + dataset.eval.n_tokens == 10_000


IDS = np.random.default_rng(0).integers(4, 50257, 600)


def llm_c(magic: int, version: int, ids: np.ndarray, count: int | None = None) -> bytes:
    """A token file as llm.c's dev/data/data_common.py writes it."""
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(ids) if count is None else count
    return header.tobytes() + ids.tobytes()


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, np.uint16), (20240801, 7, np.uint32)])
def test_token_files_of_llm_c_are_read_by_their_header(tmp_path, magic, version, dtype):
    path = write(tmp_path / "a.bin", llm_c(magic, version, IDS.astype(dtype)))
    dataset = build(config(path, tokenizer="ids", eval_fraction=0))
    assert dataset.train.tokens.tolist() == IDS.tolist() and dataset.train.tokens.dtype == dtype
    other = "uint32" if dtype == np.uint16 else "uint16"
    assert f"bin_dtype is {other}, but the header of" in message(config(path, tokenizer="ids", bin_dtype=other))


SHORT = IDS.astype(np.uint16)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (llm_c(20240520, 1, SHORT, 700), "its header says 700 tokens of 2 bytes, 1,400 in all, and 1,200 follow it"),
        (llm_c(20240520, 2, SHORT), "magic 20240520 and version 2"),
        (llm_c(20250211, 1, SHORT), "magic 20250211 and version 1"),
        (llm_c(20240520, 1, SHORT)[:500], "in 500 bytes of header"),
        (llm_c(20240522, 1, SHORT), "an evaluation set of llm.c"),
        (b"\x93NUMPY\1\0" + SHORT.tobytes(), "a NumPy array"),
        (b"\x1f\x8b\x08\0" + SHORT.tobytes(), "gunzip"),
        (b'\x40\0\0\0\0\0\0\0{"a":' + SHORT.tobytes(), "a safetensors file"),
        (b"PK\3\4" + SHORT.tobytes(), "torch.save"),
        ("Es war einmal ein Bär\n".encode() * 9, "is text, beginning with b'Es war einmal ein B"),
        (IDS.astype(np.uint32).tobytes(), "every second one is below 4"),
    ],
)
def test_a_bin_file_that_holds_something_else_is_refused_by_name(tmp_path, content, said):
    path = write(tmp_path / "a.bin", content)
    text = message(config(path, tokenizer="ids"))
    assert said in text and str(path) in text


def test_ids_of_another_type_than_asked_for(tmp_path):
    """uint32 read as uint16 is taken where the user insists, uint16 read as uint32 makes ids that nothing can hold."""
    few = np.array([[0, 0], [1, 2], [4, 3]] * 20, np.uint16)  # five kinds, one at even positions only by chance
    assert build(config(write(tmp_path / "few.bin", few.tobytes()), tokenizer="ids", eval_fraction=0)).max_id == 4
    wide = write(tmp_path / "wide.bin", IDS.astype(np.uint32).tobytes())
    assert build(config(wide, tokenizer="ids", bin_dtype="uint16")).max_id == IDS.max()
    text = message(config(write(tmp_path / "a.bin", SHORT.tobytes()), tokenizer="ids", bin_dtype="uint32"))
    assert "of the 300 ids" in text and "the file may not hold uint32 ids" in text


@pytest.mark.parametrize(("code", "said"), [(8, "--data.bin_dtype uint16"), (4, "bin_dtype uint32"), (5, "its int64")])
def test_half_of_a_megatron_dataset_is_refused(tmp_path, code, said):
    path = write(tmp_path / "a.bin", SHORT.tobytes())
    write(tmp_path / "a.idx", b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([code]) + bytes(99))
    text = message(config(path, tokenizer="ids"))
    assert "Megatron-LM" in text and "a.idx beside it" in text and said in text


def test_bin_file_of_another_tokenizer_is_refused(tmp_path):
    path = write(tmp_path / "a.bin", np.array([1, 2, 50256] * 9, np.uint16).tobytes())
    text = message(config(path))
    assert "'bytes' has only 257 tokens, but 9 of the 27 ids" in text and "ids:50256" in text
    assert "the first of them 50,256 at position 2" in text and "uint16 ids (--data.bin_dtype)" in text
    assert "the largest id" in message(config(path, tokenizer="ids:50257"))
    assert "is for .bin files" in message(DataConfig(tokenizer="ids"))


def test_vocabulary_is_checked_against_tokenizer_and_ids(tmp_path):
    text = jsonl(tmp_path / "a.jsonl", [{"text": "some text"}] * 3)
    check_vocabulary(build(config(text)), 257)
    with pytest.raises(InputError, match=r"vocab_size is 256, but data.tokenizer 'bytes' has 257 .* 257 or more"):
        check_vocabulary(build(config(text)), 256)
    ids = write(tmp_path / "a.bin", np.array([1, 2, 99] * 9, np.uint16).tobytes())
    dataset = build(config(ids, tokenizer="ids:99"))
    check_vocabulary(dataset, 100)
    with pytest.raises(InputError, match=r"9 of the 27 ids .* first of them 99 at position 2.*vocab_size to 100"):
        check_vocabulary(dataset, 99)
