"""Fixtures of audits."""

from __future__ import annotations

import pytest
from helpers.shadowed import Spy

from lit_fedad.federation.loop import Federation


@pytest.fixture
def spy(monkeypatch):
    watching, original = Spy(), Federation.run
    monkeypatch.setattr(Federation, "run", lambda self: watching.run(self, original))
    return watching
