"""The command `plan`: its table, its JSON, the command line that it prints, and what it refuses."""

import json
import re
import shlex
from dataclasses import replace

import pytest

from jaxshard.commands import cli
from jaxshard.config import Config, grouped
from jaxshard.models.transformer import padded_vocab
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import resolve_mesh
from jaxshard.planner.search import Candidate, divisors, pins_of

GIB = 2**30


def plan(capsys, *arguments):
    """Exit code, stdout and stderr of the command."""
    code = cli.run(["plan", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def understood(each):
    """The command of a plan in JSON, as the program reads it."""
    words = shlex.split(each["command"])
    if words[0] == "env":
        assert words[1] == "XLA_PYTHON_CLIENT_MEM_FRACTION=0.9"
        del words[:2]
    assert words[:2] == ["python", "run.py"]
    return cli.understand(words[2:])


LLAMA = ("--model.preset", "llama3-8b", "--train.global_batch", "64", "--data.seq_len", "8192", "--confirm", "0")


def test_json_is_the_contract(capsys):
    code, out, _ = plan(capsys, *LLAMA, "--target", "h100:8", "--json")
    result = json.loads(out)
    assert code == 0
    assert set(result) == {"target", "model", "plans"}
    first = result["plans"][0]
    assert list(first) == [
        *("command", "mesh", "zero", "remat", "microbatches", "accumulation", "offload", "memory", "compiled_peak"),
        *("fits", "step_seconds", "mfu", "reasons", "compiled_time", "expected_seconds"),
    ]
    assert list(first["memory"]) == [
        *("parameters", "gradients", "optimizer", "master", "activations", "logits", "buffers", "host", "total")
    ]
    assert first["compiled_peak"] is None
    assert first["fits"]
    assert 0 < first["mfu"] < 1


def test_the_command_of_a_plan_is_understood_and_says_the_same(capsys):
    _, out, _ = plan(capsys, *LLAMA, "--target", "h100:8", "--json")
    for each in json.loads(out)["plans"]:
        config = understood(each).config
        assert (config.zero, config.parallel.remat, config.parallel.accumulation, config.parallel.offload) == (
            each["zero"],
            each["remat"],
            each["accumulation"],
            each["offload"],
        )
        assert str(resolve_mesh(config.mesh, 8)) == each["mesh"]
        assert config.parallel.microbatches == each["microbatches"]
        assert config.train.precision == "bf16"
        assert (config.model.preset, config.data.seq_len) == ("llama3-8b", 8192)


def test_what_a_file_says_is_overridden_where_the_plan_differs(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "zero: 3\nmodel: {preset: gpt2-124m}\ndata: {seq_len: 512}\n"
        "train: {global_batch: 16, precision: bf16}\nparallel: {accumulation: 4, remat: full}\n"
    )
    code, out, _ = plan(capsys, "--config", str(file), "--target", "h100:1", "--confirm", "0", "--best")
    assert code == 0
    config = understood({"command": out}).config
    assert (config.zero, config.parallel.accumulation, config.parallel.remat) == (0, 1, "none")


OWN = """
mesh: pp=4,dp=2
zero: 3
fake_devices: 4
parallel: {offload: optimizer, offload_mode: host, pipeline_gather: step}
"""


def test_options_that_the_layout_does_not_have_are_taken_back(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(OWN)
    _, out, _ = plan(capsys, *LLAMA, "--config", str(file), "--target", "h100:8", "--json")
    configs = [understood(each).config for each in json.loads(out)["plans"]]
    assert {config.fake_devices for config in configs} == {None}
    assert {config.parallel.offload_mode for config in configs} == {None}
    assert {config.parallel.pipeline_gather for config in configs if "pp" not in (config.mesh or "")} == {None}
    file.write_text("devices: cpu\nfake_devices: 8\n")
    _, out, _ = plan(capsys, *LLAMA, "--config", str(file), "--target", "h100:8", "--best")
    config = understood({"command": out}).config
    assert (config.devices, config.fake_devices) == ("auto", None)


def test_an_option_of_some_layouts_leaves_only_those(capsys):
    _, out, _ = plan(capsys, *LLAMA, "--parallel.pipeline_gather", "step", "--target", "h100:8", "--json")
    for each in json.loads(out)["plans"]:
        assert each["zero"] == 3 and "pp" in each["mesh"]
        assert understood(each).config.parallel.pipeline_gather == "step"
    pins = pins_of(Config(**grouped(offload="optimizer", offload_mode="host")), {"parallel.offload_mode": "host"})
    assert str(pins) == "--parallel.offload_mode host"
    own = Candidate(MeshShape(data=8), 1, "none")
    assert pins.allows(replace(own, offload="optimizer")) and not pins.allows(own)


NARROW = ("--model.family", "llama", "--model.d_model", "60", "--model.d_ff", "100", "--model.n_heads", "3")


def test_weights_that_may_stay_whole(capsys):
    arguments = (*NARROW, "--model.n_layers", "1", "--target", "h100:8", "--zero", "1", "--confirm", "0", "--best")
    code, _, err = plan(capsys, *arguments)
    assert code == 2
    assert "cannot be sharded as --zero asks: blocks.attention.key: no dim of" in err
    allowed = re.search(r"--parallel\.allow_replicated '(\[.*?\])'", err)
    assert allowed
    code, out, _ = plan(capsys, *arguments, "--parallel.allow_replicated", allowed[1])
    assert (code, "--mesh dp=8 --zero 1" in out) == (0, True)


def test_short_times_have_their_unit(capsys):
    _, out, _ = plan(capsys, *NARROW, "--model.n_layers", "1", "--target", "h100:8", "--confirm", "0")
    assert re.search(r"\d us +- ", out)
    assert not re.search(r" 0\.00 |\(.* 0 -> 0 ms", out)


def test_null_leaves_a_choice_free():
    assert pins_of(Config(), dict.fromkeys(("zero", "parallel.schedule", "parallel.microbatches"), "null")).fields == {}
    assert pins_of(Config(**grouped(zero=0)), {"zero": "0"}).fields == {"zero": 0}


def test_divisors():
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert len(divisors(2_000_000_000)) == 110


def test_best_prints_the_command_alone(capsys):
    code, out, err = plan(capsys, *LLAMA, "--target", "h100:8", "--best")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert "python run.py --model.preset llama3-8b" in out
    assert understood({"command": out}).config.model.preset == "llama3-8b"


def test_on_a_narrow_terminal_figures_are_whole_and_the_command_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal's
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = plan(capsys, *LLAMA, "--target", "h100:8")
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip() for line in out.splitlines()]
    command = next(line for line in lines if "python run.py" in line)
    assert "--mesh" in command and len(command) > 80
    table = "\n".join(line for line in lines if line.startswith("│"))
    assert re.search(r"│ +1 │ \S+=\S+ .*│ total \d+\.\d\d GiB +│ s/step \d+\.\d\d +│", table)
    for words in ("zero ", "remat ", "state ", "gradients ", "activations ", "buffers ", "tokens/s ", "MFU "):
        assert table.count(words) == 10, words


def test_the_table_says_why_and_how_to_confirm(capsys):
    code, out, _ = plan(capsys, *LLAMA, "--target", "h100:8")
    assert code == 0
    assert re.search(r"MFU \d\d % counting causal attention, \d\d % counting all of it", out)
    for words in ("Why the first", "Run it", "estimates", "--confirm 3", "collectives over", "does not fit"):
        assert words in out


def test_fewest_devices(capsys):
    _, out, _ = plan(capsys, *LLAMA, "--target", "h100:64", "--fewest", "--json")
    result = json.loads(out)
    assert result["target"] in ("h100:1", "h100:2", "h100:4")
    assert result["plans"][0]["fits"]


@pytest.mark.parametrize(
    "arguments,words",
    [
        (("--target", "h10:8"), ("h10", "h100")),
        (("--target", "h100:8", "--model.preset", "lama3-8b"), ("lama3-8b", "did you mean 'llama3-8b'")),
        (("--target", "h100:64", "--mesh", "tp=7,dp=-1"), ("tp=7", "64 devices")),
        (("--target", "h100:64", "--mesh", "tp=64"), ("n_heads = 32", "tp = 64")),
        (("--target", "h100:8", "--network", "fast"), ("fast", "gbps=25")),
        (("--target", "h100:8", "--memory_limit", "-1"), ("memory_limit", "positive")),
        (("--target", "h100:8", "--memory_limit", "80"), ("limits nothing", "71.20 GiB")),
        (("--target", "h100:8", "--network", "gbps=25"), ("changes nothing on h100:8", "one host")),
        (("--target", "v5e:16x16", "--network", "gbps=25"), ("changes nothing on v5e:16x16", "ICI")),
        (("--target", "cpu:8", "--network", "gbps=25"), ("no time is predicted",)),
        (("--target", "h100:8", "--fake_devices", "8"), ("--fake_devices 8 and --target h100:8 both say",)),
        (("--target", "h100:8", "--devices", "cpu"), ("--devices cpu and --target h100:8 both say",)),
        (("--target", "h100:8", "--report", ""), ("--report is empty",)),
        (
            ("--target", "h100:8", "--zero", "0", "--parallel.remat", "none", "--mesh", "dp=8"),
            ("--zero 0", "GiB", "it fits here without --mesh dp=8"),
        ),
        (
            ("--target", "h100:8", "--parallel.microbatches", "4", "--mesh", "dp=8", "--zero", "1"),
            ("--mesh dp=8 or --parallel.microbatches 4 stands in the way",),
        ),
        (
            ("--target", "h100:8", "--parallel.accumulation", "3"),
            ("64 does not divide by dp 8 x accumulation 3", "--parallel.accumulation 3 stands in the way"),
        ),
        (
            ("--target", "h100:8", "--parallel.microbatches", "7"),
            ("parallel.microbatches = 7 does not divide the 64", "--parallel.microbatches 7 stands in the way"),
        ),
        (
            ("--target", "h100:8", "--mesh", "dp=8", "--parallel.pipeline_gather", "step"),
            ("without stages there is no pipeline", "--parallel.pipeline_gather step stands in the way"),
        ),
        (
            ("--target", "h100:8", "--zero", "1", "--parallel.pipeline_gather", "step"),
            ("with --zero 1 every stage holds its parameters whole",),
        ),
        (
            ("--target", "h100:8", "--parallel.schedule", "gpipe", "--parallel.virtual_stages", "2"),
            ("schedule gpipe keeps the layers of a stage in one piece",),
        ),
        (("--target", "h100:8", "--memory_limit", "1e-9"), ("a device has more than that: raise the limit",)),
        (("--target", "h100:8", "--train.precision", "fp32", "--model.attention", "cudnn"), ("16-bit precision",)),
        (("--target", "cpu:8", "--model.attention", "cudnn"), ("needs a GPU",)),
        (("--target", "h100:8", "--model.vocab_size", "100"), ("vocab_size is 100", "has 257 tokens")),
    ],
)
def test_bad_input(capsys, arguments, words):
    base = LLAMA[2:] if "--model.preset" in arguments else LLAMA
    code, out, err = plan(capsys, *base, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_the_vocabulary_is_the_tokenizers_as_for_training(tmp_path, capsys):
    words = {f"w{number}": number for number in range(700)} | {"</s>": 700}
    kind = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": kind}))
    arguments = (*NARROW, "--model.n_layers", "1", "--target", "h100:1", "--confirm", "0", "--json")
    result = lambda *more: json.loads(plan(capsys, *arguments, *more)[1])["plans"][0]["memory"]["parameters"]
    rows = padded_vocab(701, 1) - padded_vocab(257, 1)  # of embedding and head, in bf16
    assert result("--data.tokenizer", str(tmp_path / "tokenizer.json")) - result() == 2 * 2 * 60 * rows
    small = ("--data.tokenizer", str(tmp_path / "tokenizer.json"), "--model.vocab_size", "700")
    assert "has 701 tokens: set --model.vocab_size to at least 701" in plan(capsys, *arguments, *small)[2]
    code, _, err = plan(capsys, *arguments, "--data.tokenizer", "nowhere.json")
    assert (code, "nowhere.json" in err) == (2, True)
    assert "model.vocab_size is missing" in plan(capsys, *arguments, "--data.tokenizer", "ids")[2]


def test_an_unknown_recomputation_is_all_that_is_said(capsys):
    code, _, err = plan(capsys, *LLAMA, "--target", "h100:8", "--parallel.remat", "foo")
    assert code == 2
    assert "'foo' is not known" in err
    assert "in the way" not in err


def test_a_model_that_fits_nowhere_names_the_smallest_hardware(capsys):
    arguments = ("--model.preset", "llama3-70b", "--train.global_batch", "64", "--data.seq_len", "4096")
    code, _, err = plan(capsys, *arguments, "--confirm", "0", "--target", "h100:1")
    assert code == 2
    assert "the smallest h100 target that fits is h100:" in err
    assert "needs" in err
