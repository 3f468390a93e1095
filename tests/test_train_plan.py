"""`train` and the planner: --mesh auto, the memory forecast, and what is said when memory runs out."""

import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxshard.commands import cli
from jaxshard.config import Config, DataConfig, ModelConfig, grouped
from jaxshard.config.file import load_config, run_to_yaml, saved_values
from jaxshard.config.options import Given
from jaxshard.console import Console
from jaxshard.errors import InputError, RunError
from jaxshard.parallel.axes import MeshShape
from jaxshard.parallel.mesh import resolve_mesh
from jaxshard.planner import present
from jaxshard.planner.search import Candidate
from jaxshard.training import loop, start
from jaxshard.training.foresight import explained
from jaxshard.training.program import build_program
from jaxshard.xla.hardware import parse_target

GIB = 2**30
TINY = [
    "--config", str(Path(__file__).parent.parent / "configs" / "tiny.yaml"), "--data.seq_len", "32",
    "--train.global_batch", "8", "--log.tensorboard", "false", "--data.path", __file__,
]  # fmt: skip


def llama(zero=None, **changes):
    config = Config(
        model=ModelConfig(preset="llama3-8b"),
        data=DataConfig(seq_len=8192),
        **grouped(mesh="auto", zero=zero, precision="bf16", global_batch=64),
    )
    return replace(config, **changes)


@pytest.fixture
def on(monkeypatch):
    """Makes the devices of this process pass for a target's, with so many bytes each."""

    def pretend(name, limit=None):
        target = parse_target(name)
        monkeypatch.setattr(present, "present_target", lambda devices: target)
        monkeypatch.setattr(present, "device_limit", lambda devices, target: limit or target.chip.usable_bytes)

    return pretend


def chosen(config, capsys, given=(), resume=False):
    """The configuration that --mesh auto makes on eight devices, and what it says."""
    options = Given(dict.fromkeys(given))
    found = present.layout(config, jax.devices()[:8], 257, console=Console(), given=options, resume=resume)
    return found, " ".join(capsys.readouterr().out.split())


def test_automatic_mesh_takes_the_best_plan_and_says_so(on, capsys):
    on("h100:8")
    config, said = chosen(llama(), capsys)
    assert resolve_mesh(config.mesh, 8).devices == 8
    assert config.train.precision == "bf16"  # what a run computes is never the planner's choice
    assert said.startswith(f"mesh auto: {config.mesh}, ZeRO-{config.zero}, remat {config.parallel.remat}")
    assert "the fastest by prediction (" in said
    assert "of 66.93 GiB on a device" in said
    assert "kept" not in said


def test_automatic_mesh_keeps_what_the_user_says(on, capsys):
    on("h100:8")
    config, said = chosen(llama(zero=2), capsys)
    assert config.zero == 2
    assert "kept as given: zero 2" in said
    # The default counts as said where it stands on the command line.
    config, said = chosen(llama(zero=0), capsys, given=["zero", "mesh", "parallel.accumulation"])
    assert (config.zero, config.parallel.accumulation) == (0, 1)
    assert "kept as given: zero 0, parallel.accumulation 1" in said


def test_automatic_mesh_keeps_what_only_some_layouts_have(on, capsys):
    on("h100:8")
    config = llama().with_parallel(pipeline_gather="step")
    found, said = chosen(config, capsys)
    assert (found.zero, found.parallel.pipeline_gather) == (3, "step")
    assert resolve_mesh(found.mesh, 8).stage > 1
    assert "kept as given: parallel.pipeline_gather step" in said
    with pytest.raises(InputError, match="with --zero 1 every stage holds its parameters whole"):
        chosen(config.with_parallel(zero=1), capsys)


def test_automatic_mesh_refuses_what_fits_nowhere(on, capsys):
    on("h100:8")
    with pytest.raises(InputError, match=r"fits nowhere on h100:8 with --zero 0 --parallel\.offload none"):
        big = llama(zero=0, model=ModelConfig(preset="llama3-70b"))
        chosen(big, capsys, given=["zero", "parallel.offload"])


def test_a_resumed_run_keeps_its_layout_while_the_devices_are_as_many(on, tmp_path, capsys):
    on("h100:8")
    file = tmp_path / "config.yaml"
    save = lambda **options: file.write_text(run_to_yaml(saved_values(Config(**grouped(**options)))))
    save(mesh="dp=2,tp=4", zero=3, global_batch=64, accumulation=2, remat="full")
    config, said = chosen(llama(output=str(tmp_path)), capsys, resume=True)
    assert (config.mesh, config.zero, config.parallel.accumulation, config.parallel.remat) == (
        "dp=2,tp=4",
        3,
        2,
        "full",
    )
    assert "the run goes on with its layout, dp=2,tp=4, ZeRO-3" in said
    config, _ = chosen(llama(output=str(tmp_path), zero=1), capsys, resume=True)
    assert (config.mesh, config.zero) == ("dp=2,tp=4", 1)
    save(mesh="dp=4,tp=4", zero=3)
    config, said = chosen(llama(output=str(tmp_path)), capsys, resume=True)
    assert "layouts that this model allows" in said


def test_the_forecast_warns(on):
    on("h100:8")
    config = Config(model=ModelConfig(preset="gpt2-124m"), **grouped(mesh="dp=8", global_batch=8))
    program = build_program(replace(config, data=DataConfig(seq_len=1024)), jax.devices()[:8])
    fits = present.forecast(program)
    assert fits.line.startswith("predicted: ")
    assert "of 71.20 GiB on one device (" in fits.line
    assert fits.warning == ""
    on("h100:8", GIB)
    tight = present.forecast(program)
    assert tight.total == fits.total > GIB
    assert "will probably not fit" in tight.warning
    assert "--mesh auto" in tight.warning


def test_the_forecast_warns_where_faked_devices_need_more_than_the_machine_has(monkeypatch):
    program = build_program(Config(**grouped(mesh="dp=4", global_batch=4)), jax.devices()[:4], 257)
    total = present.forecast(program).total
    monkeypatch.setattr(present, "machine_bytes", lambda: 4 * total)
    assert present.forecast(program).warning == ""
    monkeypatch.setattr(present, "machine_bytes", lambda: 4 * total - 1)
    assert "predicted on each of 4 devices, and this machine has " in present.forecast(program).warning


def test_a_step_far_beyond_the_machine_is_refused_with_what_should_fit(monkeypatch):
    def total(machine=2**60, seq_len=128, **train):
        monkeypatch.setattr(present, "machine_bytes", lambda: machine)
        config = Config(data=DataConfig(seq_len=seq_len), **grouped(mesh="dp=2", **train))
        return present.forecast(build_program(config, jax.devices()[:2], 257)).total

    said = "^the step cannot fit: .* predicted on each of 2 devices, and this machine has .* for all of them; "
    parts = total(global_batch=256, accumulation=8)
    with pytest.raises(InputError, match=said + "--parallel.accumulation 8 takes the batch in parts that should fit$"):
        total(2 * parts, global_batch=256)
    # The batch alone, 512 MiB, is too much: no parts of it help.
    with pytest.raises(InputError, match=said + r"--train.global_batch \d+ should fit$") as refused:
        total(2**28, seq_len=2, global_batch=2**25)
    batch = int(re.findall(r"(\d+) should fit", str(refused.value))[0])
    assert total(seq_len=2, global_batch=batch) <= 2**27 < total(seq_len=2, global_batch=2 * batch)
    with pytest.raises(InputError, match=said + "choose a smaller model$"):
        total(1, global_batch=256)


def test_a_batch_that_cannot_be_gathered_is_refused_at_once(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(start, "machine_bytes", lambda: 1_024_000)
    words = ["2002" if word == "8" else word for word in TINY]
    assert cli.run([*words, "--mesh", "dp=2", "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: train.global_batch = 2,002 sequences of data.seq_len = 32 tokens cannot be gathered"
    )
    assert "this machine has 1,000.00 KiB; lower train.global_batch: even 2,000 would fill it" in error
    assert error.count("\n") == 1 and not (tmp_path / "run" / "config.yaml").exists()


def test_the_nearest_plan_changes_least():
    own = Candidate(MeshShape(data=8), 0, "none")
    plan = lambda name, **fields: SimpleNamespace(candidate=replace(own, **fields), name=name)
    other = plan("other mesh", shape=MeshShape(data=4, model=2), zero=1)
    more = plan("two fields", zero=1, remat="full")
    one, later = plan("one field", remat="full"), plan("one field, slower", zero=3)
    assert present.nearest_plan([other, more, one, later], own).name == "one field"  # type: ignore[list-item]


# Whole runs whose memory runs out, at either moment.

EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888 bytes.\nBufferAssignment: ..."


class Exhausted:
    """A compiled step that needs too much when it runs."""

    def memory_analysis(self):
        return None

    def __call__(self, *args):
        raise jax.errors.JaxRuntimeError(EXHAUSTED)


@pytest.mark.parametrize("words", [EXHAUSTED, "INTERNAL: Error dispatching: Out of memory allocating 9 bytes."])
def test_what_accelerators_and_what_cpus_say(words):
    ask: Any = SimpleNamespace(remedy=lambda program: "Take dp=8")
    with pytest.raises(RunError, match=r"^out of memory: .*\. Take dp=8$"), explained(ask, ask):
        raise jax.errors.JaxRuntimeError(words)
    with pytest.raises(jax.errors.JaxRuntimeError), explained(ask, ask):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


@pytest.fixture(autouse=True)
def without_a_state(monkeypatch):
    """Creating the state would compile a program of its own."""
    monkeypatch.setattr(loop, "first_or_restored", lambda program, saved, resume: (None, 0))


def compiles_not(*args, **kwargs):
    raise jax.errors.JaxRuntimeError(EXHAUSTED)


@pytest.mark.parametrize("compile_", [compiles_not, lambda *args, **kwargs: Exhausted()], ids=["compiling", "running"])
def test_out_of_memory_names_the_largest_consumers_and_a_plan_that_fits(monkeypatch, tmp_path, capsys, compile_):
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_)
    words = [*TINY, "--mesh", "dp=2,tp=2", "--train.steps", "3", "--output", str(tmp_path / "run")]
    assert cli.run(words) == 1
    out, err = capsys.readouterr()
    assert "predicted: " in out
    assert "Traceback" not in err
    assert err.startswith(
        "error: out of memory: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12884901888"
    )
    assert "The largest consumers of " in err
    assert "activations " in err and "MiB" in err
    assert "The nearest plan that takes less is " in err  # what fits is not known of a CPU
    command = shlex.split(err.splitlines()[-1])
    assert command[:5] == ["python", "run.py", "train", "--resume", "auto"]
    # The command is understood, goes on with the run in its folder, and takes less memory than what failed.
    config = cli.understand(command[2:]).config
    assert resolve_mesh(config.mesh, 4).devices == 4
    assert config.output == str(tmp_path / "run")
    failed = load_config(str(tmp_path / "run" / "config.yaml"))
    total = lambda config: present.forecast(build_program(config, jax.devices()[:4], 257)).total
    assert total(config) < 0.9 * total(failed)


def test_other_failures_of_the_backend_are_not_called_out_of_memory(monkeypatch, tmp_path, capsys):
    def fails(*args, **kwargs):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fails)
    assert cli.run([*TINY, "--mesh", "dp=2", "--output", str(tmp_path / "run")]) == 1
    assert "INTERNAL: something else" in capsys.readouterr().err


def test_a_run_with_an_automatic_mesh_writes_what_was_chosen(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(jax.stages.Lowered, "compile", compiles_not)
    words = [*TINY, "--mesh", "auto", "--fake_devices", "4", "--zero", "0", "--output", str(tmp_path / "run")]
    assert cli.run(words) == 1
    assert "mesh auto: " in capsys.readouterr().out
    saved = load_config(str(tmp_path / "run" / "config.yaml"))
    assert resolve_mesh(saved.mesh, 4).devices == 4
    assert saved.zero == 0
