"""Federated subspace: equal to one client with all data, whatever the partition; what crosses; what is refused."""

import pytest
import torch
from helpers.methods import exchanges_of
from helpers.tiny_pyramid import TinyPyramid
from torch.utils.data import ConcatDataset, DataLoader

from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.task import channel_scale
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import Channel, Half
from lit_fedad.federation.message_check import check, outliers
from lit_fedad.memory.moments import Moments
from lit_fedad.memory.subspace import residual_basis
from lit_fedad.methods.federated_subspace import FederatedSubspaceClient, FederatedSubspaceServer
from lit_fedad.tasks.slot_distances import LocalScale
from lit_fedad.tasks.subspace import Subspace

CHANNELS = 8


@pytest.fixture
def make_subspace():
    def make(**overrides):
        torch.manual_seed(0)
        return Subspace(**{"backbone": TinyPyramid(), "grid": 4, "image_size": 32, "share": 0.9, **overrides})

    return make


@pytest.fixture
def play(federate, make_subspace):
    def play(data, rounds=0, channel=None, client=None, **task):
        return federate(
            FederatedSubspaceClient,
            FederatedSubspaceServer,
            task=make_subspace(**task),
            data=data,
            rounds=rounds,
            client=client,
            channel=channel or Channel(),
        )

    return play


def patches(task, *loaders):
    return torch.cat([task.embed(batch).flatten(0, 1) for loader in loaders for batch in loader])


def outside(known):
    """What the subspace leaves out, as a projection: its basis is defined up to rotations."""
    return known["basis"][0] @ known["basis"][0].T


@pytest.mark.parametrize("sizes", [(12,), (1, 11), (3, 4, 5)])
def test_is_the_central_fit_whatever_the_partition(play, make_subspace, make_loader, sizes):
    data = {client: make_loader(size, client) for client, size in enumerate(sizes)}
    central = {0: DataLoader(ConcatDataset([loader.dataset for loader in data.values()]), batch_size=5)}
    one, many = play(central).server.broadcast(0), play(data).server.broadcast(0)
    torch.testing.assert_close(many["centre"], one["centre"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(outside(many), outside(one), rtol=1e-4, atol=1e-4)
    rows = patches(make_subspace(), *data.values())
    scale = channel_scale(rows.var(0, correction=0), 1.0)
    basis = residual_basis(Moments.of([rows / scale], CHANNELS), 0.9) / scale[:, None]
    torch.testing.assert_close(outside(many), basis @ basis.T, rtol=1e-3, atol=1e-3)


def test_the_order_of_clients_does_not_matter(play, make_loader):
    loaders = [make_loader(3 + number, number) for number in range(3)]
    found = [play(dict(enumerate(order))).server.moments for order in (loaders, loaders[::-1])]
    torch.testing.assert_close(found[0]["covariance"], found[1]["covariance"], rtol=1e-9, atol=1e-12)


def test_a_client_sends_its_moments_once(play, make_loader):
    played = play({0: make_loader(), 1: make_loader(4, 1)}, rounds=2)
    sent = 1 + CHANNELS + CHANNELS * (CHANNELS + 1) // 2
    assert [report.elements_up for report in played.history] == [
        {0: sent, 1: sent},
        {0: 0, 1: 0},
        {0: 0, 1: 0},
    ]
    assert int(played.server.moments["count"].sum()) == 10 * 16
    assert played.server.measured == {0: 6, 1: 4}  # images


def test_dimensions_inside_and_outside_add_up_to_the_channels(play, make_loader):
    found = play({0: make_loader()}, client={"noised_directions": 4}).server.diagnostics()
    assert found["dimensions"] + found["residual_dimensions"] == CHANNELS


def test_no_codec_rounds_the_covariance(play, make_loader):
    """Rounded, that of few vectors would have negative variances."""
    found = [play({0: make_loader()}, channel=channel).server for channel in (Channel(Half(), Half()), None)]
    assert torch.equal(*(server.moments["covariance"] for server in found))


def test_a_client_loads_the_model_with_the_sums_that_it_is_made_of(play, make_subspace, make_loader):
    server = play({0: make_loader()}).server
    client = FederatedSubspaceClient(make_subspace())
    exchange = exchanges_of(client).leave_out
    exchange.receive(client, exchange.broadcast(server, 0))
    torch.testing.assert_close(client.task.centre, server.subspace["centre"])
    torch.testing.assert_close(client.task.basis, server.subspace["basis"])


def test_without_a_second_image_at_any_client_none_is_held_out(play, make_loader):
    with pytest.raises(UserError, match="no client has 2 images of one product"):
        play({0: make_loader(1), 1: make_loader(1, 1)}, share="likelihood")


def test_dimensions_may_be_chosen_by_likelihood_on_other_images(play, make_loader):
    server = play({0: make_loader(6), 1: make_loader(5, 1)}, share="likelihood").server
    assert server.moments["count"].tolist() == [(3 + 3) * 16, (3 + 2) * 16]
    assert 1 <= server.subspace["basis"].shape[2] < CHANNELS


def test_clusters_scale_image_scores_and_leave_maps(play, make_loader):
    data = {0: make_loader(6), 1: make_loader(5, 1)}
    plain = play(data).client
    scaled = play(data, clusters=3, image_score=LocalScale(1.0)).client
    batch = next(iter(data[0]))
    with torch.no_grad():
        (score, maps, *_), (other, same, *_) = (client.predict_step(batch) for client in (plain, scaled))
    torch.testing.assert_close(maps, same, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(score, other)


def test_residuals_of_clusters_are_those_of_all_patches(play, make_loader):
    data = {0: make_loader(6), 1: make_loader(5, 1)}
    played = play(data, clusters=3, image_score=LocalScale(1.0))
    task = played.client.task
    rows = patches(task, *data.values())
    residuals = ((rows - task.centre) @ task.basis[0]).norm(dim=1)
    at = torch.cdist(rows, task.memory).argmin(1)
    for cluster, radius in enumerate(played.server.clusters["radii"].tolist()):
        assert radius == pytest.approx(float(residuals[at == cluster].square().mean().sqrt()), rel=1e-4)


def test_a_client_alone_fits_the_same_subspace_once_and_clusters_of_its_own(play, make_subspace, make_loader):
    loader, task = make_loader(9), make_subspace(clusters=3, image_score=LocalScale(1.0))
    task.refresh(loader, Context(seed=0, round=0, client=0), first=True)
    known = play({0: loader}).server.broadcast(0)
    torch.testing.assert_close(task.centre, known["centre"])
    torch.testing.assert_close(outside(task.state_dict()), outside(known), rtol=1e-4, atol=1e-4)
    rows = patches(task, loader)
    residuals, at = (
        ((rows - task.centre) @ task.basis[0]).norm(dim=1),
        torch.cdist(rows, task.memory).argmin(1),
    )
    for cluster, radius in enumerate(task.radii.tolist()):
        assert radius == pytest.approx(float(residuals[at == cluster].square().mean().sqrt()), rel=1e-4)
    before = {name: entry.clone() for name, entry in task.state_dict().items()}
    task.refresh(make_loader(5, 1), Context(seed=0, round=1, client=0))
    torch.testing.assert_close(dict(task.state_dict()), before, rtol=0, atol=0, equal_nan=True)


def test_without_clusters_and_products_images_are_scored_by_residuals_alone(make_subspace, make_loader):
    batch, task = next(iter(make_loader())), make_subspace(image_score=LocalScale(1.0))
    task.refresh(make_loader(9), Context(seed=0, round=0, client=0), first=True)
    residuals = ((patches(task, [batch]) - task.centre) @ task.basis[0]).norm(dim=1)
    torch.testing.assert_close(task.predict_step(batch).image_score, task.judge(residuals))
    assert task.nearest_kind(batch) is None


def moments(update=None, images=6):
    message = {
        "count": torch.tensor([images * 16]),
        "mean": torch.zeros(1, CHANNELS),
        "covariance": torch.eye(CHANNELS)[tuple(torch.triu_indices(CHANNELS, CHANNELS))][None],
    }
    return Update({**message, **(update or {})}, images)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"count": torch.tensor([7 * 16])}, "counts 112 vectors, but its images have 96"),
        ({"count": torch.tensor([0])}, "moments of no image"),
        ({"covariance": -torch.ones(1, 36)}, "negative variance"),
        (
            {"mean": torch.zeros(0, 8), "covariance": torch.zeros(0, 36)},
            "0 sets of moments, and counts patches of 1",
        ),
        (
            {"count": torch.zeros(0), "mean": torch.zeros(0, 8), "covariance": torch.zeros(0, 36)},
            "0 sets of moments, instead of 1",
        ),
    ],
)
def test_impossible_moments_are_refused(make_subspace, changed, said):
    client = FederatedSubspaceClient(make_subspace())
    server = FederatedSubspaceServer(client)
    exchange = exchanges_of(client).setup[0]
    exchange.validate(server, 0, moments())
    with pytest.raises(UserError, match=said):
        exchange.validate(server, 0, moments(changed))


@pytest.mark.parametrize(
    ("name", "value"), [("noised_share", 0.0), ("noised_share", 1.5), ("noised_directions", 1)]
)
def test_settings_out_of_range_are_refused(make_subspace, name, value):
    with pytest.raises(UserError, match=rf"method\.client\.{name}={value} must be"):
        FederatedSubspaceClient(make_subspace(), **{name: value})


def test_clusters_of_no_patch_are_refused(make_subspace):
    client = FederatedSubspaceClient(make_subspace(clusters=3, image_score=LocalScale(1.0)))
    exchange = next(one for one in exchanges_of(client).setup if one.name == "clusters")
    exchange.validate(None, 0, Update({"counts": torch.tensor([0.0, 0.0, 1.0])}, 1))
    with pytest.raises(UserError, match="the client's clusters count no patch"):
        exchange.validate(None, 0, Update({"counts": torch.zeros(3)}, 1))


def test_centres_of_clients_count_by_their_images(make_subspace):
    client = FederatedSubspaceClient(make_subspace(clusters=1, image_score=LocalScale(1.0)))
    server = FederatedSubspaceServer(client)
    server.context = Context(0, 0)
    exchange = next(one for one in exchanges_of(client).setup if one.name == "clusters")
    sent = {  # four patches of one image, and two of three
        0: Update({"memory": torch.zeros(1, CHANNELS), "counts": torch.tensor([4.0])}, 1),
        1: Update({"memory": torch.ones(1, CHANNELS), "counts": torch.tensor([2.0])}, 3),
    }
    exchange.aggregate(server, sent)
    torch.testing.assert_close(server.clusters["memory"], torch.full((1, CHANNELS), 0.75))


def test_residuals_of_more_patches_than_there_are_are_refused(make_subspace):
    client = FederatedSubspaceClient(make_subspace(clusters=2, image_score=LocalScale(1.0)))
    server = FederatedSubspaceServer(client)
    exchange = next(one for one in exchanges_of(client).setup if one.name == "residuals")
    exchange.validate(server, 0, Update({"counts": torch.tensor([20.0, 12.0])}, 2))
    with pytest.raises(UserError, match="counts 33 vectors, but its images have 32"):
        exchange.validate(server, 0, Update({"counts": torch.tensor([20.0, 13.0])}, 2))


def test_sums_of_residuals_may_exceed_the_bound_of_a_single_value(make_subspace):
    client = FederatedSubspaceClient(make_subspace(clusters=2, image_score=LocalScale(1.0)))
    exchange = next(one for one in exchanges_of(client).setup if one.name == "residuals")
    sent = {"squares": torch.tensor([4e9, 0.0]), "counts": torch.tensor([16.0, 16.0])}
    check(sent, exchange.upload_spec(client), "client 0")


def test_a_client_with_forty_times_as_many_images_is_no_outlier(play, make_loader, tap):
    """Sums of residuals grow with the images."""
    played = play(
        {0: make_loader(1), 1: make_loader(40, 1)}, clusters=2, image_score=LocalScale(1.0), channel=tap
    )
    for exchange in exchanges_of(played.client).setup:
        spec = exchange.upload_spec(played.client)
        sent = {
            c: Update(message, 1) for _, c, message in tap.sent if c is not None and set(message) == set(spec)
        }
        assert len(sent) == 2
        assert outliers(sent, {}, 20, spec) == {}


def test_nothing_can_be_trained(make_subspace):
    with pytest.raises(UserError, match="nothing to train"):
        make_subspace().setup("fit")
