"""The keys of a command, as the signature and the docstring of what declares them tell: read and not imported.

What a command needs (torch, Lightning, MLflow) takes seconds to import, and its help is asked for by who waits for it.
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
        name: As it is given; ``root.NAME`` for one that takes several values by name.
        default: Text of its default; None where it must be given.
        meaning: What it does.
        choices: Its values, where it takes no others.
    """

    name: str
    default: str | None
    meaning: str
    choices: tuple[str, ...] = ()

    @property
    def syntax(self) -> str:
        """How it is given: ``run=RUN``, ``attack=lira|dcor``."""
        return f"{self.name}={'|'.join(self.choices) or self.name.rpartition('.')[2].upper()}"


def keys(path: str) -> list[Key]:
    """Lists the keys of a command: the parameters of its function, as `lit_fedad.core.options.bind` reads them.

    Args:
        path: Place of the function, such as ``lit_fedad.deployment.watch.watch``.

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
    """Returns the first paragraph of a function's docstring, in one line and without marks of code and its full stop.

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
        found = _find(module, kind.id) if isinstance(kind, ast.Name) else (module, kind)
        mapping = _of(kind) == "Mapping"
        if name == "overrides":
            # A sequence takes words as they are: the command's usage says which.
            overrides += [Key("SECTION.KEY", "", meanings.get(name, ""))] if _of(kind) != "Sequence" else []
        elif name == "display":
            continue
        elif isinstance(found[1], ast.ClassDef):  # stands for its fields
            listed += _keys(*found)
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


def _of(kind: ast.expr) -> str:
    """Name of a generic type."""
    return kind.value.id if isinstance(kind, ast.Subscript) and isinstance(kind.value, ast.Name) else ""


def _choices(module: str, kind: ast.expr) -> tuple[str, ...]:
    if isinstance(kind, ast.Name):
        kind = _find(module, kind.id)[1]
    if not isinstance(kind, ast.Subscript) or _of(kind) != "Literal":
        return ()
    values = ast.literal_eval(kind.slice)
    return values if isinstance(values, tuple) else (values,)


def _default(node: ast.expr | None) -> str | None:
    """Writes a default as a user gives it; None where there is none."""
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
    """Finds module and node of what a name stands for, through the package's own imports; a name of none as it is."""
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
    """Reads the entries of ``Args`` or ``Attributes`` in a docstring, in the words of the command line."""
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
