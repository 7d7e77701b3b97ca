"""Modules import one way: no circle, neither by imports for types nor by imports inside a function."""

import ast
from pathlib import Path

import lit_fedad

ROOT = Path(lit_fedad.__file__).parent


def imports():
    """Modules of the package by those that import them, wherever the import stands."""
    files = {
        ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in ROOT.rglob("*.py")
    }
    found = {}
    for name, path in files.items():
        targets = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                members = {f"{node.module}.{alias.name}" for alias in node.names}
                targets.update(members & files.keys() or {node.module})
        found[name] = targets & files.keys() - {name}
    return found


def circles(graph):
    """Sets of modules that reach each other."""
    reached = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            for module in graph[waiting.pop()] - seen:
                seen.add(module)
                waiting.append(module)
        reached[start] = seen
    return {
        frozenset(other for other in seen if start in reached[other])
        for start, seen in reached.items()
        if start in seen
    }


def test_a_circle_is_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"f"}, "f": {"e"}}
    assert circles(graph) == {frozenset("bc"), frozenset("ef")}


def test_no_modules_import_each_other():
    assert sorted(map(sorted, circles(imports()))) == []
