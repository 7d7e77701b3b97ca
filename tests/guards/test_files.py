"""What every file of the project keeps to."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_no_file_of_code_is_longer_than_400_lines():
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    named = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    lengths = {name: (ROOT / name).read_text().count("\n") for name in named.stdout.split()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}
    assert len(lengths) > 100
