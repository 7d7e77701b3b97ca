"""The development lock: every dependency of pyproject.toml in a version that it allows, and nothing of this machine."""

import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def entries():
    """Requirements of the lock, each with its hashes."""
    text = (ROOT / "requirements-dev.lock").read_text().replace("\\\n", "")
    return [line.split(" --hash=") for line in text.splitlines() if not line.startswith("#")]


def lines():
    """Requirements of the lock."""
    return [requirement.strip() for requirement, *_ in entries()]


def needed(given=PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]):
    """Requirements of the package and of its extra ``dev``, with those of the extras that it names."""
    for requirement in map(Requirement, given):
        if requirement.name == "lit-fedad":
            for extra in requirement.extras:
                yield from needed(PROJECT["optional-dependencies"][extra])
        else:
            yield requirement


def pins():
    """Pinned versions by name, each with its marker."""
    found = defaultdict(list)
    for line in lines():
        requirement = Requirement(line)
        (pin,) = requirement.specifier
        found[canonicalize_name(requirement.name)].append((pin, requirement.marker))
    return found


def test_a_line_is_a_name_and_one_version():
    """No address, path or option: those of the machine that wrote it."""
    for line in lines():
        requirement = Requirement(line)
        assert requirement.url is None, line
        assert [pin.operator for pin in requirement.specifier] == ["=="], line
        assert "+" not in str(requirement.specifier), line


def test_every_version_has_its_files_hashes():
    for requirement, *hashes in entries():
        assert hashes, requirement
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", entry.strip()) for entry in hashes), requirement


@pytest.mark.parametrize("python", PYTHONS)
def test_it_names_every_dependency_in_an_allowed_version(python):
    here = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    pinned = pins()
    for requirement in needed():
        held = [
            pin
            for pin, marker in pinned[canonicalize_name(requirement.name)]
            if marker is None or marker.evaluate(here)
        ]
        assert len(held) == 1, requirement
        assert requirement.specifier.contains(held[0].version), f"{requirement}: {held[0]}; run `make lock`"
