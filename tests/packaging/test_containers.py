"""The container files: rules as hadolint has them, and packages as pyproject.toml has them."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "containers").glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(text):
    """Instructions and their arguments in order, continued lines joined, without comments."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [tuple(re.split(r"\s+", line.strip(), maxsplit=1)) for line in joined.splitlines()]


def faults(text):
    """Rules of hadolint that a file breaks, by their numbers, and two of our own."""
    found = instructions(text)
    words = {name: [argument for other, argument in found if other == name] for name, _ in found}
    runs = [command.strip() for run in words.get("RUN", []) for command in run.split("&&")]
    pips = [command for command in runs if re.match(r"(\S*python\S* -m )?pip3? install", command)]
    user = words.get("USER", ["root"])[-1]
    rules = {
        "DL3000 an absolute WORKDIR": all(path.startswith("/") for path in words.get("WORKDIR", [])),
        "DL3002 the last user is not root": user not in ("root", "0"),
        "DL3004 no sudo": not any(re.search(r"\bsudo\b", command) for command in runs),
        "DL3006 a pinned base": all(re.search(r":\d+\.\d+\.\d+", base) for base in words["FROM"]),
        "DL3008 no apt-get": not any("apt-get" in command for command in runs),
        "DL3020 COPY instead of ADD": "ADD" not in words,
        "DL3025 JSON for ENTRYPOINT and CMD": all(
            argument.startswith("[") for name in ("ENTRYPOINT", "CMD") for argument in words.get(name, [])
        ),
        "DL3042 no cache of pip": all("--no-cache-dir" in command for command in pips),
        "DL4000 no MAINTAINER": "MAINTAINER" not in words,
        "only the wheel is copied": all(copy.startswith("dist/lit_fedad-") for copy in words.get("COPY", [])),
        "no secrets": not re.search(r"(?i)(password|secret|token|api_?key)\s*=|https?://[^/\s]+@", text),
    }
    return [rule for rule, held in rules.items() if not held]


def test_there_is_one_for_a_site_and_one_for_a_gpu():
    assert [path.name for path in FILES] == ["Dockerfile.gpu", "Dockerfile.site"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_rules_hold(path):
    assert faults(path.read_text()) == []
    names = [name for name, _ in instructions(path.read_text())]
    assert names[0] == "FROM"
    assert names.index("COPY") < names.index("RUN") < names.index("USER") < names.index("ENTRYPOINT")


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("FROM python:latest", "DL3006"),
        ("FROM python", "DL3006"),
        ("USER root", "DL3002"),
        ("ADD x /x", "DL3020"),
        ("WORKDIR here", "DL3000"),
        ("RUN sudo true", "DL3004"),
        ("RUN apt-get update \\\n && apt-get install -y git", "DL3008"),
        ("RUN true && pip install numpy", "DL3042"),
        ("CMD lit-fedad help", "DL3025"),
        ("COPY . /app", "only the wheel"),
        ("ENV DB_PASSWORD=x", "no secrets"),
        ("ARG URL=https://user:pass@host/simple", "no secrets"),
    ],
)
def test_a_broken_rule_is_found(line, rule):
    text = (ROOT / "containers/Dockerfile.site").read_text()
    (found,) = faults(f"{text}{line}\n")
    assert found.startswith(rule)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_pip_installs_extras_that_exist(path):
    (extras,) = re.findall(r"\$\{wheel\}\[([\w,]+)\]", path.read_text())
    chosen = extras.split(",")
    assert set(chosen) <= set(PROJECT["optional-dependencies"])
    assert not {"faiss", "gpu"} <= set(chosen), "both own the module faiss"
    assert ("train" in chosen) == path.name.endswith("gpu"), "a site is small"


def test_torch_is_asked_for_as_the_package_does():
    asked = re.findall(
        r'"((?:torch|torchvision)[<>=][^"]+)"', (ROOT / "containers/Dockerfile.site").read_text()
    )
    assert len(asked) == 2
    assert set(asked) <= set(PROJECT["dependencies"])


def test_nothing_but_the_wheel_reaches_the_builder():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["*", "!dist/*.whl"]
