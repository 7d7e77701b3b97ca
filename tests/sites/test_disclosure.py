"""Every exchange and every answer says what it tells of images, or is refused where it is defined."""

from types import SimpleNamespace

import pytest
import torch

from lit_fedad.contracts import Client, Exchange, Exchanges, TensorSpec, disclosed_by
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS, DisclosedBy, Kind, summed
from lit_fedad.core.errors import UserError
from lit_fedad.federation.evaluator import ClientQuery
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.fedmix import SendAverages
from lit_fedad.sites.offer import taken_by
from lit_fedad.sites.settings import Policy
from lit_fedad.tasks.deep_svdd import DeepSVDD
from lit_fedad.tasks.dinomaly import Dinomaly
from lit_fedad.tasks.efficient_ad import EfficientAD


@pytest.mark.parametrize(
    ("base", "method"), [(Client, "send"), (FedAvgClient, "send"), (Exchange, "send"), (ClientQuery, "pack")]
)
def test_a_class_that_sends_must_declare_what_it_discloses(base, method):
    with pytest.raises(TypeError, match=f"New overrides {method}: say discloses"):
        type("New", (base,), {method: lambda *_: {"image": torch.zeros(1)}})
    type("New", (base,), {method: lambda *_: {}, "discloses": (TRAINED_WEIGHTS,)})


@pytest.mark.parametrize("said", [summed("moments"), "moments", ("moments",), (Kind.SUMS,)])
def test_discloses_is_a_tuple_of_disclosures(said):
    with pytest.raises(TypeError, match=r"New: discloses=.* must be a tuple of such as summed"):
        type("New", (Exchange,), {"send": lambda *_: {}, "discloses": said})


class Silent(Exchange):
    name = "silent"

    def upload_spec(self, client):
        return {"image": TensorSpec((1,))}


class Nothing:
    discloses = ()
    group = 1
    task = SimpleNamespace(images_behind=None)


def test_an_exchange_of_a_client_that_says_nothing_is_refused_in_one_line():
    with pytest.raises(UserError, match="exchange 'silent' of Nothing does not declare what it discloses"):
        disclosed_by(Silent(), Nothing())


def test_what_settings_decide_follows_them():
    asked = Silent()
    asked.discloses = DisclosedBy(lambda client: (TRAINED_WEIGHTS,) if client.group else ())
    assert disclosed_by(asked, Nothing()) == (TRAINED_WEIGHTS,)


@pytest.mark.parametrize(
    ("of_one", "of_all"),
    [
        ((DeepSVDD, {"soft": True}), (DeepSVDD, {"soft": False})),
        ((EfficientAD, {"hard": 0.999}), (EfficientAD, {"hard": 0.0})),
        (
            (Dinomaly, {"easy_share": 0.9, "easy_gradient": 0.0}),
            (Dinomaly, {"easy_share": 0.9, "easy_gradient": 0.1}),
        ),
    ],
)
def test_weights_that_one_image_decides_by_settings_are_of_one(of_one, of_all):
    """A radius that is the distance of the farthest image of a batch, a loss of the hardest parts alone."""
    client = Nothing()
    client.discloses = (TRAINED_WEIGHTS, summed("means"))
    for (kind, settings), images in ((of_one, 1), (of_all, None)):
        client.task = object.__new__(kind)
        vars(client.task).update(settings)
        asked = Silent()
        assert [part.images for part in disclosed_by(asked, client)] == [images, None]
        assert Policy(images=5).allows(disclosed_by(asked, client)[0], 1000) is (images is None)


def test_sums_of_each_product_are_over_no_more_images_than_the_smallest_has():
    asked = Silent()
    asked.discloses = (summed("means", by_product=True), summed("means"))
    config = {"federation": {"channel": {"_target_": "lit_fedad.federation.channel.Channel"}}}
    taken = taken_by(Exchanges((asked,)), Nothing(), config, smallest=4)
    assert [part.disclosed.images for part in taken] == [4, None]
    assert [Policy(images=5).allows(part.disclosed, 1000) for part in taken] == [False, True]


@pytest.mark.parametrize(
    ("group", "kind", "what"),
    [
        (1, Kind.IMAGES, "all training images, as they are"),
        (2, Kind.MEAN_IMAGES, "one for every 2 training images"),
        (None, Kind.MEAN_IMAGES, "one of all training images"),
    ],
)
def test_a_mean_of_one_image_is_an_image(group, kind, what):
    from lit_fedad.methods.fedmix import FedMixClient

    client = object.__new__(FedMixClient)
    object.__setattr__(client, "group", group)
    (declared,) = SendAverages.discloses.of(client)
    assert (declared.kind, declared.images) == (kind, group if group != 1 else None)
    assert what in declared.what
