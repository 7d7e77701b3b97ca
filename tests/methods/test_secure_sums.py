"""Sums of what clients send, in fixed point, give servers what single messages give them."""

import pytest
import torch

from lit_fedad.contracts import SUM, Cohort, Free, TensorSpec, Update, WeightedMeans
from lit_fedad.core.errors import UserError
from lit_fedad.federation.aggregation import pool_statistics
from lit_fedad.memory.merge import LloydAggregation
from lit_fedad.memory.moments import Moments, MomentSets, check_covariance, symmetric, upper_triangle
from lit_fedad.methods.apple import AppleServer
from lit_fedad.methods.creff import CReFFServer
from lit_fedad.methods.fedavg import FedAvgClient, FedAvgServer
from lit_fedad.methods.fedbn import FedBNClient, FedBNServer
from lit_fedad.methods.fedprox import FedProxClient
from lit_fedad.methods.gldp import GLDPServer
from lit_fedad.methods.parts.feature_sums import (
    ChannelSums,
    ClusterSums,
    MomentSums,
    PrototypeSums,
    SlotMeans,
)
from lit_fedad.methods.parts.pooled_moments import packed_spec
from lit_fedad.methods.scaffold import ScaffoldClient, ScaffoldServer
from lit_fedad.privacy.secure_aggregation import SecureSum, SumForm

IMAGES, PATCHES, CHANNELS = {0: 5, 1: 2, 2: 9}, 6, 4
TRIANGLE = CHANNELS * (CHANNELS + 1) // 2
EVERYONE = Cohort(4, 20)  # one client of 4 images has dropped out
ANSWERED = Cohort(3, sum(IMAGES.values()))


def features(client: int) -> torch.Tensor:
    """Patches [n, C] far from zero, of different scales."""
    generator = torch.Generator().manual_seed(client)
    drawn = torch.randn(IMAGES[client] * PATCHES, CHANNELS, generator=generator, dtype=torch.float64)
    return drawn * torch.tensor([0.01, 1.0, 5.0, 30.0]) + torch.tensor([3.0, -2.0, 100.0, 0.0]) + client


def summed(message_sums, spec, messages):
    """The message that stands for all, by way of fixed point."""
    form = SumForm(message_sums, spec, EVERYONE)
    words = [form.encode(message, Cohort(1, IMAGES[client])) for client, message in messages.items()]
    total = {name: sum((one[name] for one in words[1:]), words[0][name].copy()) for name in words[0]}
    return form.decode(total, ANSWERED)


def test_channel_statistics():
    spec = {
        "count": TensorSpec((), torch.int64, low=1),
        "mean": TensorSpec((CHANNELS,)),
        "variance": TensorSpec((CHANNELS,), low=0),
    }
    messages = {
        client: {
            "count": torch.tensor(len(own)),
            "mean": own.mean(0).float(),
            "variance": own.var(0, correction=0).float(),
        }
        for client, own in ((client, features(client)) for client in IMAGES)
    }
    found = summed(ChannelSums(PATCHES), spec, messages)
    single = pool_statistics({c: Update(m, IMAGES[c]) for c, m in messages.items()}, shrinkage=0)
    of_sum = pool_statistics({SUM: Update(found, ANSWERED.images, tuple(IMAGES))}, shrinkage=0)
    assert int(found["count"]) == ANSWERED.images * PATCHES
    for name, expected in single.items():
        torch.testing.assert_close(of_sum[name], expected, rtol=2e-5, atol=1e-6)


def moments_message(clients_with_some, client):
    own = Moments.of([features(client)], CHANNELS)
    sets = 1 if client in clients_with_some else 0
    message = {
        "count": torch.tensor([own.count]),
        "mean": own.mean.float()[None],
        "covariance": upper_triangle(own.covariance).float()[None],
    }
    return {name: entry[:sets] for name, entry in message.items()}


MOMENTS = {
    "count": TensorSpec((Free("sets", 1),), torch.int64, low=0),
    "mean": TensorSpec((Free("sets", 1), CHANNELS)),
    "covariance": TensorSpec((Free("sets", 1), TRIANGLE)),
}


@pytest.mark.parametrize("with_some", [(0, 1, 2), (2,), ()])
def test_second_moments_of_those_that_have_new_ones(with_some):
    messages = {client: moments_message(with_some, client) for client in IMAGES}
    found = summed(MomentSums(PATCHES), MOMENTS, messages)
    assert len(found["count"]) == bool(with_some)
    if with_some:
        expected = Moments.union([Moments.of([features(client)], CHANNELS) for client in with_some])
        assert int(found["count"]) == expected.count
        torch.testing.assert_close(found["mean"][0].double(), expected.mean, rtol=1e-6, atol=1e-6)
        covariance = symmetric(found["covariance"][0], CHANNELS).double()
        torch.testing.assert_close(covariance, expected.covariance, rtol=1e-5, atol=1e-4)


def test_second_moments_of_sets_without_a_vector_or_with_one():
    """Client 0 has one vector of the first set and none of the second, client 1 the reverse."""
    spec = packed_spec(Free("sets", 3), 3, CHANNELS)
    parts = {0: (1, 0, 3), 1: (0, 1, 4), 2: (0, 0, 0)}
    held = {c: [Moments.of([features(c)[:n]], CHANNELS) for n in sizes] for c, sizes in parts.items()}
    found = summed(
        MomentSums(PATCHES), spec, {c: MomentSets.of(own, CHANNELS).message() for c, own in held.items()}
    )
    assert found["count"].tolist() == [1, 1, 7]
    for mean, own in zip(found["mean"], zip(*held.values(), strict=True), strict=True):
        torch.testing.assert_close(mean.double(), Moments.union(own).mean, rtol=1e-5, atol=1e-4)


def test_sums_by_cluster():
    spec = dict.fromkeys(("squares", "counts"), TensorSpec((3,), low=0))
    messages = {
        client: {"squares": torch.rand(3) * client, "counts": torch.tensor([float(client), 0.0, 2.0])}
        for client in IMAGES
    }
    found = summed(ClusterSums(PATCHES), spec, messages)
    assert found["counts"].tolist() == [3.0, 0.0, 6.0]
    expected = sum(message["squares"] for message in messages.values())
    torch.testing.assert_close(found["squares"], expected, rtol=0, atol=1e-6)


def test_sums_by_slot_are_a_step_of_lloyd():
    slots = 5
    spec = {
        "memory": TensorSpec((slots, CHANNELS)),
        "counts": TensorSpec((slots,), low=0),
        "radii": TensorSpec((slots,), low=0),
        "image_counts": TensorSpec((slots,), torch.int64, low=0),
        **MOMENTS,
    }
    previous = features(0)[:slots].float()
    messages = {}
    for client in IMAGES:
        own = features(client)
        place = torch.cdist(own.float(), previous).argmin(1)
        counts = place.bincount(minlength=slots)
        total = torch.zeros(slots, CHANNELS, dtype=torch.float64).index_add_(0, place, own)
        squares = torch.bincount(place, (own - previous[place]).square().sum(1), minlength=slots)
        messages[client] = {
            "memory": torch.where(
                counts[:, None] > 0, total / counts.clamp(min=1)[:, None], previous
            ).float(),
            "counts": counts.float(),
            "radii": (squares / counts.clamp(min=1)).sqrt().float(),
            "image_counts": counts.clamp(max=IMAGES[client]),
            **moments_message((0, 1, 2), client),
        }
    found = summed(SlotMeans(PATCHES, MomentSums(PATCHES)), spec, messages)
    assert len(found["count"]) == 1
    merge = LloydAggregation()
    given = (slots, previous, torch.Generator())
    every = list(messages.values())
    single = merge(*(torch.cat([m[name] for m in every]) for name in ("memory", "counts")), *given)
    of_sum = merge(found["memory"], found["counts"], *given)
    torch.testing.assert_close(of_sum, single, rtol=1e-6, atol=1e-5)
    assert found["image_counts"].equal(sum(m["image_counts"] for m in every))
    squares = sum(m["counts"].double() * m["radii"].double().square() for m in every)
    of_sum = found["counts"].double() * found["radii"].double().square()
    torch.testing.assert_close(of_sum, squares, rtol=1e-4, atol=1e-3)


def test_a_slot_of_one_patch_is_that_patch_and_one_of_none_is_zero():
    sums = {
        "rows": torch.tensor([[3.0], [0.0]]),
        "counts": torch.tensor([1, 0]),
        "squares": torch.tensor([4.0, 0.0]),
    }
    found = SlotMeans(PATCHES, None).from_sums(sums, {}, ANSWERED, EVERYONE)
    assert {name: entry.flatten().tolist() for name, entry in found.items()} == {
        "memory": [3, 0],
        "counts": [1, 0],
        "radii": [2, 0],
    }


@pytest.mark.parametrize("with_some", [(0, 1, 2), (1,), ()])
def test_prototypes(with_some):
    classes = 3
    spec = {
        "count": TensorSpec((Free("stages", 1), classes), torch.int64, low=0),
        "mean": TensorSpec((Free("stages", 1), classes, CHANNELS), low=-1, high=1),
        "within": TensorSpec((Free("stages", 1), TRIANGLE), low=-1, high=1),
    }
    drawn = {
        client: (torch.nn.functional.normalize(features(client)[:images], dim=1), torch.arange(images) % 2)
        for client, images in IMAGES.items()
    }

    def message(own, labels):
        count = labels.bincount(minlength=classes)
        mean = torch.zeros(classes, CHANNELS, dtype=torch.float64).index_add_(0, labels, own)
        mean = mean / count.clamp(min=1)[:, None]
        around = own - mean[labels]
        within = upper_triangle(around.T @ around / len(labels))
        return {"count": count[None], "mean": mean.float()[None], "within": within.float()[None]}

    messages = {
        client: {name: entry[: client in with_some] for name, entry in message(*own).items()}
        for client, own in drawn.items()
    }
    found = summed(PrototypeSums(), spec, messages)
    assert len(found["count"]) == bool(with_some)
    if with_some:
        expected = message(*(torch.cat([drawn[client][part] for client in with_some]) for part in (0, 1)))
        assert found["count"].equal(expected["count"])
        torch.testing.assert_close(found["mean"], expected["mean"], rtol=0, atol=1e-6)
        torch.testing.assert_close(found["within"], expected["within"], rtol=0, atol=1e-6)


def test_a_covariance_of_fewer_images_than_channels_stays_one():
    """Most of its directions have no variance: what rounding leaves there must not look like a negative one."""
    wide = 64
    spec = {
        "count": TensorSpec((Free("stages", 1), 1), torch.int64, low=0),
        "mean": TensorSpec((Free("stages", 1), 1, wide), low=-1, high=1),
        "within": TensorSpec((Free("stages", 1), wide * (wide + 1) // 2), low=-1, high=1),
    }
    messages = {}
    for client, images in IMAGES.items():
        draw = torch.Generator().manual_seed(client)
        own = 1 + 0.02 * torch.randn(images, wide, generator=draw, dtype=torch.float64)  # images much alike
        own = torch.nn.functional.normalize(own, dim=1)
        mean = own.mean(0)
        within = upper_triangle((own - mean).T @ (own - mean) / images)
        messages[client] = {
            "count": torch.tensor([[images]]),
            "mean": mean.float()[None, None],
            "within": within.float()[None],
        }
    found = summed(PrototypeSums(), spec, messages)
    check_covariance(symmetric(found["within"][0].double(), wide))


def test_features_that_sums_have_no_room_for_are_refused():
    messages = {0: moments_message((0,), 0)}
    messages[0]["mean"] *= 1000
    with pytest.raises(UserError, match=r"'product' adds .* to a sum that has room for 1.67772e\+07 in all"):
        summed(MomentSums(PATCHES), MOMENTS, messages)


@pytest.mark.parametrize(
    ("client", "server"),
    [
        (FedAvgClient, FedAvgServer),
        (FedProxClient, FedAvgServer),
        (FedBNClient, FedBNServer),
        (ScaffoldClient, ScaffoldServer),
    ],
)
@pytest.mark.parametrize("fraction", [1.0, 0.75])
def test_weights_are_those_of_plain_runs(federate, make_classifier, make_points, client, server, fraction):
    points = {number: make_points(n=2 * number + 2, seed=number, dtype=torch.float32) for number in range(4)}
    plain, secure = (
        federate(
            client, server, task=make_classifier(), data=points, fraction=fraction, rounds=2, secure_sum=given
        )
        for given in (None, SecureSum())
    )
    for name, entry in plain.server.weights.items():
        if entry.is_floating_point():  # the plain run takes counts of batches from the largest client
            torch.testing.assert_close(secure.server.weights[name], entry, rtol=1e-5, atol=1e-6)
    assert [r.participants for r in secure.history] == [r.participants for r in plain.history]


def test_a_mean_has_room_up_to_its_lower_bound_and_whole_numbers_are_rounded():
    spec = {"w": TensorSpec((), low=-5, high=2), "batches": TensorSpec((), torch.int64, low=0)}
    message = {"w": torch.tensor(-5.0), "batches": torch.tensor(2**25 + 1)}
    found = summed(WeightedMeans(), spec, dict.fromkeys(IMAGES, message))
    assert (float(found["w"]), int(found["batches"])) == (-5.0, 2**25 + 1)


@pytest.mark.parametrize("sums", [WeightedMeans(), ClusterSums(PATCHES)])
def test_sizes_that_each_client_chooses_have_no_sum(sums):
    with pytest.raises(TypeError, match="a size"):
        sums.sum_spec(dict.fromkeys(("squares", "counts"), TensorSpec((Free("rows"),))), EVERYONE)


def test_servers_that_need_single_messages_do_not_take_sums():
    for server in (AppleServer, GLDPServer, CReFFServer):
        assert not server.merges_sums
    for server in (FedAvgServer, FedBNServer, ScaffoldServer):
        assert server.merges_sums
