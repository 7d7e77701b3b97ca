"""A first memory that is drawn from pooled moments: clients send sums alone, and slots fill up."""

import pytest
import torch
from helpers.methods import exchanges_of
from helpers.summed_bank import summed_bank

from lit_fedad.core.errors import UserError
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.memory.merge import KMeansAggregation, LloydAggregation
from lit_fedad.memory.reduce import PositionReduce, SlotReduce
from lit_fedad.methods.federated_bank import FederatedBankClient, FederatedBankServer
from lit_fedad.privacy.secure_aggregation import SecureSum

LLOYD = {"aggregation": LloydAggregation()}


def play(federate, task, data, rounds=3, **overrides):
    return federate(
        FederatedBankClient,
        FederatedBankServer,
        task=task,
        data=data,
        rounds=rounds,
        client={"slots_from_moments": True},
        server=LLOYD,
        **overrides,
    )


def test_the_bank_of_summed_messages_is_that_of_single_ones(federate, make_loader):
    data = {client: make_loader(size, client) for client, size in enumerate((6, 5, 4))}
    plain = play(federate, summed_bank(), data).server
    summed = play(federate, summed_bank(), data, secure_sum=SecureSum()).server
    assert int(summed.moments["count"][0]) == 15 * 16
    for name, tolerance in (("memory", 1e-3), ("radii", 1e-3)):
        torch.testing.assert_close(summed.known[name], plain.known[name], rtol=tolerance, atol=tolerance)
    assert summed.slots_of["sum_counts"].equal(plain.slots_of["sum_counts"])
    assert summed.counted_clients == plain.counted_clients == [0, 1, 2]


def test_a_sum_without_a_client_that_dropped_out_is_merged(federate, make_loader, monkeypatch):
    """Its images were measured before round 1; more slots than the others have patches tell whose are counted."""
    data = {client: make_loader(size, client) for client, size in enumerate((6, 5, 4, 3))}
    send = FederatedBankClient.send

    def fail_once(client, loader):
        if (client.context.round, client.context.client) == (2, 1):
            raise RuntimeError("out of memory")
        return send(client, loader)

    monkeypatch.setattr(FederatedBankClient, "send", fail_once)
    sampler = ClientSampler(on_failure="skip")
    federation = play(federate, summed_bank(slots=250), data, secure_sum=SecureSum(), sampler=sampler)
    assert [report.participants for report in federation.history[-2:]] == [[0, 2, 3], [0, 1, 2, 3]]
    assert federation.server.slots_of["sum_counts"].sum() == 18 * 16


def test_every_slot_has_images_behind_it_or_is_a_copy_of_one(federate, make_loader):
    data = {client: make_loader(size, client) for client, size in enumerate((6, 5, 4))}
    slots = 60  # so many for 240 patches that some of the drawn ones lie near none
    filled = []

    def note(federation, report):
        if report.round > 0:
            server = federation.server
            enough = server.slots_of["sum_images"] >= 2
            filled.append(int(enough.sum()))
            known, own = server.known["memory"], server.slots_of["sum_memory"][enough]
            assert (known[:, None] - own).abs().amax(2).amin(1).max() < 1e-5

    play(federate, summed_bank(slots=slots), data, rounds=4, after_round=note)
    assert filled[0] < filled[-1] <= slots


def test_only_sums_can_begin_with_a_drawn_memory(federate, make_loader):
    names = [
        exchange.name
        for exchange in exchanges_of(FederatedBankClient(summed_bank(), slots_from_moments=True)).setup
    ]
    assert names == ["moments"]
    with pytest.raises(UserError, match=r"method\.client\.min_images"):
        FederatedBankClient(summed_bank(), slots_from_moments=True, min_images=1)
    with pytest.raises(UserError, match="of sums: give task=memory_bank_sums"):
        FederatedBankClient(summed_bank(reduce=SlotReduce()), slots_from_moments=True)
    data = {client: make_loader(4, client) for client in range(3)}
    server = {"aggregation": KMeansAggregation(weighted=True)}
    with pytest.raises(UserError, match="exchange 'train', not their sum"):
        federate(
            FederatedBankClient,
            FederatedBankServer,
            task=summed_bank(),
            data=data,
            client={"slots_from_moments": True},
            server=server,
            secure_sum=SecureSum(),
        )


def test_a_bank_by_position_is_refused():
    """Whatever number of slots it had, that of the first memory would be another."""
    with pytest.raises(UserError, match="a bank by position .*give task=memory_bank_sums"):
        FederatedBankClient(summed_bank(reduce=PositionReduce(), subspace=None, slots=16))
