"""Training data by client that are the same in every round."""

from __future__ import annotations


class SameEveryRound:
    """What `ClientData` asks for, but for ``sizes`` and ``client_loader``."""

    milestones = frozenset()

    @property
    def stages(self):
        return dict.fromkeys(self.sizes, 0)

    def at(self, round):
        return self
