"""Fixtures for all tests."""

import lit_fedad  # noqa: F401  (makes torchvision importable beside a CPU-only torch, before anything imports it)
