"""Examples in docstrings."""

import doctest
import importlib
from pathlib import Path

import pytest

import lit_fedad
from lit_fedad.core.extras import extra_of

ROOT = Path(lit_fedad.__file__).parent
MODULES = sorted(
    ".".join(["lit_fedad", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if extra_of(str(error.name)) is None:
            raise
        pytest.skip(f"{error.name} is not installed")
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0
