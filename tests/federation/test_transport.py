"""The round loop reaches clients through its transport alone."""

import pytest
import torch

from lit_fedad.federation.local_transport import cause_of
from lit_fedad.federation.sampling import ClientSampler


class Elsewhere:
    """A transport to clients of another federation's process: another live object, another pool."""

    def __init__(self, other):
        self.turns, self.progress = other.transport, other.transport.progress

    def __getattr__(self, name):
        return getattr(self.turns, name)


VALUES = {0: [1.0, 3.0], 1: [5.0, 0.5, 2.0], 2: [7.0]}


@pytest.mark.parametrize("fails", [(), {(2, 1)}])
def test_clients_elsewhere_give_the_same_digits(toy, tmp_path, fails):
    settings = {"values": VALUES, "sampler": ClientSampler(fraction=0.67, on_failure="skip"), "fails": fails}
    here = toy(folder=tmp_path / "here", **settings)
    history = here.run()
    there = toy(folder=tmp_path / "there", **settings)
    federation = toy(folder=tmp_path / "server", transport=lambda _: Elsewhere(there), **settings)
    reports = federation.run()
    for one, other in zip(reports, history, strict=True):
        one.seconds = other.seconds = 0
        assert one == other
    assert [there.pool.get(c) for c in VALUES] == [here.pool.get(c) for c in VALUES]
    # Nothing of it happened where the server is.
    assert [federation.pool.get(c)["visits"] for c in VALUES] == [0, 0, 0]
    assert federation.client.task.w.item() == 0


def test_a_checkpoint_holds_what_the_transport_adds(toy, tmp_path):
    settings = {"values": VALUES, "folder": tmp_path / "server"}
    whole = toy(values=VALUES, folder=tmp_path / "whole", rounds=4).run()
    for rounds in (2, 4):
        there = toy(values=VALUES, folder=tmp_path / f"there_{rounds}")
        history = toy(**settings, transport=lambda _, there=there: Elsewhere(there), rounds=rounds).run()
    assert [report.scalars for report in history] == [report.scalars for report in whole]
    assert history[-1].metrics == whole[-1].metrics  # visits of each client, before and after


def test_memory_that_is_not_enough_is_said_without_torchs_source():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**52)
    assert cause_of(caught.value) == "RuntimeError: out of memory"
