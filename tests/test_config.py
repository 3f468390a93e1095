"""Configuration: ranges, types, names, and YAML both ways."""

import dataclasses
import typing
from pathlib import Path

import pytest

from jaxshard.commands.table import COMMANDS, TrainOptions
from jaxshard.config import Config, OptimConfig, TrainConfig
from jaxshard.config.file import config_to_yaml, load_config
from jaxshard.config.options import describe, make_parser, options_of, parse_arguments
from jaxshard.errors import InputError
from jaxshard.suggestions import SYNONYMS, suggest

ROOT = Path(__file__).parent.parent
NAMES = [option.name for option in options_of(Config())]


def load(tmp_path: Path, text: str | bytes) -> Config:
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_config(path)


def refused(tmp_path: Path, text: str | bytes) -> str:
    """Returns the message, the folder's name taken out, after checking that it is one line."""
    with pytest.raises(InputError) as error:
        load(tmp_path, text)
    message = str(error.value)
    assert "\n" not in message and len(message) < 300
    return message.replace(f"{tmp_path}/", "")


# Ranges and types.


@pytest.mark.parametrize(
    "key, value",
    [
        ("optim.lr", "0"), ("optim.lr", "-1"), ("optim.lr", ".nan"), ("optim.lr", ".inf"), ("optim.clip", "-0.1"),
        ("optim.clip", ".inf"), ("optim.beta2", "1"), ("optim.eps", "0"), ("optim.weight_decay", "-1"),
        ("optim.warmup_steps", "-1"), ("optim.final_lr_fraction", "1.5"), ("optim.decay_fraction", "-0.1"),
        ("parallel.accumulation", "0"), ("train.steps", "-1"), ("train.global_batch", "0"), ("train.stop_after", "-1"),
        ("parallel.loss_chunk", "0"), ("train.loss_scale", "0.5"), ("train.max_skips", "0"), ("train.z_loss", ".nan"),
        ("data.seq_len", "0"), ("data.eval_fraction", "1"), ("model.dropout", "1"), ("model.n_layers", "0"),
        ("model.norm_eps", "-1"), ("checkpoint.every", "-1"), ("checkpoint.keep", "0"), ("log.every", "0"),
        ("log.profile_steps", "[3, 1]"), ("log.profile_steps", "[0, 1]"), ("eval.every", "-1"), ("eval.batches", "-1"),
        ("fake_devices", "0"), ("mesh", "''"), ("output", "' '"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(tmp_path, key, value):
    assert refused(tmp_path, f"{key}: {value}").startswith(f"c.yaml: {key} is ")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure-bf16", "fp64"])
@pytest.mark.parametrize("option", ["loss_scale", "loss_scale_interval"])
def test_a_loss_scale_is_refused_where_nothing_is_scaled(tmp_path, precision, option):
    said = refused(tmp_path, f"train: {{precision: {precision}, {option}: 4}}")
    why = f"only fp16 scales the loss, and train.precision is {precision}; leave it out"
    assert said == f"c.yaml: train.{option} = 4 changes nothing: {why}"
    assert load(tmp_path, f"train: {{precision: fp16, {option}: 4}}").train != TrainConfig(precision="fp16")


def test_a_run_saved_with_what_is_refused_now_is_still_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("optim: {name: lion, eps: 0.5}\ntrain: {precision: bf16, loss_scale: 4, loss_scale_interval: 7}")
    assert load_config(path, saved=True) == Config(optim=OptimConfig("lion"), train=TrainConfig(precision="bf16"))
    with pytest.raises(InputError):
        load_config(path)


@pytest.mark.parametrize("name, option", [("lion", "eps"), ("sgd", "beta2"), ("adafactor", "beta1")])
def test_what_an_optimizer_does_not_have_is_refused(tmp_path, name, option):
    said = refused(tmp_path, f"optim: {{name: {name}, {option}: 0.5}}")
    assert said == f"c.yaml: optim.{option} = 0.5 changes nothing: {name} does not have it; leave it out"


@pytest.mark.parametrize(
    "text, message",
    [
        ("train: {steps: many}", "train.steps is 'many': it must be a whole number"),
        ("train: {steps: 1.0e+3}", "train.steps is '1000.0': it must be a whole number (did you mean 1000?)"),
        ("train: {steps: 2.5}", "train.steps is '2.5': it must be a whole number"),
        ("train: {steps: true}", "train.steps is 'True': it must be a whole number"),
        ("train: {steps: null}", "train.steps is null: it must be a whole number"),
        ("train: {steps: 1:30}", "train.steps is '1:30': it must be a whole number"),
        ("optim: {lr: 1:30.5}", "optim.lr is '1:30.5': it must be a number"),
        (
            "log: {profile_steps: [1:30, 2:00]}",
            "log.profile_steps is \"['1:30', '2:00']\": it must be a list such as [1,2]",
        ),
        ("train: {steps: [1]}", "train.steps is '[1]': it must be a whole number"),
        ("optim: {lr: big}", "optim.lr is 'big': it must be a number"),
        ("data: {pack: 3}", "data.pack is '3': it must be true or false"),
        ("data: {path: 3}", "data.path is '3': it must be text"),
        ("zero: 4", "zero is '4': it must be one of 0, 1, 2, 3"),
        ("zero: true", "zero is True: it must be 0, 1, 2 or 3"),
        ("log: {profile_steps: [1]}", "log.profile_steps is '[1]': it must be a list such as [1,2]"),
        ("parallel: {allow_replicated: [1]}", "parallel.allow_replicated is '1': it must be a list such as [a,b]"),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(tmp_path, text, message):
    assert refused(tmp_path, text) == f"c.yaml: {message}"


def test_misspelt_choices_name_the_nearest(tmp_path):
    assert "(did you mean 'adamw'?)" in refused(tmp_path, "optim: {name: adamW}")
    assert "(did you mean 'llama3'?)" in refused(tmp_path, "model: {rope_scaling: lama3}")


def test_numbers_in_every_notation(tmp_path):
    """YAML 1.1 reads 1e-3 as text, and 1 as a whole number."""
    config = load(tmp_path, "optim: {lr: 1e-3, clip: 2, eps: 1.0e-9, weight_decay: '0.5'}\nzero: 3")
    assert (config.optim.lr, config.optim.clip, config.optim.eps, config.optim.weight_decay) == (1e-3, 2.0, 1e-9, 0.5)
    assert type(config.optim.clip) is float and config.zero == 3


def test_lists_become_tuples(tmp_path):
    config = load(tmp_path, "log: {profile_steps: [3, 5]}\nparallel: {allow_replicated: [a/b, c]}")
    assert config.log.profile_steps == (3, 5) and config.parallel.allow_replicated == ("a/b", "c")


def test_a_configuration_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().train.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_every_type_can_be_described_and_every_field_has_help():
    for option in options_of(Config()):
        assert describe(option.hint) and option.doc, option.name


# Names.


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("train.lr", "'optim.lr'"),
        ("lr", "'optim.lr'"),
        ("train.step", "'train.steps'"),
        ("trian.steps", "'train.steps'"),
        ("dmodel", "'model.d_model'"),
        ("learnig-rate", "'optim.lr'"),
        ("Gradient_Checkpointing", "'parallel.remat: full'"),
        ("meshes", "'mesh'"),
        ("train.every", "'checkpoint.every', 'log.every' or 'eval.every'"),
    ],
)
def test_the_nearest_name_is_suggested(wrong, right):
    assert suggest(wrong, NAMES) == f" (did you mean {right}?)"


def test_other_trainers_names_lead_to_options_that_exist_and_take_the_value():
    """Also with another group before them, with dashes, and with a letter missing."""
    groups = [Config(), *(row.options for row in COMMANDS)]
    known = {option.name: option for each in groups for option in options_of(each)}
    names = {option.name for each in (Config(), TrainOptions()) for option in options_of(each)}
    for alias, target in SYNONYMS.items():
        assert not any(name.rpartition(".")[2] == alias for name in known), f"{alias} is a name of ours"
        name, _, value = target.partition(" ")
        value = value.replace("=N", "=2")
        argv = [f"--{name}", value] if value else []
        parsed = parse_arguments(make_parser([known[name]]), [known[name]], argv)
        assert value in ("", str(parsed[name])), target
        for wrong in (alias, f"train.{alias}", alias.replace("_", "-")):
            assert f"'--{target}'" in suggest(wrong, known, "--"), wrong
        if len(alias) > 8 and name in names:
            assert f"'--{target}'" in suggest(alias[:3] + alias[4:], names, "--"), alias


def test_nothing_is_suggested_for_nonsense():
    assert suggest("qqqqqq", NAMES) == ""


@pytest.mark.parametrize(
    "text, message",
    [
        ("train: {lr: 1}", "c.yaml line 1: unknown key train.lr (did you mean 'optim.lr'?)"),
        ("batch_size: 8", "c.yaml line 1: unknown key batch_size (did you mean 'train.global_batch'?)"),
        ("fsdp: true", "c.yaml line 1: unknown key fsdp (did you mean 'zero: 3'?)"),
        (
            "train: {num_train_epochs: 3}",
            "c.yaml line 1: unknown key train.num_train_epochs (did you mean 'train.steps",
        ),
        ("optimizer: {lr: 1}", "c.yaml line 1: unknown key optimizer (did you mean 'optim'?)"),
        ("logging:\n  every: 1", "c.yaml line 1: unknown key logging (did you mean 'log'?)"),
        ("zero: 1\ntrian:\n  steps: 3", "c.yaml line 2: unknown key trian (did you mean 'train'?)"),
        (
            "zero: 1\ntrain:\n  seed: 1\n  stesp: 3",
            "c.yaml line 4: unknown key train.stesp (did you mean 'train.steps'?)",
        ),
        ("zero: 1\nzero: 2", "c.yaml line 2: zero was given in line 1 already; keep one of the two"),
        (
            "train: {seed: 1}\ntrain.seed: 2",
            "c.yaml line 2: train.seed was given in line 1 already; keep one of the two",
        ),
        ("train: 3", "c.yaml line 1: train is a group of keys, such as 'train: {steps: ...}'"),
        ("- train", "c.yaml: a configuration is a mapping such as 'train: {steps: 100}', not a list"),
        ("train", "c.yaml: a configuration is a mapping such as 'train: {steps: 100}', not one value"),
        ("? [a]\n: 3", "c.yaml line 1: not valid YAML (found unhashable key)"),
        ("train: {steps: 3", "c.yaml line 1: not valid YAML (expected ',' or '}', but got '<stream end>')"),
        ("a: b: c", "c.yaml line 1: not valid YAML (mapping values are not allowed here)"),
        ("a: !!int x", "c.yaml: not valid YAML ("),
        ("a: !thing x", "c.yaml line 1: not valid YAML (could not determine a constructor"),
        ("a: \x07", "c.yaml: not valid YAML (special characters are not allowed)"),
        ("a: 1\n---\nb: 1", "c.yaml line 2: not valid YAML (but found another document)"),
        (b"mesh: \xff", "c.yaml: byte 6 is not UTF-8; a configuration is a YAML text file"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(tmp_path, text, message):
    assert refused(tmp_path, text).startswith(message)


def test_a_file_that_is_not_there_names_the_nearest(tmp_path):
    (tmp_path / "tiny.yaml").touch()
    with pytest.raises(InputError, match=r"no such file \(did you mean 'tiny.yaml'\?\)"):
        load_config(tmp_path / "tinny.yaml")
    with pytest.raises(InputError, match="nor a folder"):
        load_config(tmp_path / "nowhere" / "tiny.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        load_config(tmp_path)


# Files.


@pytest.mark.parametrize("text", ["", "# nothing\n", "train:\n", "train: {}\n", "null\n", "\ufeffdevices: auto"])
def test_what_a_file_leaves_out_keeps_its_default(tmp_path, text):
    assert load(tmp_path, text) == Config()


def odd_config(text: str) -> Config:
    """Returns a configuration whose every field differs from the default, with a text that YAML could misread."""

    def other(option):
        kinds = [kind for kind in (option.hint, *typing.get_args(option.hint)) if kind is not type(None)]
        if choices := [c for kind in kinds for c in typing.get_args(kind) if typing.get_origin(kind) is typing.Literal]:
            # Of the optimizers only muon, beside the default, has every option; only fp16 has a loss scale.
            return next(choice for choice in choices if choice not in (option.default, "adafactor", "lion", "bf16"))
        if typing.get_origin(kinds[-1]) is tuple or typing.get_origin(option.hint) is tuple:
            return (3, 7) if "profile" in option.name else (text, "b")
        if str in kinds:
            return text
        return (
            (not option.default)
            if bool in kinds
            else 7
            if int in kinds
            else (option.default or 0.5) * 0.7777777777777777
        )

    def build(instance, prefix=""):
        rows = {option.name: option for option in options_of(instance)}
        return dataclasses.replace(
            instance,
            **{
                field.name: build(value) if dataclasses.is_dataclass(value) else other(rows[field.name])
                for field in dataclasses.fields(instance)
                for value in [getattr(instance, field.name)]
            },
        )

    return build(Config())


@pytest.mark.parametrize("comments", [False, True])
@pytest.mark.parametrize(
    "text", ["null", "1e-3", "007", "yes", "2026-01-31", "a: b # c", "é\n\t'\"", "[x", "~", "1:30", "-"]
)
def test_writing_and_reading_gives_the_same(tmp_path, text, comments):
    config = odd_config(text)
    assert config.model.family == "gpt2" and config.data.path == text and config.log.profile_steps == (3, 7)
    assert load(tmp_path, config_to_yaml(config, comments)) == config


def test_the_defaults_with_comments_name_every_field(tmp_path):
    text = config_to_yaml(Config(), comments=True)
    assert load(tmp_path, text) == Config()
    for option in options_of(Config()):
        assert f"{option.name.rpartition('.')[2]}: " in text
        assert option.doc.split()[0] in text
    assert max(map(len, text.splitlines())) <= 118


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_configurations_of_the_project_are_good(path):
    config = load_config(path)
    assert config.output is None, "the output folder follows from the file's name"
    assert config.train.global_batch % config.parallel.accumulation == 0
