"""README and docs name only what exists: links, files, Python names, Make targets, commands, configuration."""

from __future__ import annotations

import pkgutil
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from lit_fedad.cli.main import COMMANDS
from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.core.config_groups import choices, conf_folder
from lit_fedad.core.options import bind
from lit_fedad.core.override_checks import RENAMED
from lit_fedad.evaluation.anomaly import AnomalyEvaluator

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]
LAB = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs" / "lab").glob("*.md"))
OTHERS = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
FOLDERS = ("benchmarks", "conf", "docs", "lit_fedad", "scripts", "sweeps", "tests")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.M | re.S)


def read(page: str) -> str:
    return (ROOT / page).read_text()


def code(page: str) -> list[str]:
    """Lines of code blocks, continued ones joined, without their comments; and inline code."""
    blocks = [block for _, block in FENCE.findall(read(page))]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`\n]+)`", FENCE.sub("", read(page)))
    return [line.partition(" #")[0].strip() for line in lines + inline]


def made(page: str) -> set[str]:
    """Names of the files that a page tells its reader to write: a path on a line that a block of code follows."""
    return {Path(path).stem for path in re.findall(r"`([\w./-]+\.(?:py|yaml))`.*:\n\n```", read(page))}


def commands(page: str, start: str) -> list[list[str]]:
    """The arguments after ``start`` of commands in code, placeholders and all."""
    lines = [line for line in code(page) if line.startswith(start + " ") and "..." not in line]
    return [shlex.split(line.removeprefix(start)) for line in lines]


def calls(page: str) -> list[list[str]]:
    """Command and arguments of ``lit-fedad``, by hand or by Make; mentions without arguments are left out."""
    makefile = (ROOT / "Makefile").read_text()
    commands_of_make = dict(re.findall(r"^([a-z-]+):.*##.*\n\t@\$\(BIN\)/lit-fedad (\w+)", makefile, re.M))
    found = commands(page, "lit-fedad")
    for target, *variables in commands(page, "make"):
        if target in commands_of_make:
            given = dict(variable.split("=", 1) for variable in variables)
            words = shlex.split(given.pop("ARGS", ""))
            found.append(
                [
                    commands_of_make[target],
                    *(f"{key.lower()}={value}" for key, value in given.items()),
                    *words,
                ]
            )
    return [call for call in found if len(call) > 1 and "--cfg" not in call]


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, *LAB, *OTHERS])
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", read(page)))
    for link in links:
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page):
    files = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    for word in {word for line in code(page) for word in line.split()}:
        rooted = word.startswith(tuple(f"{folder}/" for folder in FOLDERS))
        if (
            (rooted or word.endswith(".py"))
            and re.fullmatch(r"[\w./-]+", word)
            and Path(word).stem not in made(page)
        ):
            assert (ROOT / word).exists() or any(file.endswith(f"/{word}") for file in files), word


@pytest.mark.parametrize("page", PAGES)
def test_named_python_objects_exist(page):
    for name in set(re.findall(r"\blit_fedad(?:\.\w+)+", read(page))):
        if made(page).isdisjoint(name.split(".")):
            pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist(page):
    targets = re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
    for line in code(page):
        if re.match(r"make [a-z]", line):
            assert line.split()[1] in targets, line
        if re.match(r"lit-fedad [a-z]", line):
            assert line.split()[1] in COMMANDS, line
        if match := re.match(r"(?:\S*python\S*) -m benchmarks (\w+)", line):
            assert (ROOT / "benchmarks" / f"{match[1]}.py").exists(), line


@pytest.mark.parametrize("page", PAGES)
def test_choices_of_configuration_groups_exist(page):
    known = {folder.name: choices(folder.name) for folder in conf_folder().iterdir()}
    known["study"] = [path.stem for path in (ROOT / "sweeps").glob("*.yaml")]
    known["table"] += ["list"]  # prints what can be made
    given = re.findall(r"(?<![\w.])(\w+)=([a-z]\w*(?:,\w+)*)", "\n".join(code(page)))
    for group, chosen in given:
        group = group.lower() if group.isupper() else group
        for name in chosen.split(",") if group in known else ():
            assert name in {*known[group], "null", *made(page)}, f"{group}={name}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_take_the_keys_that_they_are_given(page):
    for name, *words in calls(page):
        form, words, title = COMMANDS[name].called(name, words)
        function = pkgutil.resolve_name(f"lit_fedad.{form.function}")
        bind(function, words, title, display=None)  # checks keys, types and what must be given


@pytest.mark.parametrize(
    "page", ["README.md", *(pytest.param(page, marks=pytest.mark.slow) for page in PAGES[1:])]
)
def test_trainings_compose(page):
    for name, *overrides in calls(page):
        if name == "train" and not any(override.partition("=")[2] in made(page) for override in overrides):
            federation = compose(overrides)["federation"]
            for section in ("sampler", "channel", "robust", "secure_sum", "privacy"):
                build(federation.get(section))  # which checks how its settings go together


def test_the_table_of_the_page_has_the_metrics_that_the_page_selects():
    (given,) = re.findall(r"`metrics=([\w,]+)`", read("docs/running.md"))
    assert {*given.split(",")} <= {*AnomalyEvaluator.metrics}


@pytest.mark.parametrize("page", PAGES)
def test_equations_are_found_by_paper_and_number(page):
    text = read(page)
    assert not re.findall(r"Eqs\.|Eq\. \d+(?:-| to |, )\d+", text)
    assert not re.findall(r".{0,30}(?<!FedDyMem )(?<!FADngs )(?<!FedVCK )(?<!GLDP )Eq\. \d+", text)


def test_the_readme_is_short():
    assert len(read("README.md").splitlines()) <= 200


def test_the_changelog_says_what_takes_the_place_of_each_old_name():
    rows = dict(re.findall(r"^\| `method=(\w+)` \| `([^`]+)`", read("CHANGELOG.md"), re.M))
    assert {old: new.split(" with ")[0] for old, new in RENAMED.items()} == rows


def test_stations_are_where_the_page_puts_them():
    """``file.py Class.method`` of docs/lab/ways.md is defined in that file."""
    stations = re.findall(r"`(lit_fedad/[\w/]+\.py) ([\w.]+)`", read("docs/lab/ways.md"))
    assert len(stations) > 20
    for path, name in stations:
        owner, _, method = name.rpartition(".")
        source = (ROOT / path).read_text()
        assert re.search(rf"^ *(def|class) {method}\b", source, re.MULTILINE), f"{path} {name}"
        assert not owner or re.search(rf"^class {owner}\b", source, re.MULTILINE), f"{path} {name}"


def test_the_picture_of_the_packages_has_the_layers_of_the_imports():
    picture = (ROOT / "docs/images/architecture.svg").read_text().partition("<!-- One round")[0]
    shown = [name for text in re.findall(r'class="name"[^>]*>([^<]+)<', picture) for name in text.split(", ")]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == ["lit_fedad"])
    assert shown == [name for layer in layers for name in layer.split(" | ") if not name.startswith("_")]
