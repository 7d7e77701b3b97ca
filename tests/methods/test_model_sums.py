"""Images that are taken out of a model made of sums: what is left is the model of all others."""

import pytest
import torch
from helpers.methods import exchanges_of
from helpers.summed_bank import summed_bank
from helpers.tiny_pyramid import TinyPyramid
from torch.utils.data import DataLoader, Subset

from lit_fedad.core.errors import UserError
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.memory.merge import LloydAggregation
from lit_fedad.memory.reduce import SlotReduce
from lit_fedad.methods.federated_bank import FederatedBankClient, FederatedBankServer
from lit_fedad.methods.federated_subspace import FederatedSubspaceClient, FederatedSubspaceServer
from lit_fedad.tasks.subspace import Subspace


def subspace():
    torch.manual_seed(0)
    return Subspace(backbone=TinyPyramid(), grid=4, image_size=32, share=0.9)


def some(loader, indices):
    return DataLoader(Subset(loader.dataset, indices), batch_size=2)


def bank_of(federate, data, min_images):
    """A federated bank after one round."""
    return federate(
        FederatedBankClient,
        FederatedBankServer,
        task=summed_bank(),
        data=data,
        rounds=1,
        client={"min_images": min_images},
        server={"aggregation": LloydAggregation(patches_per_slot=1)},
    )


def left_out(played, client, loader):
    """The client's task, without the loader's images."""

    def leave(live, number):
        played.exchanges.leave_out.leave_out(live, loader)
        return {name: getattr(live.task, name).clone() for name in live.task.local_buffers}

    return played.ask(played.rounds, LocalQuery("leave", leave), [client], sums=True)[client]


def outside(buffers):
    return buffers["basis"][0] @ buffers["basis"][0].T


def test_a_subspace_is_that_of_a_federation_without_the_images(federate, make_loader):
    data = {0: make_loader(6, 0), 1: make_loader(5, 1)}
    fold, rest = [0, 3], [1, 2, 4, 5]
    whole, others = (
        federate(FederatedSubspaceClient, FederatedSubspaceServer, task=subspace(), data=held, rounds=1)
        for held in (data, {**data, 0: some(data[0], rest)})
    )
    found, wanted = left_out(whole, 0, some(data[0], fold)), others.server.broadcast(0)
    torch.testing.assert_close(found["centre"], wanted["centre"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(outside(found), outside(wanted), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("min_images", [1, 2])
def test_a_bank_is_the_mean_of_the_other_patches_by_slot(federate, make_loader, min_images):
    data = {0: make_loader(6, 0), 1: make_loader(5, 1)}
    fold, rest = [0, 3], [1, 2, 4, 5]
    played = bank_of(federate, data, min_images)
    anchors = played.server.slots_of["anchors"]
    found = left_out(played, 0, some(data[0], fold))

    # By hand: patches of all other images, each with the nearest anchor.
    task = played.client.task
    sums, counts, seen = torch.zeros(12, 8), torch.zeros(12), torch.zeros(12)
    for loader in (some(data[0], rest), data[1]):
        for batch in loader:
            for patches in task(batch):
                slots = torch.cdist(patches, anchors).argmin(1)
                sums.index_add_(0, slots, patches)
                counts += slots.bincount(minlength=12)
                seen += (slots.bincount(minlength=12) > 0).float()
    enough = seen >= min_images
    means = sums[enough] / counts[enough, None]
    torch.testing.assert_close(found["memory"][enough], means, rtol=1e-3, atol=1e-4)
    # Every other slot gives its place to one of these.
    gone = found["memory"][~enough]
    if len(gone):
        assert torch.cdist(gone, found["memory"][enough]).amin(1).max() < 1e-6


def test_radii_are_those_of_the_other_images(federate, make_loader):
    data = {0: make_loader(6, 0), 1: make_loader(5, 1)}
    played = bank_of(federate, data, min_images=1)

    def leave(live, number):
        others = [*some(data[0], [1, 2, 4, 5]), *data[1]]
        rest = live.task.reduce_memory(others, live.context, live.sums["anchors"])
        played.exchanges.leave_out.leave_out(live, some(data[0], [0, 3]))
        return rest, live.task.radii.clone()

    rest, radii = played.ask(1, LocalQuery("leave", leave), [0], sums=True)[0]
    filled = rest.images > 0
    torch.testing.assert_close(radii[filled], rest.radii[filled], rtol=1e-3, atol=1e-4)


def test_the_model_is_whole_again_afterwards(federate, make_loader):
    data = {0: make_loader(4, 0), 1: make_loader(4, 1)}
    played = federate(FederatedSubspaceClient, FederatedSubspaceServer, task=subspace(), data=data, rounds=1)
    left_out(played, 0, some(data[0], [0]))
    after = played.ask(played.rounds, LocalQuery("centre", lambda live, _: live.task.centre.clone()), [0])[0]
    assert torch.equal(after, played.server.broadcast(0)["centre"])


def test_nothing_is_left_of_a_single_image(federate, make_loader):
    played = federate(
        FederatedSubspaceClient, FederatedSubspaceServer, task=subspace(), data={0: make_loader(1)}, rounds=1
    )
    with pytest.raises(UserError, match="no vector remains"):
        left_out(played, 0, make_loader(1))


@pytest.mark.parametrize(
    "task",
    [summed_bank(reduce=SlotReduce()), summed_bank(subspace=None), summed_bank(subspace="likelihood")],
    ids=["weighted", "without a subspace", "folds of their own"],
)
def test_models_that_are_no_sums_say_so(task):
    assert exchanges_of(FederatedBankClient(task)).leave_out is None
