"""Federated ELSA: prototypes of all clients, and what it comes down to."""

import numpy as np
import pytest
import torch
from helpers.frozen import NEW, frozen_encoder, images, scores_of

from lit_fedad.contracts import Update
from lit_fedad.core.errors import UserError
from lit_fedad.methods.elsa import COUNTS, PROTOTYPES, Centres, ElsaClient
from lit_fedad.methods.fedavg import FedAvgClient, LatestMessagesServer
from lit_fedad.models.contrastive_views import ContrastiveViews
from lit_fedad.tasks.contrastive_losses import SimCLR
from lit_fedad.tasks.elsa import Elsa


def task(**settings) -> Elsa:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts = {
            "warmup_loss": SimCLR(),
            "warmup": 1,
            "views": ContrastiveViews(),
            "finetuning_views": ContrastiveViews(),
            "projection": 3,
            "prototypes": 8,
        }
        return Elsa(frozen_encoder(hidden=6), **{**parts, **settings})


def projections(loader, weights=None) -> np.ndarray:
    live = task().eval()
    live.load_state_dict(weights or {}, strict=False)
    with torch.no_grad():
        return torch.cat([live.project(live(batch)) for batch in loader]).numpy()


@pytest.fixture
def play(federate):
    def run(data, live=None, rounds=2, **settings):
        settings = {"question": scores_of, **settings}
        return federate(
            ElsaClient, LatestMessagesServer, task=live or task(), data=data, rounds=rounds, **settings
        )

    return run


@pytest.mark.parametrize("rounds", [0, 2])
def test_prototypes_are_of_all_clients_under_the_merged_weights(play, rounds):
    """As many prototypes as images: the projections themselves, and scores made of them."""
    data = {0: images(5), 1: images(3, seed=1)}
    played = play(data, rounds=rounds)
    merged = dict(played.server.weights)
    expected = np.concatenate([projections(loader, merged) for loader in data.values()])
    found = played.server.auxiliary[PROTOTYPES].numpy()
    # Prototypes that no image has are copies of others; there are none here, as 5 + 3 = 8.
    np.testing.assert_allclose(sorted(found.tolist()), sorted(expected.tolist()), atol=1e-4)
    scores = -np.log(np.exp(projections([NEW], merged) @ expected.T - 1).mean(1))
    for client in data:
        np.testing.assert_allclose(played.history[-1].metrics[client], scores, rtol=1e-4)


def test_centres_weigh_as_many_images_as_they_stand_for():
    server = LatestMessagesServer(ElsaClient(task()))
    along, across = torch.eye(3)[:1], torch.eye(3)[1:2]
    uploads = {
        0: Update({PROTOTYPES: along, COUNTS: torch.tensor([9])}, 9),
        1: Update({PROTOTYPES: across, COUNTS: torch.tensor([1])}, 1),
    }
    Centres().aggregate(server, uploads)
    np.testing.assert_allclose(
        server.auxiliary[PROTOTYPES][0].numpy(), np.array([9, 1, 0]) / 82**0.5, rtol=1e-5
    )


def test_clients_that_take_no_part_keep_their_centres(play):
    data = {client: images(4, seed=client) for client in range(3)}
    played = play(data, fraction=0.34, rounds=1)
    assert sorted(played.server.last) == [0, 1, 2]


def test_in_the_warm_up_one_client_is_fedavg(play, federate, exactly):
    data = {0: images(6)}
    ours = play(data, task(warmup=2))
    plain = federate(FedAvgClient, task=task(warmup=2), data=data, rounds=2, question=scores_of)
    exactly(ours.server.weights, plain.server.weights)


def test_counts_that_are_not_the_client_s_are_refused():
    server = LatestMessagesServer(ElsaClient(task()))
    update = Update({PROTOTYPES: torch.zeros(8, 3), COUNTS: torch.ones(8, dtype=torch.int64)}, 4)
    with pytest.raises(UserError, match="stand for 8 images, and it has 4"):
        Centres().validate(server, 0, update)
