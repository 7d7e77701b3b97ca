"""The wheel: all files of the package and of its configuration, and a readme that stands without the repository."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[2]
SOURCE = "https://example.org/owner/lit_fedad"


def readme(root, monkeypatch, tmp_path):
    """The readme of a wheel that is built of a folder, and the names of its files, which lie in ``unpacked``."""
    monkeypatch.chdir(root)
    (wheel,) = WheelBuilder(str(root)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_string(archive.read(name).decode()).get_payload(), archive.namelist()


@pytest.fixture
def small(tmp_path):
    """A project of this one's settings and readme, and an address."""
    root = tmp_path / "project"
    (root / "lit_fedad").mkdir(parents=True)
    (root / "scripts").mkdir()
    for name in (
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "scripts/readme_for_index.py",
        "lit_fedad/__init__.py",
    ):
        (root / name).write_text((ROOT / name).read_text())
    for name in ("conf", "sweeps"):
        (root / name).mkdir()
    settings = root / "pyproject.toml"
    text = re.sub(
        r'# \[project.urls\]\n# Source = ".*"', f'[project.urls]\nSource = "{SOURCE}"', settings.read_text()
    )
    settings.write_text(text)
    assert tomllib.loads(text)["project"]["urls"] == {"Source": SOURCE}
    return root


def test_an_address_makes_pictures_and_links_whole(small, monkeypatch, tmp_path):
    shown, _ = readme(small, monkeypatch, tmp_path / "dist")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", shown)
    assert [link for _, link in links if not link.startswith(("https://", "#"))] == []
    pictures = [link for picture, link in links if picture]
    written = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert pictures == [f"{SOURCE}/raw/main/{path}" for path in written]
    assert f"{SOURCE}/blob/main/docs/running.md#backbone-weights" in [link for _, link in links]


def test_the_wheel_is_complete(monkeypatch, tmp_path):
    shown, names = readme(ROOT, monkeypatch, tmp_path)
    assert shown.strip() == (ROOT / "README.md").read_text().strip()
    for folder, place in (
        ("lit_fedad", "lit_fedad"),
        ("conf", "lit_fedad/conf"),
        ("sweeps", "lit_fedad/studies"),
    ):
        files = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file()]
        wanted = {f"{place}/{file.as_posix()}" for file in files if "__pycache__" not in file.parts}
        assert wanted <= set(names)
    assert not [name for name in names if not name.startswith(("lit_fedad/", "lit_fedad-"))]


@pytest.mark.slow
def test_its_configuration_is_found_away_from_the_repository(monkeypatch, tmp_path):
    readme(ROOT, monkeypatch, tmp_path)
    code = (
        "from lit_fedad.core import config, config_groups; print(config_groups.conf_folder());"
        "print(config.compose(['method=feddymem_literal', 'debug=seconds'])['method']['name'])"
    )
    away = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path / "unpacked"), "PATH": ""}}
    found = subprocess.run([sys.executable, "-c", code], **away, check=True, capture_output=True, text=True)
    assert found.stdout.splitlines() == [str(tmp_path / "unpacked/lit_fedad/conf"), "feddymem_literal"]
