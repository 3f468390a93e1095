"""The planner: the six situations that users are in, pins, bad input, and what is printed."""

import json
import re
import shlex
from dataclasses import replace
from itertools import pairwise

import pytest

from jaxshard import cli
from jaxshard.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxshard.insight import host_memory, ranking
from jaxshard.insight.advice import reasons
from jaxshard.insight.hardware import CHIPS, parse_target
from jaxshard.insight.search import Candidate, Pins, apply, candidates, divisors, pins_of
from jaxshard.models.presets import architecture
from jaxshard.models.transformer import padded_vocab
from jaxshard.parallel.mesh import MeshShape, resolve_mesh
from jaxshard.training.pipeline_plan import plan_pipeline
from jaxshard.training.program import check_fit

GIB = 2**30


def settings(preset, batch, seq_len, **model):
    return Config(
        model=ModelConfig(preset=preset, **model) if preset else ModelConfig(**model),
        data=DataConfig(seq_len=seq_len),
        train=TrainConfig(precision="bf16", global_batch=batch),
    )


def search(config, target, network=None, **pins):
    hardware = parse_target(target)
    if network:
        hardware = hardware.with_network(network)
    arch = architecture(config.model, 257, config.data.seq_len)
    return ranking.search(config, arch, hardware, Pins(pins.pop("mesh", {}), pins))


def best(config, target, network=None):
    """The first plan and its reasons as one text."""
    found = search(config, target, network)
    return found.fitting[0].candidate, " ".join(reasons(found, found.fitting[0]))


# The six situations.


def test_one_gpu_that_fits_splits_nothing():
    plan, why = best(settings("gpt2-124m", 32, 1024), "h100:1")
    assert (str(plan.shape), plan.zero, plan.offload, plan.remat) == ("dp=1", 0, "none", "none")
    assert "nothing is split" in why
    assert "fits into a device's" in why


def test_one_gpu_that_does_not_fit_offloads():
    plan, why = best(settings("llama2-7b", 8, 2048), "h100:1")
    assert plan.offload == "optimizer"
    assert "host memory (ZeRO-Offload)" in why
    assert "of 209.55 GiB in host memory for each device" in why
    assert "more than a device's" in why


def test_one_node_that_fits_copies_the_model():
    plan, why = best(settings("gpt2-355m", 64, 1024), "h100:8")
    assert str(plan.shape) == "dp=8"
    assert plan.zero <= 1
    assert "tp=2: " in why
    assert "slower" in why


def test_one_node_that_does_not_fit_splits_the_state():
    plan, why = best(settings("llama3-8b", 64, 8192), "h100:8")
    assert plan.zero >= 2 or plan.shape.model * plan.shape.stage > 1
    assert plan.offload == "none"
    assert "has to be split" in why


def test_a_layer_larger_than_a_device_leaves_tensor_parallelism_and_zero_3():
    wide = settings(None, 16, 2048, family="llama", vocab_size=32000, d_model=24576, n_layers=4, n_heads=192)
    found = search(wide, "h100:64")
    assert found.layer_state > found.limit
    assert all(plan.candidate.shape.model > 1 or plan.candidate.zero == 3 for plan in found.fitting)
    assert "a pipeline cannot split a layer" in " ".join(reasons(found, found.fitting[0]))


def test_many_nodes_choose_by_their_network():
    model = settings("llama3-70b", 512, 8192)
    fast, why_fast = best(model, "h100:64")
    slow, why_slow = best(model, "h100:64", network=10e9 / 8)
    assert fast.zero == 3
    assert fast.shape.stage == 1
    assert "a fast network" in why_fast
    # ZeRO-3 over the slow network would gather every layer across it: stages take its place between hosts.
    assert slow.shape.stage > 1
    assert slow.shape.data * slow.shape.model <= 8
    assert "a slow network" in why_slow
    assert "data parallelism alone: " in why_slow


# The search.


def test_every_candidate_passes_the_checks_of_training_and_none_is_double():
    config = settings("toy-gpt2-1m", 48, 128)
    arch = architecture(config.model)
    target = parse_target("h100:16")
    found = candidates(config, arch, target, Pins({}, {}), offload=False)
    assert len(set(found)) == len(found)
    pipelines = set()
    for candidate in found:
        assert candidate.shape.devices == 16
        laid = apply(config, candidate)
        check_fit(laid, arch, candidate.shape)
        key = (candidate.shape, laid.train.microbatches, laid.train.schedule, laid.train.virtual_stages)
        if key not in pipelines:
            pipelines.add(key)
            plan_pipeline(laid.train, candidate.zero, arch, candidate.shape)
    assert {c.zero for c in found} == {0, 1, 2, 3}
    assert {c.shape.model for c in found} == {1, 2, 4}
    assert {c.shape.stage for c in found} == {1, 2, 4}


def test_the_order_is_the_same_every_time_and_faster_plans_come_first():
    config = settings("llama3-8b", 64, 8192)
    first, second = search(config, "h100:8"), search(config, "h100:8")
    assert first.order == second.order
    seconds = [plan.seconds for plan in first.fitting]
    assert all(later > earlier * 0.97 for earlier, later in pairwise(seconds))
    assert all(plan.memory.total <= first.limit for plan in first.fitting)


def test_pins_hold():
    config = replace(settings("llama3-8b", 64, 8192), zero=1)
    found = search(config, "h100:8", mesh={"model": 2, "data": -1}, zero=1, remat="full")
    for plan in found.fitting:
        c = plan.candidate
        assert (c.shape.model, c.shape.data, c.zero, c.remat) == (2, 4, 1, "full")


def test_memory_limit_moves_the_choice():
    config = settings("llama3-8b", 64, 8192)
    arch, target = architecture(config.model), parse_target("h100:8")
    tight = ranking.search(config, arch, target, Pins({}, {}), memory_limit=40 * GIB)
    free = ranking.search(config, arch, target, Pins({}, {}))
    assert tight.fitting[0].memory.total <= 40 * GIB < free.fitting[0].memory.total
    assert tight.fitting[0].seconds > free.fitting[0].seconds


def test_an_unknown_machine_gets_an_order_without_seconds():
    found = search(settings("toy-1m", 32, 128), "cpu:8")
    assert not found.timed
    assert found.mfu(found.fitting[0]) is None
    assert "No time is predicted" in " ".join(reasons(found, found.fitting[0]))


def test_the_smallest_is_the_least_of_all():
    found = search(settings("llama3-8b", 64, 8192), "h100:8", mesh={"data": 4, "model": 2})
    least = min(found.at(place).memory.total for place in range(len(found.order)))
    again = replace(found, limit=0, scored={})
    assert again.smallest().memory.total == least
    assert len(again.scored) < len(again.order)  # without looking at all of them
    for zero in (0, 3):
        matches = [place for place, c in enumerate(found.order) if c.zero == zero and c.remat == "none"]
        fits, other = again.best(lambda c, zero=zero: c.zero == zero and c.remat == "none")
        assert (fits, other.memory.total) == (False, min(found.at(place).memory.total for place in matches))


def test_what_fits_nowhere_is_sought_with_and_without_host_memory():
    found = search(settings("llama3-70b", 64, 8192), "h100:1")
    assert not found.fitting
    assert {candidate.offload for candidate in found.order} == {"none", "optimizer"}
    on_host = [scored.memory.host > 0 for scored in found.above(float("inf"))]
    assert on_host == [False, True]  # the least of both kinds, the plain one first


@pytest.mark.parametrize("batch", [2_000_000_000, 2**31 - 1])
def test_a_huge_batch_is_answered_soon(batch, monkeypatch):
    seen = []
    searched = host_memory.search
    monkeypatch.setattr(
        host_memory,
        "search",
        lambda config, arch, target, *rest: (seen.append(target.name), searched(config, arch, target, *rest))[1],
    )
    config = settings("toy-1m", batch, 1024)
    target = parse_target("h100:1")
    host_memory.smallest_fitting(config, architecture(config.model), target, Pins({}, {}), None)
    assert "h100:64" not in seen  # the batch alone is more than those have


# The command.


def plan(capsys, *arguments):
    """Exit code, stdout and stderr of the command."""
    code = cli.run(["plan", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


LLAMA = ("--model.preset", "llama3-8b", "--train.global_batch", "64", "--data.seq_len", "8192", "--confirm", "0")


def test_json_is_the_contract(capsys):
    code, out, _ = plan(capsys, *LLAMA, "--target", "h100:8", "--json")
    result = json.loads(out)
    assert code == 0
    assert set(result) == {"target", "model", "plans"}
    first = result["plans"][0]
    assert list(first) == [
        *("command", "mesh", "zero", "remat", "microbatches", "accumulation", "offload", "memory", "compiled_peak"),
        *("fits", "step_seconds", "mfu", "reasons", "compiled_time"),
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
        words = shlex.split(each["command"])
        assert words[:2] == ["python", "run.py"]
        config = cli.understand(words[2:]).config
        assert (config.zero, config.train.remat, config.train.accumulation, config.train.offload) == (
            each["zero"],
            each["remat"],
            each["accumulation"],
            each["offload"],
        )
        assert str(resolve_mesh(config.mesh, 8)) == each["mesh"]
        assert config.train.microbatches == each["microbatches"]
        assert config.train.precision == "bf16"
        assert (config.model.preset, config.data.seq_len) == ("llama3-8b", 8192)


def test_what_a_file_says_is_overridden_where_the_plan_differs(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "zero: 3\nmodel: {preset: gpt2-124m}\ndata: {seq_len: 512}\n"
        "train: {global_batch: 16, accumulation: 4, remat: full, precision: bf16}\n"
    )
    code, out, _ = plan(capsys, "--config", str(file), "--target", "h100:1", "--confirm", "0", "--best")
    assert code == 0
    config = cli.understand(shlex.split(out)[2:]).config
    assert (config.zero, config.train.accumulation, config.train.remat) == (0, 1, "none")


OWN = (
    "mesh: pp=4,dp=2\nzero: 3\nfake_devices: 4\ntrain: {offload: optimizer, offload_mode: host, pipeline_gather: step}"
)


def test_options_that_the_layout_does_not_have_are_taken_back(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(OWN)
    _, out, _ = plan(capsys, *LLAMA, "--config", str(file), "--target", "h100:8", "--json")
    configs = [cli.understand(shlex.split(each["command"])[2:]).config for each in json.loads(out)["plans"]]
    assert {config.fake_devices for config in configs} == {None}
    assert {config.train.offload_mode for config in configs} == {None}
    assert {config.train.pipeline_gather for config in configs if "pp" not in (config.mesh or "")} == {None}
    file.write_text("devices: cpu\nfake_devices: 8\n")
    _, out, _ = plan(capsys, *LLAMA, "--config", str(file), "--target", "h100:8", "--best")
    config = cli.understand(shlex.split(out)[2:]).config
    assert (config.devices, config.fake_devices) == ("auto", None)


def test_an_option_of_some_layouts_leaves_only_those(capsys):
    _, out, _ = plan(capsys, *LLAMA, "--train.pipeline_gather", "step", "--target", "h100:8", "--json")
    for each in json.loads(out)["plans"]:
        assert each["zero"] == 3 and "pp" in each["mesh"]
        assert cli.understand(shlex.split(each["command"])[2:]).config.train.pipeline_gather == "step"
    pins = pins_of(Config(train=TrainConfig(offload="optimizer", offload_mode="host")), {"train.offload_mode": "host"})
    assert str(pins) == "--train.offload_mode host"
    own = Candidate(MeshShape(data=8), 1, "none")
    assert pins.allows(replace(own, offload="optimizer")) and not pins.allows(own)


NARROW = ("--model.family", "llama", "--model.d_model", "60", "--model.d_ff", "100", "--model.n_heads", "3")


def test_weights_that_may_stay_whole(capsys):
    arguments = (*NARROW, "--model.n_layers", "1", "--target", "h100:8", "--zero", "1", "--confirm", "0", "--best")
    code, _, err = plan(capsys, *arguments)
    assert code == 2
    assert "cannot be sharded as --zero asks: blocks.attention.key: no dim of" in err
    allowed = re.search(r"--train\.allow_replicated '(\[.*?\])'", err)
    assert allowed
    code, out, _ = plan(capsys, *arguments, "--train.allow_replicated", allowed[1])
    assert (code, "--mesh dp=8 --zero 1" in out) == (0, True)


def test_short_times_have_their_unit(capsys):
    _, out, _ = plan(capsys, *NARROW, "--model.n_layers", "1", "--target", "h100:8", "--confirm", "0")
    assert re.search(r"\d us +- ", out)
    assert not re.search(r" 0\.00 |\(.* 0 -> 0 ms", out)


def test_null_leaves_a_choice_free():
    assert pins_of(Config(), dict.fromkeys(("zero", "train.schedule", "train.microbatches"), "null")).fields == {}
    assert pins_of(Config(zero=0), {"zero": "0"}).fields == {"zero": 0}


def test_divisors():
    assert divisors(1) == (1,)
    assert divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert len(divisors(2_000_000_000)) == 110


def test_best_prints_the_command_alone(capsys):
    code, out, err = plan(capsys, *LLAMA, "--target", "h100:8", "--best")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert out.startswith("python run.py --model.preset llama3-8b")


def test_on_a_narrow_terminal_figures_are_whole_and_the_command_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal's
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = plan(capsys, *LLAMA, "--target", "h100:8", "--confirm", "0")
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).strip() for line in out.splitlines()]
    command = next(line for line in lines if line.startswith("python run.py"))
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
        (("--target", "h100:8", "--memory_limit", "80"), ("limits nothing", "79.11 GiB")),
        (("--target", "h100:8", "--network", "gbps=25"), ("changes nothing on h100:8", "one host")),
        (("--target", "v5e:16x16", "--network", "gbps=25"), ("changes nothing on v5e:16x16", "ICI")),
        (("--target", "cpu:8", "--network", "gbps=25"), ("no time is predicted",)),
        (("--target", "h100:8", "--fake_devices", "8"), ("--fake_devices 8 and --target h100:8 both say",)),
        (("--target", "h100:8", "--devices", "cpu"), ("--devices cpu and --target h100:8 both say",)),
        (("--target", "h100:8", "--report", ""), ("--report is empty",)),
        (
            ("--target", "h100:8", "--zero", "0", "--train.remat", "none", "--mesh", "dp=8"),
            ("--zero 0", "GiB", "it fits here without --mesh dp=8 or without --train.remat none"),
        ),
        (
            ("--target", "h100:8", "--train.microbatches", "4", "--mesh", "dp=8", "--zero", "1"),
            ("--mesh dp=8 or --train.microbatches 4 stands in the way",),
        ),
        (
            ("--target", "h100:8", "--train.accumulation", "3"),
            ("64 does not divide by dp 8 x accumulation 3", "--train.accumulation 3 stands in the way"),
        ),
        (
            ("--target", "h100:8", "--train.microbatches", "7"),
            ("train.microbatches = 7 does not divide the 64", "--train.microbatches 7 stands in the way"),
        ),
        (
            ("--target", "h100:8", "--mesh", "dp=8", "--train.pipeline_gather", "step"),
            ("without stages there is no pipeline", "--train.pipeline_gather step stands in the way"),
        ),
        (
            ("--target", "h100:8", "--zero", "1", "--train.pipeline_gather", "step"),
            ("with --zero 1 every stage holds its parameters whole",),
        ),
        (
            ("--target", "h100:8", "--train.schedule", "gpipe", "--train.virtual_stages", "2"),
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
    code, _, err = plan(capsys, *LLAMA, "--target", "h100:8", "--train.remat", "foo")
    assert code == 2
    assert "'foo' is not known" in err
    assert "in the way" not in err


def test_a_model_that_fits_nowhere_names_the_smallest_hardware(capsys):
    arguments = ("--model.preset", "llama3-70b", "--train.global_batch", "64", "--data.seq_len", "4096")
    code, _, err = plan(capsys, *arguments, "--confirm", "0", "--target", "h100:1")
    assert code == 2
    assert "the smallest h100 target that fits is h100:" in err
    assert "needs" in err


# Host memory.


def test_offloaded_plans_must_fit_into_the_hosts_memory(monkeypatch, capsys):
    found = search(settings("llama2-7b", 8, 2048), "h100:1")
    host = found.fitting[0].memory.host
    assert host > 70 * GIB
    assert host_memory.within_host(found)[0] is found.fitting[0]
    monkeypatch.setitem(host_memory.HOST_BYTES, "h100", host)  # of which a tenth stays free
    assert all(plan.memory.host < 0.9 * host + 1 for plan in host_memory.within_host(found))
    monkeypatch.setitem(host_memory.HOST_BYTES, "h100", 8 * GIB)
    code, _, err = plan(
        *(capsys, "--model.preset", "llama2-7b", "--train.global_batch", "8", "--data.seq_len", "2048"),
        *("--target", "h100:1", "--confirm", "0"),
    )
    assert code == 2
    assert "of host memory for each device" in err
    assert "7.20 GiB to use; the smallest h100 target that fits is h100:2" in err


def test_every_known_accelerator_has_host_memory():
    assert {name for name, chip in CHIPS.items() if chip.bf16_flops} == set(host_memory.HOST_BYTES)
    assert host_memory.host_limit(parse_target("cpu:8")) == float("inf")
    assert 2**28 < host_memory.host_limit(parse_target("local")) < 2**50
