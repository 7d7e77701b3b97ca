"""FedDyMem: exchanges, payloads, invariants."""

from contextlib import nullcontext

import pytest
import torch
from helpers.methods import exchanges_of
from helpers.summed_bank import summed_bank
from lightning.fabric import Fabric

from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.state import load_state, state_of
from lit_fedad.core.errors import UserError
from lit_fedad.federation.channel import check, elements
from lit_fedad.federation.client_runner import fit
from lit_fedad.memory.merge import KMeansAggregation, LloydAggregation, MeanAggregation, agreement
from lit_fedad.memory.reduce import PositionReduce
from lit_fedad.methods.feddymem import FedDyMemClient, FedDyMemServer, FirstMemory
from lit_fedad.tasks.slot_distances import HingeLoss, LocalScale

FABRIC = Fabric(accelerator="cpu", devices=1)
ROBUST = {"standardise": True, "loss": HingeLoss("median", neighbours=2, repulsion=0.1)}


class Play:
    """Plays exchanges by hand: one live client, personal states in a dictionary."""

    def __init__(self, task, loaders, aggregation=None, **client_settings):
        self.client = FedDyMemClient(task, **client_settings)
        aggregation = aggregation or KMeansAggregation(weighted=self.client.send_counts, continued=True)
        self.server = FedDyMemServer(self.client, aggregation)
        self.loaders = loaders
        self.initial = self.copy(state_of(self.client))
        self.states = {}

    @staticmethod
    def copy(state):
        import copy

        return copy.deepcopy(state)

    def round(self, number, order=None):
        context = Context(0, number)
        exchange = exchanges_of(self.client).at(context)
        self.server.context = context
        updates = {}
        for c in order or sorted(self.loaders):
            self.client.context = Context(0, number, c)
            load_state(self.client, self.copy(self.states.get(c, self.initial)))
            down = exchange.broadcast(self.server, c)
            check(down, exchange.broadcast_spec(self.client), "the server")
            exchange.receive(self.client, down)
            if number > 0:
                with self.client.context.seeded("fit"):
                    fit(self.client, self.loaders[c], FABRIC)
            message = exchange.send(self.client, self.loaders[c])
            check(message, exchange.upload_spec(self.client), f"client {c}")
            updates[c] = Update(message, len(self.loaders[c].dataset))
            self.states[c] = self.copy(state_of(self.client))
        exchange.aggregate(self.server, dict(sorted(updates.items())))
        return updates

    def set_up(self, **kw):
        for number in range(exchanges_of(self.client).first_round, 1):
            self.round(number, **kw)
        return self


@pytest.mark.parametrize(
    ("task", "server"),
    [
        ({}, {"aggregation": KMeansAggregation(weighted=True)}),
        ({}, {"aggregation": LloydAggregation()}),
        ({}, {"aggregation": MeanAggregation(), "prior_patches": 16}),
        ({}, {"aggregation": MeanAggregation(), "radius_images": 2}),
        ({"image_score": LocalScale()}, {"aggregation": MeanAggregation()}),
    ],
)
def test_what_looks_at_counts_is_refused_where_nobody_sends_them(make_task, task, server):
    """Otherwise each of these settings would change nothing."""
    with pytest.raises(UserError, match="send_counts=false: nobody sends slots' counts and radii"):
        FedDyMemServer(FedDyMemClient(make_task(**task)), **server)
    FedDyMemServer(FedDyMemClient(make_task(**task), send_counts=True), **server)


def test_a_subspace_is_refused(make_task):
    """Nobody would fit it: clients pool moments once, and no residuals."""
    with pytest.raises(UserError, match="task.subspace=0.9: a memory of FedDyMem has none; give"):
        FedDyMemClient(make_task(subspace=0.9, head=None))


@pytest.mark.parametrize(("key", "value"), [("prior_patches", -1), ("radius_images", 0)])
def test_senseless_settings_are_refused(make_task, key, value):
    with pytest.raises(UserError, match=f"method.server.{key}={value} must be at least {value + 1}"):
        FedDyMemServer(FedDyMemClient(make_task(), send_counts=True), MeanAggregation(), **{key: value})


def test_exchanges_before_round_1(make_task):
    def names(task):
        return [exchange.name for exchange in exchanges_of(FedDyMemClient(task)).setup]

    assert names(make_task()) == ["memory"]
    assert names(make_task(**ROBUST)) == ["statistics", "memory", "threshold"]


def test_statistics_are_those_of_the_union(make_task, make_loader):
    loaders = {0: make_loader(3, seed=1), 1: make_loader(9, seed=2)}
    play = Play(make_task(**ROBUST), loaders, send_counts=True).set_up()
    task = play.client.task
    rows = torch.cat([task.embed(b) for loader in loaders.values() for b in loader]).flatten(0, 1)
    torch.testing.assert_close(play.server.statistics["mean"], rows.mean(0), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        play.server.statistics["scale"],
        (rows.var(0, correction=0) + rows.var(0, correction=0).mean()).sqrt() + 1e-5,
        rtol=1e-4,
        atol=1e-6,
    )


def test_threshold_is_the_pooled_median(make_task, make_loader):
    loaders = {0: make_loader(3, seed=1), 1: make_loader(9, seed=2)}
    play = Play(make_task(**ROBUST), loaders, send_counts=True).set_up()
    task = play.client.task
    play.client.receive(play.server.broadcast(0))
    rows = torch.cat([task(b) for loader in loaders.values() for b in loader]).flatten(0, 1)
    distances = torch.cdist(rows, play.server.known["memory"]).topk(2, largest=False).values
    assert float(play.server.known["threshold"]) == pytest.approx(
        float(distances.detach().median()), rel=0.05
    )


def test_literal_payload_is_one_memory_each_way(make_task, make_loader):
    play = Play(make_task(residual=False, reduce=PositionReduce()), {0: make_loader()})
    play.set_up()
    updates = play.round(1)
    assert elements(updates[0].message) == 16 * 8 == elements(play.server.broadcast(0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_server_on_a_gpu_keeps_what_one_on_the_cpu_does(make_task, make_loader):
    loaders = {0: make_loader(6), 1: make_loader(4, seed=1)}
    plays = [Play(make_task(standardise=True), loaders, send_counts=True) for _ in range(2)]
    plays[1].server.fabric = Fabric(accelerator="cuda", devices=1)
    cpu, gpu = (play.set_up().server.known for play in plays)
    torch.testing.assert_close(gpu, cpu, atol=1e-4, rtol=1e-4)


def test_client_order_does_not_matter(make_task, make_loader):
    loaders = {c: make_loader(3 + c, seed=c) for c in range(3)}
    plays = [Play(make_task(**ROBUST), loaders, send_counts=True) for _ in range(2)]
    for play, order in zip(plays, ([0, 1, 2], [2, 0, 1]), strict=True):
        play.set_up(order=order)
        for number in (1, 2):
            play.round(number, order=order)
    assert torch.equal(plays[0].server.known["memory"], plays[1].server.known["memory"])


def test_heads_are_personal(make_task, make_loader):
    loaders = {c: make_loader(4, seed=c) for c in range(2)}
    play = Play(make_task(residual=False, learning_rate=1e-2), loaders).set_up()
    play.round(1)
    first, second = (play.states[c]["head"]["project.weight"] for c in (0, 1))
    assert not torch.equal(first, second)
    assert not torch.equal(first, play.initial["head"]["project.weight"])


def test_independent_initialisation_differs_between_clients_and_can_be_replayed(make_task, make_loader):
    loaders = {c: make_loader(4) for c in range(2)}
    plays = [Play(make_task(residual=False), loaders, independent_init=True).set_up() for _ in range(2)]
    heads = [[play.states[c]["head"]["project.weight"] for c in (0, 1)] for play in plays]
    assert not torch.equal(heads[0][0], heads[0][1])
    assert torch.equal(heads[0][0], heads[1][0])
    assert torch.equal(heads[0][1], heads[1][1])
    plays[0].round(1)  # what is trained is not drawn again
    client = plays[0].client
    trained = client.head["project.weight"].clone()
    client.receive({})
    assert torch.equal(client.head["project.weight"], trained)
    assert not torch.equal(trained, heads[0][1])


def test_mean_aggregation_is_the_ablation_without_kmeans(make_task, make_loader):
    loaders = {c: make_loader(4, seed=c) for c in range(2)}
    play = Play(make_task(head=None, reduce=PositionReduce()), loaders, MeanAggregation())
    updates = play.round(0)
    expected = (updates[0].message["memory"] + updates[1].message["memory"]) / 2
    torch.testing.assert_close(play.server.known["memory"], expected)


@pytest.mark.parametrize("trains", [True, False])
def test_a_collapsing_memory_of_a_head_is_said_with_the_round(make_task, make_loader, trains):
    task = make_task() if trains else make_task(head=None)
    play = Play(task, {0: make_loader()}, KMeansAggregation()).set_up()
    assert play.server.warnings() == []
    play.server.context = Context(0, 7)
    play.server.aggregate({0: Update({"memory": play.server.known["memory"] * 0.3}, 1)})
    line = "round 7: the memory is collapsing: its spread is 30% of what it was at first"
    assert play.server.warnings() == ([line] if trains else [])


@pytest.mark.parametrize(("factor", "refused"), [(99, False), (101, True)])
def test_a_first_radius_is_bounded_by_the_memorys_own_vectors(make_task, make_loader, factor, refused):
    play = Play(make_task(**ROBUST), {0: make_loader()}, send_counts=True)
    slots, channels = play.client.upload_spec()["memory"].shape
    memory, radii = torch.ones(slots, channels), torch.zeros(slots)
    radii[0] = factor * channels**0.5
    images = len(play.loaders[0].dataset)
    counts = torch.full((slots,), images * play.client.task.vectors_per_image / slots)
    update = Update({"memory": memory, "radii": radii, "counts": counts}, images)
    with pytest.raises(UserError, match="no vector longer than") if refused else nullcontext():
        FirstMemory().validate(play.server, 0, update)


def test_slots_that_every_client_shares_agree_fully():
    memory = torch.randn(16, 8)
    assert agreement(memory.repeat(3, 1), memory) == pytest.approx(1.0, abs=1e-5)
    assert agreement(torch.randn(3 * 16, 8), memory) < 0.9
    assert agreement(memory, memory[:1].repeat(2, 1)) is None  # equal slots tell nothing


@pytest.mark.parametrize("own_draws", [False, True])
def test_until_heads_differ_one_client_is_scored_for_all(
    federate, make_task, make_loader, exactly, own_draws
):
    asked = []
    federation = {
        "data": {client: make_loader(4, seed=client) for client in range(2)},
        "client": {"independent_init": own_draws},
        "server": {"aggregation": KMeansAggregation()},
    }

    def play(rounds, **question):
        return federate(
            FedDyMemClient, FedDyMemServer, task=make_task(), rounds=rounds, **question, **federation
        )

    play(1, question=lambda _, number: asked.append(number))
    assert asked == ([0, 1, 0, 1] if own_draws else [0, 0, 1])
    if not own_draws:
        untrained = play(0)
        answers = untrained.ask(0, untrained.evaluator)
        exactly(answers[0], answers[1])


def test_the_prior_draws_radii_to_the_usual_one(federate, make_loader):
    """A thousand distances of usual length drown a slot's few dozen."""
    data, spreads = {0: make_loader(5), 1: make_loader(3, seed=1)}, []
    for prior in (0, 1000):
        played = federate(
            FedDyMemClient,
            FedDyMemServer,
            task=summed_bank(subspace=None),
            data=data,
            client={"send_counts": True},
            server={"aggregation": LloydAggregation(), "prior_patches": prior},
            rounds=1,
        )
        radii = played.server.known["radii"]
        spreads.append(float(radii.std() / radii.mean()))
    assert spreads[1] < 0.1 * spreads[0]
