"""FADngs in a federation: its two exchanges a round, what it keeps between them, and what it comes down to."""

import numpy as np
import pytest
import torch
from helpers.methods import Stop, outcome, stopped
from helpers.refusals import refusal
from safetensors.torch import save
from torch import nn

from lit_fedad.contracts import Context
from lit_fedad.contracts.state import size_of, state_of
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import Byte, Channel, Plain
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.methods.fadngs import FADngsClient, FADngsServer, ShareDensities
from lit_fedad.methods.fedavg import FedAvgClient
from lit_fedad.methods.parts.ensemble_distillation import EnsembleDistillation
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.contrastive_losses import CRAD, SimCLR

MEAN, COVARIANCE = "densities.mean", "densities.covariance"
WEIGHT = "projection.2.weight"
TEST = {"image": torch.rand(9, 3, 8, 8, generator=torch.Generator().manual_seed(9))}


def scores_of(client, number):
    """The client's scores of nine images."""
    with torch.no_grad():
        return client.predict_step(TEST).image_score


@pytest.fixture
def play(federate):
    """Plays FADngs; `sed` adds distillation on twelve public images, `client` is the client's class."""

    def play(task, data, *, sed=False, kind=FADngsClient, settings=None, **others):
        public = torch.randint(
            256, (12, 3, 8, 8), generator=torch.Generator().manual_seed(7), dtype=torch.uint8
        )
        distillation = EnsembleDistillation(queue=16, epochs=2, batch_size=5, learning_rate=0.01)
        server = {"distillation": distillation, "public": public} if sed else {}
        others = {"question": scores_of, "client": settings, **others}
        return federate(kind, FADngsServer, task=task, data=data, server=server, **others)

    return play


def density(task, weights, loader, shrinkage=0.1):
    """Mean [D] and shrunk covariance [D, D] of all images of a loader under some weights, by NumPy."""
    task.load_state_dict(weights, strict=False)
    task.eval()
    with torch.no_grad():
        images = torch.stack([item["image"] for item in loader.dataset])
        z = nn.functional.normalize(task.projection(task.encoder(images)), dim=1).double().numpy()
    covariance = np.cov(z.T, bias=True)
    ridge = np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    return z.mean(0), (1 - shrinkage) * covariance + shrinkage * ridge


def training_letters(tap):
    """What the server sent to be trained, or evaluated, with: its messages of weights and densities, by round."""
    return {at: m for at, client, m in tap.sent if client is None and WEIGHT in m and MEAN in m}


# ------------------------------------------------------------------------------------ what it comes down to


@pytest.mark.parametrize(
    ("loss", "warmup"),
    [(SimCLR(), 1), (SimCLR(), 0), (CRAD(), 1), (CRAD(), 0)],
)
@pytest.mark.slow
def test_without_shared_densities_and_distillation_it_is_fedavg(
    play, federate, make_contrastive, make_images, exactly, loss, warmup
):
    data = {client: make_images(5 + client, seed=client) for client in range(3)}
    settings = {"shuffle": True, "fraction": 0.67}

    def task():
        return make_contrastive(loss=loss, warmup=warmup)

    ours = play(task(), data, settings={"share_densities": False}, **settings)
    plain = federate(FedAvgClient, task=task(), data=data, question=scores_of, **settings)
    exactly(ours.server.weights, plain.server.weights)
    for one, other in zip(ours.history, plain.history, strict=True):
        exactly(one.metrics, other.metrics)
        assert (one.exchange, one.scalars, one.per_client) == (
            other.exchange,
            other.scalars,
            other.per_client,
        )
        assert (one.bytes_up, one.bytes_down) == (other.bytes_up, other.bytes_down)


@pytest.mark.slow
def test_shared_densities_make_a_difference(play, make_contrastive, make_images):
    """To scores at once, where clients judge alike; to weights after the warm-up."""
    data = {client: make_images(8, seed=client) for client in range(2)}
    own = play(make_contrastive(), data, settings={"share_densities": False})
    shared = play(make_contrastive(), data)
    for client in data:
        assert not torch.equal(own.history[0].metrics[client], shared.history[0].metrics[client])
    assert torch.equal(shared.history[0].metrics[0], shared.history[0].metrics[1])
    assert not torch.equal(own.history[0].metrics[0], own.history[0].metrics[1])
    assert not torch.equal(own.server.weights[WEIGHT], shared.server.weights[WEIGHT])


# ------------------------------------------------------------------------------------------ two exchanges


def test_order_of_the_exchanges(play, make_contrastive, make_images, tap):
    play(
        make_contrastive(),
        {0: make_images(), 1: make_images(seed=1)},
        channel=tap,
        rounds=2,
        evaluate_every=9,
    )

    def kind(message):
        return "+".join(
            name for name, key in {"weights": WEIGHT, "densities": MEAN}.items() if key in message
        )

    crossed = [(at, client, kind(message)) for at, client, message in tap.sent]
    set_up, evaluation, rounds = crossed[:3], crossed[3], crossed[4:-1]
    assert set_up == [(0, None, ""), (0, 0, "densities"), (0, 1, "densities")]
    assert evaluation == (1, None, "weights+densities")
    assert rounds == [
        line
        for at in (1, 2)
        for line in (
            (at, None, "weights+densities"), (at, 0, "weights"), (at, 1, "weights"),
            (at, None, "weights"), (at, 0, "densities"), (at, 1, "densities"),
        )
    ]  # fmt: skip


def test_bytes_of_both_exchanges_are_counted(play, make_contrastive, make_images, tap):
    """A density of 128 dimensions takes 66,048 bytes, and 4 for its count."""
    data = {0: make_images(12), 1: make_images(8, seed=1)}
    history = play(make_contrastive(projection=128, clusters=2), data, channel=tap, rounds=1).history
    densities, weights = history[0].bytes_up[0], len(save(tap.uploads(0)[0]))
    assert 0 < densities - 2 * (66_048 + 4) < 400
    assert densities == weights
    sent = [message for at, client, message in tap.sent if (at, client) == (1, 0)]
    assert history[1].bytes_up[0] == sum(len(save(message)) for message in sent)
    received = [message for at, client, message in tap.sent if at == 1 and client is None][1:]
    assert history[1].bytes_down == dict.fromkeys(data, sum(len(save(message)) for message in received))
    assert sum(entry.nbytes for entry in received[0].values()) > 4 * 66_048 > history[1].bytes_up[0] / 2
    assert history[0].bytes_down == dict.fromkeys(data, 0)


@pytest.mark.slow
def test_densities_in_training_are_those_under_the_merged_weights_of_the_round_before(
    play, make_contrastive, make_images, tap
):
    data = {0: make_images(8), 1: make_images(6, seed=1)}
    play(make_contrastive(), data, sed=True, channel=tap, rounds=4)
    letters = training_letters(tap)
    assert sorted(letters) == [1, 2, 3, 4, 5]  # the last to be evaluated with
    for message in letters.values():
        for client, loader in data.items():
            mean, covariance = density(make_contrastive(), message, loader)
            np.testing.assert_allclose(message[MEAN][client], mean, atol=1e-6)
            np.testing.assert_allclose(message[COVARIANCE][client], covariance, atol=1e-6)
    assert len({float(message[WEIGHT].sum()) for message in letters.values()}) == 5


@pytest.mark.slow
def test_clients_that_are_not_picked_keep_their_last_densities(play, make_contrastive, make_images, tap):
    data = {client: make_images(6, seed=client) for client in range(4)}
    history = play(make_contrastive(), data, channel=tap, rounds=3, fraction=0.75).history
    letters, known = training_letters(tap), {}
    for report in history:
        assert len(report.participants) == (4 if report.round == 0 else 3)
        after = letters[report.round + 1]
        known |= {client: density(make_contrastive(), after, data[client]) for client in report.participants}
        np.testing.assert_allclose(after[MEAN], [known[client][0] for client in data], atol=1e-6)
        np.testing.assert_allclose(after[COVARIANCE], [known[client][1] for client in data], atol=1e-6)


class Watched(FADngsClient):
    """Makes sure that embeddings in use are those of the weights and images at hand."""

    def refresh(self, loader, predicts=False):
        super().refresh(loader, predicts)
        z, index = self.task.embed(loader)
        assert torch.equal(self.embedded[1], z)
        assert torch.equal(self.embedded[2], index)
        scores = self.task.densities(z)
        normal = scores <= torch.quantile(scores.double(), self.task.normal_share)
        assert torch.equal(~torch.isin(index, self.task._anomalous), normal)
        Watched.adapted += 1


@pytest.mark.parametrize("buffers", ["mean", "local"])
@pytest.mark.slow
def test_embeddings_are_never_used_under_other_weights(play, make_contrastive, make_images, buffers):
    """Training and evaluation, of clients that took part in the round before and of others."""
    data = {client: make_images(6, seed=client) for client in range(4)}
    Watched.adapted = 0
    settings = {"aggregate_buffers": buffers}
    play(make_contrastive(), data, kind=Watched, settings=settings, rounds=4, fraction=0.75)
    assert Watched.adapted == 4 * 3 + 5 * (1 if buffers == "mean" else 4)


def test_images_are_embedded_once_a_round(play, make_contrastive, make_images, monkeypatch):
    calls, embed = [], Contrastive.embed
    monkeypatch.setattr(Contrastive, "embed", lambda task, loader: (calls.append(1), embed(task, loader))[1])
    play(make_contrastive(), {0: make_images(), 1: make_images(seed=1)}, rounds=3)
    assert len(calls) == 2 * (1 + 3)


def test_a_client_that_fails_at_its_densities_keeps_its_old_ones(
    play, make_contrastive, make_images, monkeypatch
):
    send = ShareDensities.send

    def fails(exchange, client, loader):
        if (client.context.round, client.context.client) == (1, 1):
            raise RuntimeError("out of memory")
        return send(exchange, client, loader)

    data = {client: make_images(6, seed=client) for client in range(3)}
    whole = play(make_contrastive(), data, rounds=1)
    monkeypatch.setattr(ShareDensities, "send", fails)
    skip = ClientSampler(on_failure="skip")
    federation = play(make_contrastive(), data, rounds=1, sampler=skip)
    first = play(make_contrastive(), data, rounds=0)
    assert federation.history[1].participants == [0, 2]
    assert torch.equal(federation.server.weights[WEIGHT], whole.server.weights[WEIGHT])  # its weights count
    for client, other in {0: whole, 1: first, 2: whole}.items():
        assert torch.equal(federation.server.last[client][MEAN], other.server.last[client][MEAN])


# --------------------------------------------------------------------------------------- who the clients are


@pytest.mark.slow
def test_it_does_not_matter_who_holds_which_data(play, make_contrastive, make_images, exactly):
    """Bit for bit, where neither views nor batches are random: all shares are eighths."""
    sizes, holders = {0: 2, 1: 4, 2: 4, 3: 6}, {0: 2, 1: 3, 2: 0, 3: 1}
    data = {client: make_images(size, seed=client) for client, size in sizes.items()}
    moved = {holders[client]: loader for client, loader in data.items()}
    here = play(make_contrastive(views=nn.Identity()), data)
    there = play(make_contrastive(views=nn.Identity()), moved)
    exactly(here.server.weights, there.server.weights)
    exactly(here.history[-1].metrics[0], there.history[-1].metrics[0])
    for client, holder in holders.items():
        exactly(here.server.last[client], there.server.last[holder])
        exactly(here.pool.get(client), there.pool.get(holder))


def test_identical_clients_are_one_client(play, make_contrastive, make_images, exactly):
    many = play(make_contrastive(views=nn.Identity()), {client: make_images() for client in range(3)})
    one = play(make_contrastive(views=nn.Identity()), {0: make_images()})
    exactly(many.server.weights, one.server.weights)
    for client in range(3):
        exactly(many.server.last[client], one.server.last[0])
        exactly(many.history[-1].metrics[client], one.history[-1].metrics[0])


def test_one_client_is_its_own_mean(play, make_contrastive, make_images, exactly, tap):
    """The server holds, bit for bit, what the client sent."""
    server = play(make_contrastive(), {0: make_images()}, channel=tap).server
    weights, densities = [message for at, client, message in tap.sent if (at, client) == (3, 0)]
    exactly(server.weights, weights)
    exactly(server.last[0], densities)


@pytest.mark.parametrize("codec", [Plain, Byte])
def test_a_client_with_one_image_sends_no_density(play, make_contrastive, make_images, codec):
    data, channel = {0: make_images(1), 1: make_images(6, seed=1)}, Channel(codec(), codec())
    federation = play(make_contrastive(), data, sed=True, channel=channel)
    assert len(federation.server.last[0][MEAN]) == 0
    assert len(federation.server.auxiliary[MEAN]) == 1
    assert torch.isfinite(federation.history[-1].metrics[0]).all()


def test_without_any_density_the_run_ends_in_one_line(play, make_contrastive, make_images):
    with pytest.raises(UserError, match=r"no densities .*two training images .*of any client; give it more$"):
        play(make_contrastive(), {0: make_images(1), 1: make_images(1, seed=1)})


def test_images_of_a_new_stage_are_judged_in_place_of_the_last_ones(make_contrastive, make_images):
    client = FADngsClient(make_contrastive())
    client.context = Context(seed=0, round=1, client=0)
    first = ShareDensities().send(client, make_images())
    client.task.densities.set(first[MEAN], first[COVARIANCE])
    client.context = Context(seed=0, round=2, client=0, stage=1)
    client.refresh(make_images(seed=1))
    assert client.task._anomalous.tolist()
    assert min(client.task._anomalous) >= 100  # positions of the new images


# ------------------------------------------------------------------------------------------- distillation


@pytest.mark.slow
def test_distillation_begins_after_the_warm_up(play, make_contrastive, make_images):
    """Until then, weights are those of a run without; after it they are others."""
    data = {0: make_images(), 1: make_images(seed=1)}
    paths = []
    for sed in (False, True):
        path = []
        paths.append(path)
        history = play(
            make_contrastive(warmup=2), data, sed=sed,
            after_round=lambda federation, report, path=path: path.append(federation.server.weights[WEIGHT].clone()),
        ).history  # fmt: skip
        distilled = [report.round for report in history if "distillation_loss" in report.scalars]
        assert distilled == ([3] if sed else [])
    assert [torch.equal(one, other) for one, other in zip(*paths, strict=True)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("queue", "public", "said"),
    [
        (9, None, "distillation needs public images: give public=natural, synthetic"),
        (9, torch.zeros(1, 3, 8, 8), "distillation needs public images"),
        (10**12, torch.zeros(2, 3, 8, 8), "distillation.queue=1000000000000: the queues of 1 teachers take"),
    ],
)
def test_what_cannot_be_distilled_is_refused_before_anything_is_trained(
    federate, make_contrastive, make_images, tap, queue, public, said
):
    with refusal(said):
        federate(
            FADngsClient, FADngsServer, task=make_contrastive(), data={0: make_images()}, channel=tap,
            server={"distillation": EnsembleDistillation(queue), "public": public},
        )  # fmt: skip
    assert not tap.sent


def test_without_statistics_of_the_server_there_is_no_distillation(play, make_contrastive, make_images):
    with pytest.raises(UserError, match="aggregate_buffers=mean"):
        play(make_contrastive(), {0: make_images()}, sed=True, settings={"aggregate_buffers": "local"})
    client = FADngsClient(make_contrastive(), aggregate_buffers="local")
    assert FADngsServer(client).distillation is None
    assert not client.predictors.shared


# ----------------------------------------------------------------------------------- going on, and looking on


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.slow
def test_interrupted_runs_end_as_uninterrupted_ones(
    play, make_contrastive, make_images, exactly, monkeypatch, shared
):
    """Stopped in the set-up, before a checkpoint, and between the exchanges of a round."""
    data = {client: make_images(5 + client, seed=client) for client in range(3)}
    settings = {"sed": True, "fraction": 0.67, "shuffle": True, "settings": {"share_densities": shared}}

    def run(**more):
        return play(make_contrastive(warmup=0, clusters=2), data, **settings, **more)

    def between_exchanges(exchange, server, updates):
        raise Stop

    stopped(run, 0)
    stopped(run, 1)
    if shared:
        with monkeypatch.context() as patch:
            patch.setattr(ShareDensities, "aggregate", between_exchanges)
            with pytest.raises(Stop):
                run(folder="parts")
    exactly(outcome(run(folder="parts")), outcome(run()))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.slow
def test_evaluation_leaves_no_trace(play, make_contrastive, make_images, exactly, shared):
    data = {client: make_images(5 + client, seed=client) for client in range(3)}
    settings = {"sed": True, "fraction": 0.67, "shuffle": True, "settings": {"share_densities": shared}}
    often = play(make_contrastive(warmup=0), data, evaluate_every=1, **settings)
    seldom = play(make_contrastive(warmup=0), data, evaluate_every=3, **settings)
    exactly(outcome(often)[:2], outcome(seldom)[:2])
    before = outcome(often)
    exactly(often.evaluate(3), often.history[-1].metrics)
    exactly(outcome(often), before)


@pytest.mark.slow
def test_no_state_grows_with_the_rounds(play, make_contrastive, make_images):
    data = {client: make_images(6, seed=client) for client in range(3)}
    few, many = (play(make_contrastive(), data, sed=True, rounds=rounds) for rounds in (2, 6))
    assert size_of(state_of(many.server)) == size_of(state_of(few.server))
    for client in data:
        assert size_of(many.pool.get(client)) == size_of(few.pool.get(client))


def test_densities_of_others_are_no_client_s_state(play, make_contrastive, make_images):
    """They come anew with every message; kept, they would take the square of the number of clients."""
    federation = play(make_contrastive(), {client: make_images(6, seed=client) for client in range(3)})
    assert federation.pool.get(0)["own_entries"] == {}
