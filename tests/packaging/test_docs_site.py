"""The documentation as a site: every page has its place, and it is built without a warning."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}


def test_every_page_has_one_place_in_the_tour():
    trees = re.findall(r"^:::\{toctree\}\n(.*?)^:::", (ROOT / "docs/index.md").read_text(), re.M | re.S)
    placed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    assert sorted(placed) == sorted([*PAGES, "lab/*"])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    # What is generated lies beside the pages, so they are copied.
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "reference"))
    shutil.copy(ROOT / "README.md", tmp_path)
    for name in ("lit_fedad", "containers"):
        (tmp_path / name).symlink_to(ROOT / name)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, str(tmp_path / "docs"), str(tmp_path / "site")],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / "site" / f"{page}.html").is_file() for page in PAGES)
    assert "FedAvgClient" in (tmp_path / "site/reference/lit_fedad.methods.fedavg.html").read_text()
    # Links to the package's files lead to the reference.
    assert "reference/lit_fedad.federation.loop.html" in (tmp_path / "site/architecture.html").read_text()
    # The search lists guides before the reference.
    order = (ROOT / "docs/search_order.js").read_text()
    assert order in (tmp_path / "site/_static/language_data.js").read_text()
