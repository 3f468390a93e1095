"""Dataclass fields as options: the rows, the parser made of them, and errors of one line. Free of jax.

A field `steps` of the group `train` is the option `--train.steps` and the YAML key `steps` under `train`. Its doc
string is the help text. jsonargparse converts and checks the types; the messages are ours.
"""

import dataclasses
import functools
import re
import textwrap
import types
import typing
from argparse import ArgumentError
from collections.abc import Iterable
from typing import Any, Literal

import docstring_parser
import jsonargparse
import yaml

from jaxshard.errors import InputError, nearest
from jaxshard.suggestions import suggest

_COLUMN = 34
"""Where the right column of the help begins."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option: dotted name, type, default, help text, and the heading it stands under."""

    name: str
    hint: Any
    default: Any
    doc: str
    heading: str
    bare: Any = None
    """Value of the option written without one; None: it needs a value."""


def options_of(instance: Any, prefix: str = "") -> list[Option]:
    """Returns a row for each field of a dataclass instance, nested groups included; its values are the defaults.

    A field's doc string is the help text; its metadata may hold "bare", the value of the option without a value.
    """
    hints = typing.get_type_hints(type(instance))
    title, docs = _doc_strings(type(instance))
    rows = []
    for field in dataclasses.fields(instance):
        name, value = _name(field, prefix), getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            rows += options_of(value, f"{name}.")
        else:
            hint = hints[field.name]
            bare = True if hint in (bool, bool | None) else field.metadata.get("bare")
            rows.append(Option(name, hint, value, docs[field.name], title, bare))
    return rows


def _name(field: dataclasses.Field, prefix: str) -> str:
    """Dotted name of a field: with its group, unless its metadata say that it stands on top."""
    return field.name if field.metadata.get("top") else prefix + field.name


@dataclasses.dataclass(frozen=True)
class Given:
    """What stood on a command line, for commands that must tell a choice from a default."""

    options: dict[str, str | None]
    """Name -> text as written, None where there was none; the options of the configuration and --config."""


def given_options(argv: Iterable[str], names: Iterable[str]) -> Given:
    """Collects those of the named options that stand on a command line.

    Args:
        argv: arguments after the command.
        names: of the options that count.
    """
    names = set(names)
    return Given({name: text for name, text in _written_options(argv) if name in names})


def _written_options(argv: Iterable[str]) -> list[tuple[str, str | None]]:
    """(name, text) of every option on a command line, in its order; None where an option stands without a value."""
    found: list[tuple[str, str | None]] = []
    open_ = False
    for token in _normal(list(argv)):
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            found.append((name, value if equals else None))
            open_ = not equals
        elif open_:
            found[-1], open_ = (found[-1][0], token), False
    return found


def _refuse_repeated(argv: list[str]) -> None:
    """Refuses an option that is given twice, of which the parser would take the last in silence."""
    texts: dict[str, list[str]] = {}
    for name, text in _written_options(argv):
        texts.setdefault(name, []).append("without a value" if text is None else repr(text))
    for name, values in texts.items():
        if len(values) > 1:
            times = "twice" if len(values) == 2 else f"{len(values)} times"
            said = f"{', '.join(values[:-1])} and {values[-1]}"
            raise InputError(f"--{name} is given {times}: {said}; keep one of them")


class PlainLoader(yaml.SafeLoader):
    """YAML without dates and without numbers to the base 60: `2026-01-31` and `1:30` are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: [
            (tag, re.compile(f"(?!.*:){pattern.pattern}", re.VERBOSE) if tag.endswith((":int", ":float")) else pattern)
            for tag, pattern in resolvers
            if not tag.endswith(":timestamp")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def make_parser(options: list[Option]) -> jsonargparse.ArgumentParser:
    """Returns a parser of these options that raises ArgumentError."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False, allow_abbrev=False, print_config=None, add_help=False)
    for option in options:
        extra: dict[str, Any] = {} if option.bare is None else {"nargs": "?", "const": option.bare}
        pair = option.hint == (tuple[str, str] | None)  # written as two words after the name
        if pair:
            extra = {"nargs": 2}
        parser.add_argument(f"--{option.name}", type=str if pair else option.hint, default=option.default, **extra)
    return parser


def help_text(options: list[Option], width: int) -> str:
    """The options under their headings, names on the left and what they do on the right, in lines of `width`."""
    lines, heading = [], ""
    for option in options:
        if option.heading != heading:
            heading = option.heading
            lines += ["", f"{heading}:"]
        name = f"  --{option.name} {_placeholder(option)}".rstrip()
        default = option.default
        said = "" if default in (None, "", False, ()) else f" (default: {_written(default)})"
        wrapped = textwrap.wrap(option.doc + said, max(20, width - _COLUMN), break_on_hyphens=False)
        if len(name) < _COLUMN - 1:
            wrapped[0] = name.ljust(_COLUMN) + wrapped[0]
            rest = wrapped[1:]
            lines.append(wrapped[0])
        else:
            rest = wrapped
            lines.append(name)
        lines += [" " * _COLUMN + line for line in rest]
    return "\n".join(lines)


def _placeholder(option: Option) -> str:
    """What follows the name: N a whole number, X a number, TEXT, choices as a|b; in brackets what may be left out."""
    kinds = [kind for kind in typing.get_args(option.hint) or (option.hint,) if kind is not types.NoneType]
    if typing.get_origin(option.hint) is Literal:
        text = "|".join(map(str, kinds))
    elif typing.get_origin(kinds[0]) is Literal:
        text = "|".join([*map(str, typing.get_args(kinds[0])), *(["N"] if int in kinds else [])])
    elif option.hint == (tuple[str, str] | None):
        text = "A B"
    elif tuple in (typing.get_origin(kinds[0]), typing.get_origin(option.hint)):
        text = describe(option.hint).rpartition(" ")[2]
    else:
        text = {int: "N", float: "X", bool: "true|false", str: "TEXT"}[kinds[0]]
    if option.bare is None:
        return text
    return "" if option.bare is True and option.default is False else f"[{text}]"


def _written(value: Any) -> str:
    """A value as it is written on the command line."""
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def parse_arguments(parser: jsonargparse.ArgumentParser, options: list[Option], argv: list[str]) -> dict[str, Any]:
    """Returns values by dotted name. Raises InputError for unknown or repeated names and wrong types."""
    argv, by_name = _normal(argv), {option.name: option for option in options}
    for token in argv:
        if token.startswith("--") and token[2:].partition("=")[0] not in by_name:
            raise InputError(_explain_unknown(token, by_name))
    _refuse_repeated(argv)
    for name, text in given_options(argv, by_name).options.items():
        _refuse_base_60(by_name[name], text)
    try:
        return _flat(parser.parse_args(argv), options)
    except ArgumentError as error:
        raise InputError(_explain(str(error), options)) from None


def parse_mapping(
    parser: jsonargparse.ArgumentParser, options: list[Option], mapping: dict[str, Any]
) -> dict[str, Any]:
    """Returns values by dotted name from nested dicts whose names are known to be good."""
    given = {}
    for option in options:
        group, _, leaf = option.name.rpartition(".")
        given[option.name] = (mapping.get(group, {}) if group else mapping).get(leaf, mapping.get(option.name))
        _refuse_base_60(option, given[option.name])
    try:
        values = _flat(parser.parse_object(mapping), options)
    except ArgumentError as error:
        raise InputError(_explain(str(error), options)) from None
    # On the command line `--output null` means none; in a mapping the text "null" is a text.
    for option in options:
        if option.hint == (str | None) and isinstance(given[option.name], str):
            values[option.name] = given[option.name]
    return values


def _refuse_base_60(option: Option, given: Any) -> None:
    """Refuses 1:30 for a number: the parser's YAML reads it as 90, to the base 60."""
    kinds = (option.hint, *typing.get_args(option.hint))
    numbers = any(kind in (int, float) or int in typing.get_args(kind) for kind in kinds)
    if numbers and re.search(r"\d:\d", str(given)):
        raise InputError(f"{option.name} is {str(given)!r}: it must be {describe(option.hint)}")


def instantiate(instance: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """Returns a dataclass like `instance` with the values of dotted names, nested groups included; others stay."""
    changes = {}
    for field in dataclasses.fields(instance):
        name, old = _name(field, prefix), getattr(instance, field.name)
        inner = dataclasses.is_dataclass(old)
        changes[field.name] = instantiate(old, values, f"{name}.") if inner else values.get(name, old)
    return dataclasses.replace(instance, **changes)


def describe(hint: Any) -> str:
    """Returns what a value of this type must be, in words: int -> "a whole number"."""
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(describe(each) for each in arguments if each is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if typing.get_origin(hint) is tuple:
        return "a list such as " + ("[1,2]" if int in arguments else "[a,b]")
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]


@functools.cache
def _doc_strings(cls: type) -> tuple[str, dict[str, str]]:
    """Returns the first line of a dataclass's doc string, and the doc string under each field."""
    parsed = docstring_parser.parse_from_object(cls)
    docs = {param.arg_name: " ".join((param.description or "").split()) for param in parsed.params}
    return (parsed.short_description or cls.__name__).rstrip("."), docs


def _normal(argv: list[str]) -> list[str]:
    """Dashes in names become underscores, and `--x -1e-3` becomes `--x=-1e-3` (argparse takes -1e-3 for a flag)."""
    tokens: list[str] = []
    for token in argv:
        if tokens and re.fullmatch(r"--[^=]+", tokens[-1]) and re.fullmatch(r"-\.?\d[\d.e+-]*", token):
            tokens[-1] += f"={token}"
        elif token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            tokens.append(f"--{name.replace('-', '_')}{equals}{value}")
        else:
            tokens.append(token)
    return tokens


def _flat(namespace: jsonargparse.Namespace, options: list[Option]) -> dict[str, Any]:
    """Values by dotted name, after the two checks that the parser leaves out: null, and true given for 1."""
    values = {option.name: namespace[option.name] for option in options}
    for option in options:
        value, arguments = values[option.name], typing.get_args(option.hint)
        if value is None and option.default is not None and types.NoneType not in arguments:
            raise InputError(f"{option.name} is null: it must be {describe(option.hint)}")
        if typing.get_origin(option.hint) is Literal and not any(type(value) is type(each) for each in arguments):
            raise InputError(f"{option.name} is {value!r}: it must be {describe(option.hint)}")
    return values


def _explain(message: str, options: list[Option]) -> str:
    """Turns an error text of the parser into one line with the name, the value and what it must be."""
    by_name = {option.name: option for option in options}
    if found := re.search(r"unrecognized arguments: (.*)", message, re.S):
        return _explain_unknown(found[1].split()[0], by_name)
    if found := re.match(r"argument --([\w.]+): expected one argument", message):
        return f"--{found[1]} needs a value: {describe(by_name[found[1]].hint)}"
    if found := re.match(r"argument --([\w.]+): expected 2 arguments", message):
        return f"--{found[1]} needs two values, written --{found[1]} A B. {by_name[found[1]].doc}"
    key = re.search(r'Parser key "([^"]+)"', message)
    value = re.search(r"Given value: (.*)", message, re.S) or re.search(r"Got value: (.*)", message, re.S)
    if not key or not value or key[1] not in by_name:
        return " ".join(message.split())
    hint, text = by_name[key[1]].hint, " ".join(value[1].split())
    said = "null" if text == "None" else repr(text)
    return f"{key[1]} is {said}: it must be {describe(hint)}{_closest_value(text, hint)}"


def _explain_unknown(token: str, by_name: dict[str, Option]) -> str:
    if not token.startswith("-"):
        return f"unexpected argument {token!r}: options are written --name value, and the command comes first"
    name = token.lstrip("-").partition("=")[0]
    if group := [other for other in by_name if other.startswith(f"{name}.")]:
        return f"--{name} is a group of options: write one of them, such as --{group[0]}"
    return f"unknown option {token.partition('=')[0]}{suggest(name, by_name, dashes='--') or '; --help lists them'}"


def _closest_value(text: str, hint: Any) -> str:
    """Returns " (did you mean ...?)" for a misspelt choice or a whole number written as a float, else ""."""
    kinds = typing.get_args(hint) or (hint,)
    literals = [kind for kind in (*kinds, hint) if typing.get_origin(kind) is Literal]
    if literals:
        return nearest(text, map(str, typing.get_args(literals[0])))
    try:
        whole = float(text)
    except ValueError:
        return ""
    return f" (did you mean {int(whole)}?)" if int in kinds and whole.is_integer() else ""
