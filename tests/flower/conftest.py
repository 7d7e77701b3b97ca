"""Tests of this folder need Flower: pip install 'lit-fedad[flower]'."""

import pytest

pytest.importorskip("flwr")
