"""The size at which images are looked at where nobody gives one."""

import pytest

from lit_fedad.core import sizes
from lit_fedad.core.config import compose

OWN = ["data=auto", "data.root=images"]


@pytest.fixture
def machine(monkeypatch):
    """Sets the gigabytes of memory that the machine says it has."""
    return lambda gigabytes: monkeypatch.setattr(sizes, "machine_memory", lambda: int(gigabytes * 2**30))


@pytest.mark.parametrize(
    ("overrides", "memory", "size", "grid"),
    [
        (OWN, 8, 256, 32),
        (OWN, 2, 128, 16),  # memory does not allow more
        (["experiment=small", *OWN], 8, 128, 16),  # asked for
        ([], 8, 128, 16),  # drawn
    ],
)
def test_photographs_are_looked_at_in_256_pixels_where_memory_allows(machine, overrides, memory, size, grid):
    machine(memory)
    config = compose(overrides)
    assert (config["image"]["size"], config["grid"], config["task"]["grid"]) == (size, grid, grid)


def test_a_run_says_its_size_the_key_and_why_photographs_have_no_more(machine):
    config = {"image": {"size": [128, 64]}, "data": {"_target_": "lit_fedad.data.auto.auto"}}
    machine(8)
    assert sizes.size_in_words(config) == "128 x 64 pixels (image.size)"
    machine(2.5)
    assert "machine of 4.0 GiB of memory, here are 2.5 GiB" in sizes.size_in_words(config)


def test_memory_is_that_of_the_container(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(sizes, "_LIMITS", (str(tmp_path / "none"), str(limit)))
    limit.write_text("max\n")
    whole = sizes.machine_memory()
    limit.write_text("1048576\n")
    assert sizes.machine_memory() == 1048576 < whole
