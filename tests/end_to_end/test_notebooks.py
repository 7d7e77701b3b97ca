"""The notebooks of the docs: they run from their first cell to their last, and show what they showed when stored."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks_which_the_index_names():
    index = (ROOT / "docs" / "index.md").read_text()
    assert len(NOTEBOOKS) == 3
    assert all(f"](notebooks/{path.name})" in index for path in NOTEBOOKS)


def shown(cells):
    """Formats of what each cell of code shows, without warnings."""
    outputs = [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]
    return [[sorted(out.get("data", "")) for out in cell if out.get("name") != "stderr"] for cell in outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_hold_what_they_show_and_no_machine(path):
    content = json.loads(path.read_text())
    assert shown(content["cells"])[-1], "the last cell shows what the notebook found"
    for cell in content["cells"]:
        text = "".join(cell["source"])
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert (path.parent / link).is_file(), link
        outputs = cell.get("outputs", [])
        pictures = [out["data"].pop("image/png", "") for out in outputs if "data" in out]
        assert sum(map(len, pictures)) < 300_000
        assert not re.search(r"/(?:home|tmp|root|Users|work)/", text + json.dumps(outputs))
        assert not {out["output_type"] for out in outputs} - {"stream", "execute_result", "display_data"}
    assert set(content["metadata"]) == {"kernelspec", "language_info"}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(path, as_version=4)
    stored = shown(notebook.cells)
    for cell in notebook.cells:  # in half of the size, with half of the training images
        cell.source = re.sub(
            r"((?:size|train_per_product)(?:=|\": ))(\d+)",
            lambda found: f"{found[1]}{int(found[2]) // 2}",
            cell.source,
        )
    here = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=None, startup_timeout=600, resources=here).execute()
    assert shown(notebook.cells) == stored
