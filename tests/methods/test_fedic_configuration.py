"""FEDIC: labelled images of the server, as the configuration takes them out of the clients' pools."""

import pytest
from helpers.encoder import Encoder

from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.experiment.build import (
    build_images,
    build_model,
    build_partition,
    build_public,
    build_server_labelled,
)

K, WIDTH = 3, Encoder.num_features
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


SMALL = ("method=fedic", "data.train_per_class=30", "data.test_per_class=1", "public.count=4")


def test_the_configuration_takes_labelled_images_out_of_the_clients_pools():
    config = compose(SMALL)
    images = build_images(config)
    partition = build_partition(config, images)
    public, labelled = build_public(config, images), build_server_labelled(config, images, partition)
    server = build_model(config, images.categories, public, labelled).server
    server.register_clients({})
    held = labelled.__getitems__(range(len(labelled)))
    assert held["label"].bincount().tolist() == [20] * 10
    assert held["image"].shape[1:] == public.shape[1:]
    assert not set(partition.reserved) & {index for own in partition.clients for index in own}


def test_a_partition_without_labelled_images_is_refused():
    config = compose([*SMALL, "partition.server_labelled=0"])
    images = build_images(config)
    with pytest.raises(UserError, match=r"method fedic .* partition\.server_labelled="):
        build_server_labelled(config, images, build_partition(config, images))
