"""Reads the keys of a command from the signature and the docstring of its function, without importing the module.

Modules of commands import torch, Lightning or MLflow, which takes seconds; help must appear at once.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lit_fedad

_Declared = ast.FunctionDef | ast.ClassDef


class Key(NamedTuple):
    """A key of a command.

    Attributes:
        name: Name of the key; ``root.NAME`` for a key that takes several values by name.
        default: Text of the default value; None if the key must be given.
        meaning: Description of the key.
        choices: All accepted values; empty if others are accepted too.
    """

    name: str
    default: str | None
    meaning: str
    choices: tuple[str, ...] = ()

    @property
    def syntax(self) -> str:
        """The form in which the key is given: ``run=RUN``, ``attack=lira|dcor``."""
        return f"{self.name}={'|'.join(self.choices) or self.name.rpartition('.')[2].upper()}"


def keys(path: str) -> list[Key]:
    """Lists the keys of a command: the parameters of its function, as `lit_fedad.core.options.bind` reads them.

    Args:
        path: Dotted path of the function, such as ``lit_fedad.deployment.watch.watch``.

    Raises:
        ValueError: If there is no such function.

    Example:
        >>> [key.syntax for key in keys("lit_fedad.cli.completion.completion")]
        ['shell=bash|zsh']
    """
    module, node = _find(*path.rpartition(".")[::2])
    if not isinstance(node, _Declared):
        raise ValueError(f"{path}: no function of the package")
    return _keys(module, node)


def summary(path: str) -> str:
    """Returns the first paragraph of a function's docstring in one line, without backquotes and final full stop.

    Example:
        >>> summary("lit_fedad.cli.completion.completion")
        'Prints the script that completes lit-fedad in a shell'
    """
    node = _find(*path.rpartition(".")[::2])[1]
    first = (ast.get_docstring(node) or "").split("\n\n")[0]
    return " ".join(first.split()).replace("`", "").removesuffix(".")


def _keys(module: str, node: _Declared) -> list[Key]:
    meanings, listed, overrides = _meanings(node), list[Key](), list[Key]()
    for name, kind, default in _parameters(node):
        definition = _find(module, kind.id) if isinstance(kind, ast.Name) else (module, kind)
        mapping = _generic_name(kind) == "Mapping"
        if name == "overrides":
            # A sequence of overrides takes words unchanged; the usage of the command describes them.
            overrides += (
                [Key("SECTION.KEY", "", meanings.get(name, ""))] if _generic_name(kind) != "Sequence" else []
            )
        elif name == "display":
            continue
        elif isinstance(definition[1], ast.ClassDef):  # a dataclass stands for its fields
            listed += _keys(*definition)
        else:
            listed.append(
                Key(
                    f"{name}.NAME" if mapping else name,
                    "" if mapping else _default(default),
                    meanings.get(name, ""),
                    _choices(module, kind),
                )
            )
    return listed + overrides


def _parameters(node: _Declared) -> Iterator[tuple[str, ast.expr, ast.expr | None]]:
    """Yields name, type and default of each parameter or field."""
    if isinstance(node, ast.ClassDef):
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                yield line.target.id, line.annotation, line.value
    else:
        plain, named = node.args.args, node.args.kwonlyargs
        defaults = [
            *[None] * (len(plain) - len(node.args.defaults)),
            *node.args.defaults,
            *node.args.kw_defaults,
        ]
        for one, default in zip([*plain, *named], defaults, strict=True):
            assert one.annotation is not None
            yield one.arg, one.annotation, default


def _generic_name(kind: ast.expr) -> str:
    """Returns the name of a generic type, such as ``Mapping``; empty for other types."""
    return kind.value.id if isinstance(kind, ast.Subscript) and isinstance(kind.value, ast.Name) else ""


def _choices(module: str, kind: ast.expr) -> tuple[str, ...]:
    if isinstance(kind, ast.Name):
        kind = _find(module, kind.id)[1]
    if not isinstance(kind, ast.Subscript) or _generic_name(kind) != "Literal":
        return ()
    values = ast.literal_eval(kind.slice)
    return values if isinstance(values, tuple) else (values,)


def _default(node: ast.expr | None) -> str | None:
    """Formats a default value as a user would give it; None if there is no default."""
    match node:
        case None:
            return None
        case ast.Constant(value=None | bool() as value):
            return {None: "null", True: "true", False: "false"}[value]
        case ast.Constant(value=value):
            return str(value)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return ",".join(str(_default(part)) for part in parts)
    return ast.unparse(node)


def _find(module: str, name: str) -> tuple[str, Any]:
    """Finds the definition of a name in a module, following imports within the package.

    Returns:
        The module and the node of the definition; if there is none, the given module and the name itself.
    """
    for line in _parsed(module).body:
        match line:
            case ast.FunctionDef() | ast.ClassDef() if line.name == name:
                return module, line
            case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                return module, value
            case ast.ImportFrom(module=str() as source, names=names):
                for one in names:
                    if (one.asname or one.name) == name and source.startswith("lit_fedad."):
                        return _find(source, one.name)
    return module, ast.Name(id=name)


@cache
def _parsed(module: str) -> ast.Module:
    place = Path(lit_fedad.__file__).parent.joinpath(*module.split(".")[1:])
    file = place.with_suffix(".py")
    return ast.parse((file if file.is_file() else place / "__init__.py").read_text(encoding="utf-8"))


def _meanings(node: _Declared) -> dict[str, str]:
    """Reads the entries of ``Args`` or ``Attributes`` in a docstring, with ``None`` replaced by ``null`` and so on."""
    text = ast.get_docstring(node) or ""
    section = re.search(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)+)", text, re.M)
    entries = re.findall(r"^ {4}\**(\w+): (.*(?:\n {8}.*)*)", section[1] if section else "", re.M)
    words = {"None": "null", "True": "true", "False": "false"}
    return {
        name: re.sub(
            r"\b(None|True|False)\b", lambda match: words[match[0]], " ".join(meaning.split())
        ).replace("`", "")
        for name, meaning in entries
    }
