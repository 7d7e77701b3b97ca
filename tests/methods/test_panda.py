"""PANDA: DN2 before training by hand, banks under merged weights, compactness, consolidation."""

import functools

import numpy as np
import pytest
import torch
from helpers.frozen import NEW, Colours, frozen_encoder, images, scores_of
from helpers.methods import restarted
from sklearn.neighbors import NearestNeighbors

from lit_fedad.contracts import Context, Update, disclosed_by
from lit_fedad.contracts.disclosure import Kind
from lit_fedad.core.errors import UserError
from lit_fedad.methods.dbe import DBEClient
from lit_fedad.methods.fedavg import FedAvgClient, LatestMessagesServer
from lit_fedad.methods.moon import MoonClient
from lit_fedad.methods.panda import BANK, CENTRE, Banks, PandaClient
from lit_fedad.tasks.panda import Panda


def task(**settings) -> Panda:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Panda(frozen_encoder(hidden=6), **settings)


def features(loader, weights=None) -> np.ndarray:
    live = task()
    live.load_state_dict(weights or {}, strict=False)
    with torch.no_grad():
        return torch.cat([live.eval()(batch) for batch in loader]).numpy()


@pytest.fixture
def play(federate):
    def run(data, live=None, rounds=2, **settings):
        settings = {"question": scores_of, **settings}
        return federate(
            PandaClient, LatestMessagesServer, task=live or task(), data=data, rounds=rounds, **settings
        )

    return run


def by_scikit_learn(bank, queries) -> np.ndarray:
    distances, _ = NearestNeighbors(n_neighbors=2).fit(bank).kneighbors(queries)
    return (distances**2).sum(1)


def test_before_training_it_is_nearest_neighbours_of_frozen_features(play):
    data = {0: images(6), 1: images(5, seed=1)}
    played = play(data, rounds=0)

    def raw(images):  # the authors' DN2: pooled features of any length
        return np.concatenate([maps.mean((2, 3)).numpy() for maps in Colours()(images)], axis=1)

    bank = np.concatenate([raw(batch["image"]) for loader in data.values() for batch in loader])
    expected = by_scikit_learn(bank, raw(NEW["image"]))
    np.testing.assert_allclose(played.history[-1].metrics[0], expected, rtol=1e-3, atol=1e-6)
    # As many centres as images: the images themselves. The centre is the mean of all.
    np.testing.assert_allclose(played.server.auxiliary[CENTRE], bank.mean(0), rtol=1e-4, atol=1e-6)


def test_banks_are_of_the_merged_weights(play):
    data = {0: images(6), 1: images(5, seed=1)}
    played = play(data, client={"clip": None})
    merged = dict(played.server.weights)
    expected = np.concatenate([features(loader, merged) for loader in data.values()])
    found = played.server.auxiliary[BANK].numpy()
    order = functools.partial(sorted, key=lambda row: tuple(np.round(row, 4)))
    np.testing.assert_allclose(order(found.tolist()), order(expected.tolist()), rtol=1e-3, atol=1e-5)
    queries = features([NEW], merged)
    np.testing.assert_allclose(
        played.history[-1].metrics[1], by_scikit_learn(expected, queries), rtol=1e-2, atol=1e-6
    )


def test_clients_send_no_more_vectors_than_asked_for(play):
    played = play({0: images(9), 1: images(2, seed=1)}, rounds=1, client={"vectors": 3})
    assert {client: len(sent[BANK]) for client, sent in played.server.last.items()} == {0: 3, 1: 2}


def test_one_step_by_hand(play):
    """Full batch, one client; the gradient cut to its norm."""
    data = {0: images(4)}
    played = play(data, rounds=1, client={"clip": 0.01})
    live = task()
    centre = torch.from_numpy(features(data[0])).mean(0)
    loss = (live(next(iter(data[0]))) - centre).square().sum(1).mean()
    assert played.history[-1].scalars["loss"] == pytest.approx(loss.item(), rel=1e-5)
    weights = dict(live.encoder.network.named_parameters())
    slopes = torch.autograd.grad(loss, list(weights.values()))
    norm = torch.stack([slope.square().sum() for slope in slopes]).sum().sqrt()
    factor = min(1.0, 0.01 / norm.item())
    for (name, weight), slope in zip(weights.items(), slopes, strict=True):
        expected = weight - 0.01 * (factor * slope + 5e-5 * weight)
        found = played.server.weights[f"encoder.network.{name}"]
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-7)


def test_consolidation_by_hand():
    live = task(ewc=3.0)
    live.fisher = {name: torch.full_like(w, 0.5) for name, w in live.start.items()}
    with torch.no_grad():
        for weight in live.encoder.network.parameters():
            weight += 0.2
    outputs = live.training_step(NEW)
    count = sum(w.numel() for w in live.start.values())
    assert outputs["drift"].item() == pytest.approx(0.5 * 0.04 * count, rel=1e-4)
    features, centre = live(NEW).detach().double().numpy(), live.centre.double().numpy()
    channels = len(centre)
    authors = (np.linalg.norm(features - centre, axis=1) ** 2 / channels).mean() + 3 / 2 * 0.5 * 0.04 * count
    assert outputs["loss"].item() == pytest.approx(channels * authors, rel=1e-4)


def test_weights_of_another_run_are_what_training_is_held_to():
    live = task(ewc=3.0)
    live.begin_with({name: entry + 0.2 for name, entry in live.state_dict().items() if "network" in name})
    live.fisher = {name: torch.ones_like(weight) for name, weight in live.start.items()}
    assert live.training_step(NEW)["drift"].item() == 0


def test_the_centre_stays_at_the_mean_of_initial_features_while_the_bank_follows_the_weights():
    live, data = task(), images(6)
    context = Context(seed=0, round=0, client=0)
    live.refresh(data, context, first=True)
    centre = features(data).mean(0)
    with torch.no_grad():
        live.encoder.network[-1].bias += 1.0
    live.refresh(data, context)
    np.testing.assert_allclose(live.centre, centre, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(live.bank, features(data) + 1, rtol=1e-4, atol=1e-5)


def test_consolidation_under_a_method_that_estimates_nothing_is_refused(federate):
    with pytest.raises(UserError, match="task.ewc=1.0: METHOD=panda alone"):
        federate(FedAvgClient, task=task(ewc=1.0), data={0: images(4)}, rounds=1)


@pytest.mark.slow
def test_fisher_information_is_the_mean_sum_of_squared_slopes():
    """Against all channels' slopes one by one, averaged over many draws."""
    live, loader = task(), images(3)
    with torch.no_grad():
        live.encoder.network[2].weight.normal_(generator=torch.Generator().manual_seed(1))
    weight = live.encoder.network[2].weight
    exact = torch.zeros_like(weight)
    for row in loader.dataset:
        found = live({"image": row["image"][None]})[0]
        for channel in found:
            exact += torch.autograd.grad(channel, weight, retain_graph=True)[0].square()
    draw = torch.Generator().manual_seed(0)
    drawn = torch.stack([live.estimate_fisher(loader, draw)["2.weight"] for _ in range(600)]).mean(0)
    torch.testing.assert_close(drawn.sum(), exact.sum() / 3, rtol=0.1, atol=0)


def test_own_banks_are_those_of_fedavg(play, federate, exactly):
    """One client, without clipping; what is shared is then nothing but the weights and the centre."""
    data = {0: images(6)}
    ours = play(data, client={"bank": "own", "clip": None})
    plain = federate(FedAvgClient, task=task(), data=data, rounds=2, question=scores_of)
    exactly(ours.server.weights, plain.server.weights)
    exactly(ours.history[-1].metrics[0], plain.history[-1].metrics[0])


@pytest.mark.parametrize("bank", ["shared", "own"])
def test_interrupted_runs_end_as_uninterrupted_ones(play, exactly, bank):
    data = {client: images(3 + client, seed=client) for client in range(3)}
    settings = {"fraction": 0.67, "shuffle": True, "client": {"bank": bank}, "rounds": 3}

    def run(**more):
        return play(data, task(ewc=1.0), **settings, **more)

    whole, parts = run(), restarted(run, 2)
    exactly(parts.server.weights, whole.server.weights)
    exactly(parts.history[-1].metrics, whole.history[-1].metrics)


@pytest.mark.parametrize("vectors", [0, 5])
def test_more_vectors_than_images_or_none_are_refused(vectors):
    server = LatestMessagesServer(PandaClient(task()))
    Banks().validate(server, 0, Update({BANK: torch.zeros(1, 8)}, 1))
    with pytest.raises(UserError, match=f"{vectors} vectors of 4 images"):
        Banks().validate(server, 0, Update({BANK: torch.zeros(vectors, 8)}, 4))


@pytest.mark.parametrize(("bank", "kinds"), [("shared", [Kind.PATCHES, Kind.SUMS]), ("own", [Kind.SUMS])])
def test_only_a_shared_bank_discloses_centres_of_few_images(bank, kinds):
    assert [part.kind for part in disclosed_by(Banks(initial=True), PandaClient(task(), bank=bank))] == kinds


def test_encoders_without_pretrained_features_are_refused():
    with pytest.raises(UserError, match="features=frozen"):
        Panda(frozen_encoder(hidden=0))


@pytest.mark.parametrize("method", [(DBEClient, "offset"), (MoonClient, "model_contrast.0.weight")])
def test_what_a_method_adds_to_the_weights_is_trained_too(federate, method):
    client_class, added = method
    played = federate(client_class, task=task(), data={0: images(5), 1: images(3, seed=1)}, rounds=2)
    torch.manual_seed(0)  # of `federate`, which builds the client
    start = client_class(task()).task.state_dict()[added]
    assert all(not torch.equal(state[added], start) for state in played.history[-1].metrics.values())
