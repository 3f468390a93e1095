"""Text to token ids and back.

`data.tokenizer` is one of
  bytes              the 256 byte values of UTF-8, and 256 for the end of a document.
  a tokenizer.json   of Hugging Face, or the folder that holds it. Documents begin as its post-processor says. The
                     end-of-document token is the `eos_token` of a tokenizer_config.json beside it; where that names
                     none, the first of `END_TOKENS` in the vocabulary.
  ids, ids:EOD       for a .bin file whose tokenizer is not at hand: text is the ids, written as numbers.
These words are no paths: a folder of such a name is ./bytes.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxshard.data.corpus import existing, read_text
from jaxshard.errors import InputError

if TYPE_CHECKING:
    import tokenizers

END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|im_end|>",
    "<|endofdocument|>",
    "<｜end▁of▁sentence｜>",  # noqa: RUF001 - DeepSeek spells it with these signs
    "[EOS]",
    "[SEP]",
)
"""Names under which tokenizers know the end of a document, tried in this order."""

_NONE = np.zeros(0, np.int32)


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer."""

    @property
    def name(self) -> str:
        """What `data.tokenizer` says."""
        ...

    @property
    def identity(self) -> str:
        """The same for tokenizers that make the same ids of every text, whatever their files are called."""
        ...

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""
        ...

    @property
    def eod(self) -> int | None:
        """Id that ends every document; None when it is not known."""
        ...

    @property
    def start(self) -> np.ndarray:
        """int32 ids that stand before every document and prompt (a Llama model's begin token); often none."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns int32 ids [n] of the text alone, without `start` and `eod`."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns `encode` of each text, faster."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of any ids: it skips ids that stand for no text and replaces broken UTF-8; never raises."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """A byte is a token."""

    name = identity = "bytes"
    vocab_size = 257
    eod = 256
    start = _NONE

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        known = _known(ids, 256)
        return known.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


@dataclass(frozen=True)
class IdTokenizer:
    """Token ids as they are, for a .bin file whose tokenizer is not at hand."""

    eod: int | None = None
    vocab_size: int = 2**16
    """Replaced by the largest id of the data + 1 once it is known."""
    start = _NONE

    @property
    def name(self) -> str:
        return "ids" if self.eod is None else f"ids:{self.eod}"

    @property
    def identity(self) -> str:
        return self.name

    def encode(self, text: str) -> np.ndarray:
        words = text.split()
        wrong = next((word for word in words if not (word.isascii() and word.isdigit()) or int(word) >= 2**31), None)
        if wrong is not None:
            raise InputError(f"data.tokenizer={self.name} takes token ids such as '15496 995', not {wrong!r}")
        return np.array([int(word) for word in words], np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(str(i) for i in np.asarray(ids).reshape(-1).tolist())


@dataclass(frozen=True, eq=False)
class HuggingFaceTokenizer:
    """A tokenizer.json through the `tokenizers` package. Special tokens written out in a text are read as such.

    Attributes:
        content: hash of the file.
    """

    name: str
    content: str
    tokenizer: "tokenizers.Tokenizer"
    vocab_size: int
    eod: int
    start: np.ndarray

    @property
    def identity(self) -> str:
        return ":".join([self.content, *map(str, self.start.tolist()), str(self.eod)])

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        clean = [text.encode("utf-8", errors="replace").decode() for text in texts]  # a surrogate would raise
        encodings = self.tokenizer.encode_batch_fast(clean, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.tokenizer.decode(_known(ids, self.vocab_size).tolist())


def started(tokenizer: Tokenizer, ids: np.ndarray) -> np.ndarray:
    """Returns the ids [n] of a text with the tokenizer's `start` before them, unless the text writes it out itself."""
    start = tokenizer.start
    return ids if len(start) and np.array_equal(ids[: len(start)], start) else np.concatenate([start, ids])


def load_tokenizer(spec: str) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names.

    Raises InputError when the file is missing or broken, has no end-of-document token, or not the one that the
    tokenizer_config.json beside it names, or has a post-processor of an unknown kind.
    """
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "ids":
        return IdTokenizer()
    if spec.startswith("ids:"):
        if not spec[4:].isascii() or not spec[4:].isdigit():
            file = f" (the file of this name is ./{spec})" if os.path.exists(spec) else ""
            raise InputError(
                f"data.tokenizer {spec!r}: after ids: comes the end-of-document id, such as ids:50256{file}"
            )
        return IdTokenizer(eod=int(spec[4:]))
    return _load_hugging_face(spec)


def whole_tokenizer_path(spec: str) -> str:
    """Returns the whole path of a `data.tokenizer`, to be found from any folder; a word stays as it is."""
    word = spec in ("bytes", "ids") or spec.startswith("ids:")
    return spec if word else str(Path(os.path.expanduser(spec)).absolute())


def _load_hugging_face(spec: str) -> HuggingFaceTokenizer:
    import tokenizers  # only these need it

    kinds = "bytes, ids, or the path of a tokenizer.json (names on the Hugging Face hub are not downloaded)"
    path = existing(spec, "data.tokenizer", kinds)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise InputError(f"data.tokenizer {spec!r} is a folder without a tokenizer.json: it must be {kinds}")
    try:
        text = read_text(path)
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except InputError:
        raise
    except Exception as error:  # the package raises plain Exception
        raise InputError(f"data.tokenizer {spec!r} is not a Hugging Face tokenizer.json: {error}") from error
    # files saved after fine-tuning often carry these; they would cut or pad every document
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eod = _end(spec, tokenizer, path.with_name("tokenizer_config.json"))
    # the largest id, not the number of entries: some vocabularies have gaps
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    start = np.array(_template_start(spec, json.loads(tokenizer.to_str())["post_processor"]), np.int32)
    return HuggingFaceTokenizer(spec, _content(text), tokenizer, vocab_size, eod, start)


def _content(text: str) -> str:
    """Hash of a tokenizer.json without what is turned off here and without its layout as text."""
    used = {key: value for key, value in json.loads(text).items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:16]


def _template_start(spec: str, processor: dict[str, Any] | None) -> list[int]:
    """Returns the ids that a post-processor, as tokenizer.json states it, puts before a text."""
    kind = processor and processor["type"]
    match processor:
        case None | {"type": "ByteLevel"}:
            return []
        case {"type": "TemplateProcessing", "single": pieces, "special_tokens": tokens}:
            before = itertools.takewhile(lambda piece: "SpecialToken" in piece, pieces)
            return [i for piece in before for i in tokens[piece["SpecialToken"]["id"]]["ids"]]
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, int(first)]}:
            return [first]
        case {"type": "Sequence", "processors": inner}:  # each takes what the one before it made
            return [i for each in reversed(inner) for i in _template_start(spec, each)]
    raise InputError(
        f"data.tokenizer {spec!r} has a post-processor of type {kind!r}, which may put tokens before a text: known are "
        "TemplateProcessing, BertProcessing, RobertaProcessing, ByteLevel and Sequence"
    )


def _end(spec: str, tokenizer: "tokenizers.Tokenizer", config: Path) -> int:
    """Returns the id that ends documents: of the eos_token in tokenizer_config.json, or one known by its name."""
    size = tokenizer.get_vocab_size()
    usual = {name: eod for name in END_TOKENS if (eod := tokenizer.token_to_id(name)) is not None}
    name = _configured_end(config)
    if name is not None:
        eod = tokenizer.token_to_id(name)
        if eod is None:
            fix = f"such as {', '.join(map(repr, usual))}" if usual else "or take the vocabulary that belongs to it"
            raise InputError(
                f"{config} says that the eos_token is {name!r}, which is none of the {size:,} tokens of data.tokenizer "
                f"{spec!r}: name one that is, {fix}"
            )
        return eod
    if not usual:
        raise InputError(
            f"data.tokenizer {spec!r} with {size:,} tokens has no end-of-document token: none of "
            f"{', '.join(END_TOKENS)} is in its vocabulary. Name one of its tokens in a tokenizer_config.json "
            'beside it: {"eos_token": "..."}'
        )
    return next(iter(usual.values()))


def _configured_end(path: Path) -> str | None:
    """Returns the eos_token of a tokenizer_config.json, None where there is no such file or it names none."""
    if not path.is_file():
        return None
    try:
        config = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(
            f"{path} is a JSON {type(config).__name__}: it must be an object, such as {{'eos_token': ...}}"
        )
    end = config.get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    if end is not None and not isinstance(text, str):
        raise InputError(f"{path}: eos_token is {end!r}, and must be a token's text")
    return text


def _known(ids: Sequence[int] | np.ndarray, size: int) -> np.ndarray:
    """Returns the ids in [0, size), flat, as int64."""
    flat = np.asarray(ids, dtype=np.int64).reshape(-1)
    return flat[(flat >= 0) & (flat < size)]
