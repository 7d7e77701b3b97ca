"""JSON as the standard has it."""

import json
from pathlib import Path
from typing import Any

import pytest


def strict_json(path: Path) -> Any:
    """Reads a file; NaN and Infinity fail the test."""
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{path.name} holds {name}"))
