"""The notebooks of the docs: they hold no outputs, and run from their first cell to their last."""

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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_hold_no_outputs_and_no_machine(path):
    content = json.loads(path.read_text())
    for cell in content["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == ([], None)
        text = "".join(cell["source"])
        assert not re.search(r"/(?:home|tmp|root|Users|work)/", text)
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert (path.parent / link).is_file(), link
    assert set(content["metadata"]) == {"kernelspec", "language_info"}


@pytest.mark.slow
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
    here = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=None, startup_timeout=600, resources=here).execute()
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert last.outputs, "the last cell shows what the notebook found"
    shown = {
        form for cell in notebook.cells for out in cell.get("outputs", []) for form in out.get("data", {})
    }
    assert path.stem != "first_detector" or "image/png" in shown
