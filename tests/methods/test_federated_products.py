"""Statistics by product: equal to those of one place, whatever the partition; which subspace scores an image."""

import numpy as np
import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from torch.utils.data import DataLoader

from lit_fedad.contracts import disclosed_by
from lit_fedad.memory.moments import Moments
from lit_fedad.memory.subspace import fit_subspace, least_residuals
from lit_fedad.methods.federated_subspace import FederatedSubspaceClient, FederatedSubspaceServer
from lit_fedad.methods.parts.pooled_moments import PooledMoments
from lit_fedad.privacy.secure_aggregation import SecureSum
from lit_fedad.tasks.subspace import Subspace

IMAGES = 12


def image(product, seed):
    """An image whose channels vary as its product's do."""
    draw = torch.Generator().manual_seed(seed)
    scale = torch.tensor([[1.0, 3.0, 0.5], [4.0, 0.5, 1.0], [1.0, 1.0, 2.0]])[product]
    pixels = torch.randn(3, 32, 32, generator=draw) * scale[:, None, None] + product
    return {"image": pixels, "label": 0, "product": torch.tensor(product)}


ALL = [image(number % 2, number) for number in range(IMAGES)]


def play(federate, parts, products=("bolt", "nut"), **given):
    torch.manual_seed(0)
    task = Subspace(TinyPyramid(), share=0.9, grid=4, image_size=32, products=products)
    data = {client: DataLoader(part, batch_size=4) for client, part in enumerate(parts)}
    return federate(FederatedSubspaceClient, FederatedSubspaceServer, task=task, data=data, rounds=0, **given)


def outside(subspace):
    """What each product's subspace leaves out, as projections: bases are defined up to rotations."""
    return subspace["basis"] @ subspace["basis"].mT


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(
    "parts", [(ALL[::2], ALL[1:6:2], ALL[7::2]), (ALL[:3], ALL[3:7], ALL[7:]), (ALL[:1], ALL[1:3], ALL[3:])]
)
def test_each_product_is_fitted_as_in_one_place(federate, parts, secure):
    found = play(federate, parts, **({"secure_sum": SecureSum()} if secure else {})).server
    one = play(federate, (ALL,)).server
    assert found.moments["count"].tolist() == [IMAGES * 8, IMAGES * 8, 0]
    torch.testing.assert_close(found.subspace["centre"], one.subspace["centre"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outside(found.subspace), outside(one.subspace), rtol=1e-2, atol=1e-2)


def test_a_product_has_the_subspace_of_its_own_images(federate):
    played = play(federate, (ALL[:5], ALL[5:]))
    for product, centre, basis in zip((0, 1), *played.server.broadcast(0).values(), strict=True):
        own = next(iter(DataLoader(ALL[product::2], batch_size=IMAGES)))
        rows = played.client.task.embed(own).flatten(0, 1)
        mean, expected = fit_subspace([Moments.of([rows], rows.shape[1])], 0.9, 1.0)
        torch.testing.assert_close(centre, mean, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(basis @ basis.T, expected @ expected.T, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("given", "by_product"),
    [({}, False), ({"products": ("bolt", "nut")}, True), ({"share": "likelihood"}, False)],
)
def test_moments_of_products_are_disclosed_as_such(given, by_product):
    """A product may have few images; the two sets from which dimensions are chosen are of all products."""
    task = Subspace(TinyPyramid(), **{"share": 0.9, "grid": 4, "image_size": 32, **given})
    (disclosed,) = disclosed_by(PooledMoments(), FederatedSubspaceClient(task))
    assert disclosed.by_product == by_product


def test_a_client_sends_moments_of_the_products_that_it_has(federate):
    played = play(federate, (ALL[::2], ALL))
    channels = played.client.task.num_features
    moments = channels + channels * (channels + 1) // 2
    assert played.history[0].elements_up == {0: 3 + moments, 1: 3 + 2 * moments}


def test_a_product_that_comes_later_leaves_the_others_as_they_are(federate):
    before = play(federate, (ALL[::2],)).server.subspace
    after = play(federate, (ALL[::2], ALL[1::2])).server.subspace
    torch.testing.assert_close(outside(after)[0], outside(before)[0])


def test_images_of_no_named_product_share_a_subspace(federate):
    others = [image(2, 50 + number) for number in range(4)]
    found = play(federate, (ALL, others)).server
    assert found.moments["count"].tolist() == [IMAGES * 8, IMAGES * 8, 4 * 16]


def test_products_of_one_name_have_the_subspace_of_all(federate):
    one, none = (play(federate, (ALL,), products=products).server for products in (("bolt",), ()))
    assert one.subspace["basis"].equal(none.subspace["basis"])
    assert len(one.subspace["basis"]) == 1


def test_an_image_is_scored_by_the_subspace_that_leaves_least_of_it():
    draw = np.random.default_rng(0)
    patches, centres = draw.normal(size=(5, 7, 4)), draw.normal(size=(3, 4))
    bases = draw.normal(size=(3, 4, 2))
    lengths = np.stack(
        [
            np.linalg.norm((patches - centre) @ basis, axis=2)
            for centre, basis in zip(centres, bases, strict=True)
        ]
    )
    least = [(lengths[:, place] ** 2).sum(1).argmin() for place in range(5)]
    found, which = least_residuals(*(torch.tensor(values).float() for values in (patches, centres, bases)))
    assert which.tolist() == least
    np.testing.assert_allclose(found, lengths[least, range(5)], rtol=1e-4)


def test_of_sums_without_its_images_a_client_leaves_none_out(federate):
    """As of one that came late, and whose first message was not used."""
    played = play(federate, (ALL[::2], ALL[1::2]))
    client, server = played.client, played.server
    del server.measured[1]
    for number, changes in enumerate((True, False)):
        client.sums = {**server.broadcast(number), **server.model_sums(number)}
        played.exchanges.leave_out.leave_out(client, DataLoader(ALL[number::2][:1], batch_size=1))
        assert torch.allclose(client.task.basis, server.subspace["basis"]) is not changes


def test_all_images_of_a_product_may_be_left_out(federate):
    played = play(federate, (ALL[:1], ALL[1:]), products=("bolt", "nut"))
    one = DataLoader(ALL[1::2], batch_size=4)
    alone = play(federate, (ALL[::2],)).server.subspace
    exchange = played.exchanges.leave_out
    client = played.client
    client.sums = {**played.server.broadcast(0), **played.server.model_sums(0)}
    exchange.leave_out(client, one)
    left = {"basis": client.task.basis}
    torch.testing.assert_close(outside(left), outside(alone), rtol=1e-2, atol=1e-2)
