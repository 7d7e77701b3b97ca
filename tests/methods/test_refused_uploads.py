"""Uploads of the right shape that no honest client sends: refused when they arrive."""

import pytest
import torch
from helpers import feddm, fedvck

from lit_fedad.contracts import Update
from lit_fedad.core.errors import UserError
from lit_fedad.federation.message_check import check
from lit_fedad.memory.merge import KMeansAggregation
from lit_fedad.methods.fadngs import COVARIANCE, MEAN, FADngsClient, FADngsServer, ShareDensities
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.feddymem import FedDyMemClient, FedDyMemServer
from lit_fedad.methods.fedvck import SIZES
from lit_fedad.methods.parts.condensed_images import COUNTS, IMAGES


def test_a_negative_running_variance(make_classifier):
    """Averaged, it would make what every client predicts NaN."""
    client = FedAvgClient(make_classifier())
    message = client.shared_state()
    check(message, client.upload_spec(), "client 2")
    message["downsample.1.running_var"][0] = -0.1
    with pytest.raises(UserError, match=r"'downsample\.1\.running_var' .*declared from 0"):
        check(message, client.upload_spec(), "client 2")


@pytest.mark.parametrize(("mean", "variance"), [(1.5, 0.1), (0.5, 2.0)])
def test_a_density_of_what_are_no_unit_vectors(make_contrastive, mean, variance):
    """A wide enough density is near every image, so that nothing is anomalous."""
    client = FADngsClient(make_contrastive())
    message = {MEAN: torch.full((1, 3), mean), COVARIANCE: variance * torch.eye(3)[None]}
    with pytest.raises(UserError, match=r"declared from -1\.01 to 1\.01"):
        check(message, client.densities_spec(), "client 2")
    within = {MEAN: torch.full((1, 3), 0.5), COVARIANCE: 0.1 * torch.eye(3)[None]}
    check(within, client.densities_spec(), "client 2")
    ShareDensities().validate(FADngsServer(client), 2, Update(within, 2))


@pytest.mark.parametrize(
    ("scale", "refused"), [(1.0, None), (1e-30, "too few"), (0.1, "too few"), (1.1, "counts")]
)
def test_slots_that_count_other_patches_than_the_clients(make_task, scale, refused):
    client = FedDyMemClient(make_task(), send_counts=True)
    server = FedDyMemServer(client, KMeansAggregation(weighted=True))
    slots, images = client.task.slots, 5
    counts = torch.full((slots,), scale * images * client.task.vectors_per_image / slots)
    update = Update({"counts": counts}, images)
    if refused is None:
        server.validate(2, update)
    else:
        with pytest.raises(UserError, match=refused):
            server.validate(2, update)


def test_more_condensed_images_than_a_client_makes():
    """Each costs the server steps of training; one class of a thousand images is no client's."""
    server = feddm.server_of()
    server.validate(2, Update(feddm.upload([0] * 10 + [2] * 10), 8))
    many = feddm.upload([0] * 10)
    many[COUNTS] = torch.tensor([1000])
    many[IMAGES] = many[IMAGES][:1].expand(1000, -1, -1, -1)
    with pytest.raises(UserError, match="counts 1000 images of a class, and has 8 of all"):
        server.validate(2, Update(many, 8))
    with pytest.raises(UserError, match="sent 2 classes, and has 3 images"):
        server.validate(2, Update(feddm.upload([0] * 10 + [2] * 10), 3))
    missing = feddm.upload([0] * 10)
    missing[IMAGES] = missing[IMAGES][:9]
    with pytest.raises(UserError, match="sent 9 images and counts 10"):
        server.validate(2, Update(missing, 8))


def test_condensed_images_of_another_shape_than_those_of_earlier_rounds():
    server = feddm.server_of()
    server.aggregate({1: Update(feddm.upload([0] * 10), 8)})
    server.validate(2, Update(feddm.upload([0] * 10), 8))
    with pytest.raises(UserError, match=r"sent images \(3, 6, 6\), not \(3, 8, 8\)"):
        server.validate(2, Update(feddm.upload([0] * 10, side=6), 8))


def test_more_real_images_behind_prototypes_than_a_client_has():
    """They weigh the prototypes of all clients."""
    server = fedvck.server_of()
    update = fedvck.upload([0, 0, 0, 1, 1, 1], size=4)
    server.validate(2, Update(update.message, 8))
    update.message[SIZES][1] = 5
    with pytest.raises(UserError, match="counts 9 images of its classes, and has 8"):
        server.validate(2, Update(update.message, 8))
