"""Configurations as YAML: read with every name checked, written so that reading gives back the same. Free of jax.

The configuration of a saved run is refused unless it is whole: a file that was emptied or cut would be read as the
defaults of what is missing, and the run would go on as another one. Its last line says how many values there are.
"""

import json
import re
import textwrap
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from jaxshard.config import ONE_RUN, Config, unread
from jaxshard.config.options import PlainLoader, instantiate, make_parser, options_of, parse_mapping
from jaxshard.errors import InputError, nearest
from jaxshard.suggestions import suggest


class UnknownKey(InputError):
    """A file has a key that is no option."""


def load_config(path: str | Path, saved: bool = False) -> Config:
    """Returns the configuration of a YAML file; what it leaves out keeps its default.

    With `saved`, what nothing reads is left out too: a run that was saved before such options were refused goes on.

    Raises:
      InputError: no such file, not YAML, an unknown or repeated key, a value of a wrong type or out of range. The
        message starts with the path and, where there is one, the line.
    """
    options = options_of(Config())
    mapping = _read(Path(path), [option.name for option in options])
    try:
        values = parse_mapping(make_parser(options), options, mapping)
        return instantiate(Config(), values | defaults_of(unread(values)) if saved else values)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def load_run(path: str | Path) -> Config:
    """Returns the configuration of a saved run, without what only that run had (`ONE_RUN`) and what nothing reads.

    Raises:
      InputError: as `load_config`; the file is empty, cut, or lacks values, with what it can be restored from.
    """
    path = Path(path)
    try:
        lacks = _lacks(path)
    except InputError as error:
        raise InputError(f"{error}{_restore(path)}") from None
    if lacks:
        raise InputError(f"{path} is damaged: {lacks}{_restore(path)}")
    config = load_config(path, saved=True)
    return instantiate(config, defaults_of(ONE_RUN))


def saved_values(config: Config) -> dict[str, Any]:
    """Returns what is kept of a run's configuration, as plain nested values: all but `ONE_RUN`."""
    return _nested(instantiate(config, defaults_of(ONE_RUN)))


def from_values(values: dict[str, Any]) -> Config:
    """Returns the configuration that `saved_values` was made of.

    Raises:
      InputError: an option does not exist any more, or has another type.
    """
    options = options_of(Config())
    return instantiate(Config(), parse_mapping(make_parser(options), options, values))


def record_checksum(record: dict[str, Any]) -> str:
    """Eight hexadecimal digits of what a checkpoint records as JSON, without its own "checksum"."""
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def run_to_yaml(values: dict[str, Any]) -> str:
    """Returns what `load_run` reads: the values as YAML, with a last line that tells a file that was cut."""
    count = sum(len(value) if isinstance(value, dict) else 1 for value in values.values())
    return f"{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}# {count} values\n"


def _lacks(path: Path) -> str:
    """What shows that a saved configuration is not whole, or "".

    Raises:
      InputError: it cannot be read, or is no YAML.
    """
    options = [option.name for option in options_of(Config())]
    try:
        mapping = _read(path, options)
    except UnknownKey as error:
        raise InputError(f"{error}. Runs that an earlier jaxshard saved are not read: start another run") from None
    text = path.read_text(encoding="utf-8")
    groups = {name.partition(".")[0] for name in options if "." in name}
    found = sum(len(value) if key in groups else 1 for key, value in mapping.items())
    if not found:
        return "it is empty"
    if said := re.search(r"^# (\d+) values$", text, re.MULTILINE):
        return f"it holds {found} of {said[1]} values" if found < int(said[1]) else ""
    return f"it holds {found} values without the line that ends it: it was cut, or an earlier jaxshard wrote it"


def _is_whole(path: Path) -> bool:
    try:
        return not _lacks(path)
    except InputError:
        return False


def _restore(path: Path) -> str:
    """What helps: the configuration that a checkpoint recorded, written beside the damaged one, or an earlier copy."""
    found = {file.parts[-3]: file for file in path.parent.glob("checkpoints/*/meta/metadata")}
    records = {int(name): file for name, file in found.items() if name.isdecimal()}
    for step in sorted(records, reverse=True):
        file = path.with_name(f"config.from-{step}.yaml")
        try:
            record = json.loads(records[step].read_text(encoding="utf-8"))
            if record.pop("checksum", None) != record_checksum(record):
                continue
            values = record["meta"]["config"]
            file.write_text(run_to_yaml(values), encoding="utf-8")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # A checkpoint that is damaged too, or older than this record.
        return f". What checkpoint {step} recorded is in {file} now: look at it, and move it to {path}"
    kept = [file for file in path.parent.glob("config.before-*.yaml") if _is_whole(file)]
    if kept:
        newest = max(kept, key=lambda file: file.stat().st_mtime_ns)
        return f". The run's configuration before that is {newest}: look at it, and copy it to {path}"
    return ". There is no copy of it: write the run's options into another file, and go on with --resume --config FILE"


def defaults_of(names: Iterable[str]) -> dict[str, Any]:
    """Defaults of options of the configuration, by dotted name."""
    return {option.name: option.default for option in options_of(Config()) if option.name in set(names)}


def config_to_yaml(config: Config, comments: bool = False) -> str:
    """Returns YAML from which `load_config` makes an equal configuration; `comments` adds each field's help."""
    text = yaml.safe_dump(_nested(config), sort_keys=False, allow_unicode=True)
    return _commented(text, config) if comments else text


def _nested(config: Config) -> dict[str, Any]:
    """The options of a configuration as files hold them: those on top first, then the groups; tuples as lists."""
    found: dict[str, Any] = {}
    for option in sorted(options_of(config), key=lambda option: "." in option.name):
        group, _, name = option.name.rpartition(".")
        value = option.default
        (found.setdefault(group, {}) if group else found)[name] = list(value) if isinstance(value, tuple) else value
    return found


def _commented(text: str, config: Config) -> str:
    docs = {option.name: option.doc for option in options_of(config)}
    groups = {option.name.partition(".")[0] for option in options_of(config) if "." in option.name}
    lines, group = [], ""
    for line in text.splitlines():
        key = line.partition(":")[0]
        if not line.startswith((" ", "-")):
            group = f"{key}." if key in groups else ""
            lines += [""] if group else []
        indent = "  " if line.startswith(" ") else ""
        if doc := docs.get(f"{group if indent else ''}{key.strip()}"):
            lines += textwrap.wrap(doc, 116, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _read(path: Path, names: list[str]) -> dict[str, Any]:
    """Returns the mapping in a YAML file, its keys checked against `names` (dotted)."""
    try:
        loader = PlainLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        mapping = loader.construct_document(root) if root else None
    except FileNotFoundError:
        raise InputError(f"{path}: no such file{_nearest_file(path)}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; a configuration is a YAML text file") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except yaml.YAMLError as error:
        raise InputError(_syntax(path, error)) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid YAML ({error})") from None
    if root is None or mapping is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        found = "a list" if isinstance(root, yaml.SequenceNode) else "one value"
        raise InputError(f"{path}: a configuration is a mapping such as 'train: {{steps: 100}}', not {found}")
    groups = {name.partition(".")[0] for name in names if "." in name}
    first_lines: dict[str, int] = {}
    for name, line, value in _keys(root, groups):
        where = f"{path} line {line}"
        if name in first_lines:
            raise InputError(f"{where}: {name} was given in line {first_lines[name]} already; keep one of the two")
        first_lines[name] = line
        if name in groups:
            if not isinstance(value, yaml.MappingNode):
                raise InputError(f"{where}: {name} is a group of keys, such as {_example(name, names)}")
        elif name not in names:
            raise UnknownKey(f"{where}: unknown key {name}{_meant(name, value, names, groups)}")
    assert isinstance(mapping, dict)
    return {key: value for key, value in mapping.items() if value is not None or key not in groups}


def _keys(root: yaml.MappingNode, groups: set[str]) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yields (dotted name, line, value) of each key, groups before their members; an empty group is left out."""
    for key, value in root.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in groups and _is_null(value):
            continue
        yield name, line, value
        if name in groups and isinstance(value, yaml.MappingNode):
            for inner, inner_value in value.value:
                yield f"{name}.{inner.value}", inner.start_mark.line + 1, inner_value


def _meant(name: str, value: yaml.Node, names: list[str], groups: set[str]) -> str:
    """Returns " (did you mean ...?)" for an unknown key; one with keys below it can only be meant as a group."""
    if not isinstance(value, yaml.MappingNode):
        return suggest(name, [*names, *groups])
    longer = next((group for group in sorted(groups) if name.startswith(group)), None)  # logging, optimizer, ...
    return f" (did you mean {longer!r}?)" if longer else nearest(name, groups)


def _is_null(node: yaml.Node) -> bool:
    return node.tag == "tag:yaml.org,2002:null"


def _example(group: str, names: list[str]) -> str:
    member = next(name for name in names if name.startswith(f"{group}.")).partition(".")[2]
    return f"'{group}: {{{member}: ...}}'"


def _syntax(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "no YAML"
    return f"{path}{f' line {mark.line + 1}' if mark else ''}: not valid YAML ({' '.join(str(problem).split())})"


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (nor a folder {path.parent})"
    return nearest(path.name, [other.name for other in path.parent.glob("*.y*ml")])
