"""Tokenizers: round trips, end-of-document ids, and decoding that never raises."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxshard.config import DataConfig
from jaxshard.data import build, check_vocabulary, load_tokenizer
from jaxshard.errors import InputError
from jaxshard.inference.generate import prompt_ids

TEXTS = ["", "Hello, world", "naïve Größe 三 🙂\n\ttabs", "\ufffd\0"]


def make(folder: Path, special: list[str], begin: str | None = None) -> tokenizers.Tokenizer:
    """Trains a byte-level BPE of about 300 ids and saves it as folder/tokenizer.json."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the cat " * 20], trainer)
    if begin:
        begin_id = tokenizer.token_to_id(begin)
        tokenizer.post_processor = processors.TemplateProcessing(f"{begin} $A", None, [(begin, begin_id)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_round_trip(text):
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and bytes(ids.tolist()) == text.encode()
    assert tokenizer.decode(ids) == text
    assert (tokenizer.vocab_size, tokenizer.eod, len(tokenizer.start)) == (257, 256, 0)


@pytest.mark.parametrize("text", TEXTS)
def test_hugging_face_round_trip_by_file_and_folder(tmp_path, text):
    reference = make(tmp_path, ["<|endoftext|>"])
    for spec in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(str(spec))
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and ids.tolist() == reference.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert (tokenizer.eod, tokenizer.vocab_size, len(tokenizer.start)) == (0, reference.get_vocab_size(), 0)


def test_decode_takes_any_ids(tmp_path):
    make(tmp_path, ["</s>"])
    generator = np.random.default_rng(0)
    for spec in ("bytes", "ids", str(tmp_path)):
        tokenizer = load_tokenizer(spec)
        for low, high in ((0, 257), (-5, 400), (-(2**31), 2**31)):
            assert isinstance(tokenizer.decode(generator.integers(low, high, 500)), str)
        assert tokenizer.decode([]) == "" and tokenizer.decode(np.zeros((0, 3), np.int32)) == ""
    assert load_tokenizer("bytes").decode([226, 130, 256, 65, -1, 999]) == "\ufffdA"


def test_text_with_surrogates_is_encoded_with_question_marks(tmp_path):
    make(tmp_path, ["</s>"])
    for spec in ("bytes", str(tmp_path)):
        tokenizer = load_tokenizer(spec)
        assert tokenizer.decode(tokenizer.encode("a\udc80b")) == "a?b"


def test_end_of_document_is_the_configured_or_the_usual_token(tmp_path):
    make(tmp_path, ["<pad>", "<|eot_id|>", "</s>"])
    assert load_tokenizer(str(tmp_path)).eod == 2
    for end in ("<|eot_id|>", {"content": "<|eot_id|>", "lstrip": False}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        assert load_tokenizer(str(tmp_path)).eod == 1
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": null}')
    assert load_tokenizer(str(tmp_path)).eod == 2


def test_documents_start_with_the_template_and_end_with_the_end_token(tmp_path):
    make(tmp_path / "tok", ["<s>", "</s>"], begin="<s>")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("the cat", "the dog")))
    config = DataConfig(str(tmp_path / "a.jsonl"), str(tmp_path / "tok"), seq_len=2, eval_fraction=0)
    dataset = build(config)
    tokenizer, rows = dataset.tokenizer, dataset.train
    assert tokenizer.start.tolist() == [0] and tokenizer.eod == 1
    document = rows.tokens[rows.starts[1] : rows.starts[1] + rows.lengths[1]]
    assert document.tolist() == [0, *tokenizer.encode("the dog"), 1]


TEMPLATES = {
    "template": processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)]),
    "two": processors.TemplateProcessing("<s> </s> $A", None, [("<s>", 0), ("</s>", 1)]),
    "bert": processors.BertProcessing(("</s>", 1), ("<s>", 0)),
    "roberta": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    "sequence": processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])]
    ),
    "end only": processors.TemplateProcessing("$A </s>", None, [("</s>", 1)]),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_start_is_what_the_post_processor_says_also_without_an_a(tmp_path, name):
    """A vocabulary of words: of a text without a known one nothing is left to find the start beside."""
    words = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "cat": 2}, unk_token="cat"))
    words.add_special_tokens(["<s>", "</s>"])
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.model = models.BPE({"<s>": 0, "</s>": 1, "c": 2}, [])
    words.post_processor = TEMPLATES[name]
    words.save(str(tmp_path / "tokenizer.json"))
    assert words.encode("a", add_special_tokens=False).ids == []
    full = words.encode("c").ids
    assert load_tokenizer(str(tmp_path)).start.tolist() == full[: full.index(2)]


def test_a_text_that_writes_out_start_and_end_gets_no_second_ones(tmp_path):
    make(tmp_path / "tok", ["<s>", "</s>"], begin="<s>")
    written = ("the cat", "<s>the cat", "the cat</s>", "<s>the cat</s>")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in written))
    rows = build(DataConfig(str(tmp_path / "a.jsonl"), str(tmp_path / "tok"), seq_len=2, eval_fraction=0)).train
    documents = [rows.tokens[at : at + n].tolist() for at, n in zip(rows.starts, rows.lengths, strict=True)]
    tokenizer = load_tokenizer(str(tmp_path / "tok"))
    assert documents == [[0, *tokenizer.encode("the cat").tolist(), 1]] * 4
    assert prompt_ids(tokenizer, "<s>the").tolist() == prompt_ids(tokenizer, "the").tolist()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"eos_token": "<end>"}', "eos_token is '<end>', which is none of the"),
        ('{"eos_token": {"content": "<end>"}}', "name one that is, such as '</s>'"),
        ('{"eos_token": 3}', "eos_token is 3, and must be a token's text"),
        ('{"eos_token": {}}', "must be a token's text"),
        ("[]", "is a JSON list: it must be an object"),
        ("{", "is not JSON"),
    ],
)
def test_an_end_token_that_cannot_be_taken_is_refused(tmp_path, config, said):
    make(tmp_path, ["<pad>", "</s>"])
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(InputError, match=r"tokenizer_config\.json") as refused:
        load_tokenizer(str(tmp_path))
    assert said in str(refused.value)


def test_tokenizer_larger_than_the_vocabulary_is_refused_although_the_text_would_fit(tmp_path):
    size = make(tmp_path / "tok", ["</s>"]).get_vocab_size()
    (tmp_path / "a.txt").write_text("AAAA")
    dataset = build(DataConfig(str(tmp_path / "a.txt"), str(tmp_path / "tok"), seq_len=2, eval_fraction=0))
    assert dataset.max_id < 100
    check_vocabulary(dataset, size)
    with pytest.raises(InputError, match=f"vocab_size is {size - 1}, but data.tokenizer .*tok' has {size} tokens"):
        check_vocabulary(dataset, size - 1)


def test_truncation_and_padding_of_the_file_are_turned_off(tmp_path):
    reference = make(tmp_path, ["</s>", "<pad>"])
    full = reference.encode("the cat sat on the mat").ids
    reference.enable_truncation(max_length=3)
    reference.enable_padding(pad_id=1, pad_token="<pad>", length=64)
    reference.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert len(full) > 3
    assert [ids.tolist() for ids in tokenizer.encode_batch(["the cat sat on the mat", ""])] == [full, []]


def test_identity_is_of_what_a_tokenizer_does_and_not_of_its_file(tmp_path):
    tokenizer = make(tmp_path / "a", ["</s>", "<s>"])
    first = load_tokenizer(str(tmp_path / "a")).identity
    (tmp_path / "a" / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    make(tmp_path / "b", ["</s>"])
    tokenizer.enable_truncation(max_length=3)
    (tmp_path / "c").mkdir()
    tokenizer.save(str(tmp_path / "c" / "tokenizer.json"), pretty=False)
    assert load_tokenizer(str(tmp_path / "c")).identity == first
    assert first not in [load_tokenizer(str(tmp_path / name)).identity for name in "ab"]


def test_ids_are_numbers():
    tokenizer = load_tokenizer("ids:7")
    assert tokenizer.encode("3 14 15").tolist() == [3, 14, 15] and tokenizer.decode([3, 14]) == "3 14"
    for text in ("3 x", "-1", "²", str(2**31)):
        with pytest.raises(InputError, match="token ids such as"):
            tokenizer.encode(text)


def test_mistakes_say_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "no_end", ["<pad>"])
    (tmp_path / "broken.json").write_text('{"model": {}}')
    (tmp_path / "empty").mkdir()
    expected = {
        "gpt2": "data.tokenizer 'gpt2' does not exist: it must be bytes, ids, or the path",
        "ids:x": "such as ids:50256",
        str(tmp_path / "no_end"): "has no end-of-document token: none of <|endoftext|>",
        str(tmp_path / "broken.json"): "is not a Hugging Face tokenizer.json",
        str(tmp_path / "empty"): "is a folder without a tokenizer.json",
    }
    for spec, part in expected.items():
        with pytest.raises(InputError) as caught:
            load_tokenizer(spec)
        assert part in str(caught.value)
