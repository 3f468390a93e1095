"""Every field of the configuration is read by something: a field that nothing reads promises what nobody keeps."""

import ast
import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest

from jaxshard.config import Config
from jaxshard.config.options import options_of

ROOT = Path(__file__).parent.parent
NAMES = [option.name for option in options_of(Config())]
GROUPS = {name: type(group) for name, group in vars(Config()).items() if dataclasses.is_dataclass(group)}
CLASSES = {cls.__name__: cls for cls in (Config, *GROUPS.values())}
SAME_FIELDS = {"Architecture": "ModelConfig"}
"""Classes that carry a group's fields on, so that reading there counts. `Architecture` is a completed model."""


def fields_read(sources: Iterable[str]) -> set[str]:
    """Returns the dotted names of the fields that some source reads as an attribute of a configuration.

    What an expression is follows from annotations (of parameters, variables, attributes, and what functions return),
    from assignments, and along attributes: `Path.name` does not count for `optim.name`.
    """
    trees = [ast.parse(source) for source in sources]
    reader = _Reader(trees)
    for tree in trees:
        reader.visit(tree)
    return reader.found


class _Reader(ast.NodeVisitor):
    def __init__(self, trees: list[ast.Module]):
        self.found: set[str] = set()
        self.scopes: list[dict[str, str | None]] = [{}]
        self.owner: list[str | None] = []
        self.returns: dict[str, str] = {}
        self.attributes: dict[tuple[str, str], str] = {}
        for tree in trees:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and (kind := self.named(node.returns)):
                    self.returns[node.name] = kind
                if isinstance(node, ast.ClassDef):
                    for item in ast.walk(node):
                        self.note_attribute(node.name, item)

    def note_attribute(self, owner: str, item: ast.AST) -> None:
        """Takes down `name: Config` in a class body, and `self.name = parameter` in its methods."""
        if isinstance(item, ast.AnnAssign) and (kind := self.named(item.annotation)):
            target = item.target
            name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
            self.attributes[owner, name] = kind
        if isinstance(item, ast.FunctionDef):
            parameters = {a.arg: self.named(a.annotation) for a in (*item.args.args, *item.args.kwonlyargs)}
            for inner in ast.walk(item):
                if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Attribute):
                    kind = self.kind(inner.value, parameters)
                    if kind:
                        self.attributes[owner, inner.targets[0].attr] = kind

    @staticmethod
    def named(annotation: ast.AST | None) -> str | None:
        """Returns the configuration class that an annotation names: Config, 'Config', Config | None."""
        text = ast.unparse(annotation) if annotation else ""
        words = "".join(letter if letter.isalnum() or letter == "_" else " " for letter in text).split()
        return next((word for word in words if word in CLASSES or word in SAME_FIELDS), None)

    def kind(self, node: ast.AST, scope: dict[str, str | None] | None = None) -> str | None:
        """Returns the class of an expression, where it is a configuration."""
        if isinstance(node, ast.Name):
            scopes = [scope] if scope is not None else reversed(self.scopes)
            return next((names[node.id] for names in scopes if node.id in names), None)
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name == "replace" and node.args:
                return self.kind(node.args[0], scope)
            return name if name in CLASSES or name in SAME_FIELDS else self.returns.get(name)
        if isinstance(node, ast.Attribute):
            owner = self.kind(node.value, scope)
            if owner == "Config" and node.attr in GROUPS:
                return GROUPS[node.attr].__name__
            if isinstance(node.value, ast.Name) and node.value.id == "self" and self.owner:
                return self.attributes.get((self.owner[-1] or "", node.attr))
            kinds = {kind for (_, name), kind in self.attributes.items() if name == node.attr}
            return kinds.pop() if owner is None and len(kinds) == 1 and node.attr in ("config", "arch") else None
        return None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.owner.append(node.name)
        self.generic_visit(node)
        self.owner.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        names = {argument.arg: self.named(argument.annotation) for argument in arguments}
        if self.owner and "self" in names and self.owner[-1] in SAME_FIELDS:
            names["self"] = self.owner[-1]
        self.scopes.append(names)
        self.generic_visit(node)
        self.scopes.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        pairs = [(target, node.value) for target in node.targets]
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
        for target, value in pairs:
            if isinstance(target, ast.Name):
                self.scopes[-1][target.id] = self.kind(value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and (kind := self.named(node.annotation)):
            self.scopes[-1][node.target.id] = kind

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owner = self.kind(node.value)
        owner = SAME_FIELDS.get(owner or "", owner)
        if owner not in CLASSES or not isinstance(node.ctx, ast.Load):
            return
        prefix = next((f"{name}." for name, cls in GROUPS.items() if cls.__name__ == owner), "")
        if f"{prefix}{node.attr}" in NAMES:
            self.found.add(f"{prefix}{node.attr}")


def test_every_field_is_read_by_something():
    paths = [path for path in (ROOT / "jaxshard").rglob("*.py") if path.name != "config.py"]
    unread = set(NAMES) - fields_read(path.read_text() for path in paths)
    assert not unread, f"no code reads {sorted(unread)}"


READERS = {
    "optim.lr": "def f(config: Config): return config.optim.lr",
    "train.seed": "def f(train: 'TrainConfig | None'): return train.seed",
    "eval.every": "def f(config: Config):\n  e = config.eval\n  return e.every",
    "log.every": "class A:\n  config: Config\n  def f(self): return self.config.log.every",
    "data.path": "class A:\n  def __init__(self, c: Config):\n    self.c = c\n  def f(self): return self.c.data.path",
    "model.dropout": "def f(arch: Architecture): return arch.dropout",
    "zero": "def g() -> Config: ...\ndef f(): return g().zero",
    "checkpoint.keep": "def f(a: Config):\n  _, c = 1, a.checkpoint\n  return c.keep",
}


@pytest.mark.parametrize("name", READERS)
def test_a_read_is_found(name):
    assert fields_read([READERS[name]]) == {name}


@pytest.mark.parametrize(
    "source",
    [
        "def f(path: Path): return path.name, path.steps",
        "def f(config: Config): config.train.stepz; config.zeroes",
        "def f(config: Config): return replace(config, zero=3)",
        "def f(other): return other.train.steps",
        "def f(config: Config): return config.optim.seq_len",
        "def f(config: Config): 'config.zero'",
        "def f(optim: OptimConfig):\n  optim = 3\n  return optim.lr",
    ],
)
def test_other_attributes_are_not_taken_for_a_read(source):
    assert fields_read([source]) == set()
