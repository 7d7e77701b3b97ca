"""The round loop on data that come in stages."""

import numpy as np
import pytest

STREAM = {0: [[1.0], [3.0, 3.0, 3.0]], 1: [[4.0, 4.0, 4.0], [2.0]]}


class Stream:
    """Clients hold their first list of numbers for two rounds, then their second."""

    sizes = {client: sum(map(len, tasks)) for client, tasks in STREAM.items()}
    milestones = frozenset({2})

    def at(self, round):
        stage = int(round > 2)
        held = type(self.plain)({client: tasks[stage] for client, tasks in STREAM.items()})
        return Now(held, dict.fromkeys(STREAM, stage))

    def __init__(self, plain):
        self.plain = plain


class Now:
    def __init__(self, held, stages):
        self.held, self.stages, self.sizes = held, stages, held.sizes

    def client_loader(self, *given, **options):
        return self.held.client_loader(*given, **options)


@pytest.fixture
def stream(toy):
    """The tiny method on tasks that come one after another; ``seen`` is where its client was refreshed."""

    def make(**parts):
        federation = toy(**{"rounds": 4, "data": Stream(toy().data), **parts})
        client = federation.client
        client.seen = []
        client.refresh = lambda loader, predicts=False: client.seen.append(
            (client.context.round, client.context.client, client.context.stage, len(loader.dataset))
        )
        return federation

    return make


def test_a_round_has_the_images_of_its_task_and_their_number_weighs(stream):
    """Of four images a round, client 0 holds one, then three."""
    w, path = 0.0, []
    for round in range(1, 5):
        own = []
        for tasks in STREAM.values():
            numbers, v = tasks[round > 2], w
            for x in numbers:
                v += 0.5 * (x - v)
            own.append((len(numbers), v))
        w = sum(n * v for n, v in own) / 4
        path.append(w)
    history = stream().run()
    assert [report.scalars["weight"] for report in history] == pytest.approx(path, rel=1e-6)
    # In round 3, client 0 takes three steps from w to 3, and client 1 one to 2.
    w = path[1]
    losses = 3 * [np.mean([(0.5**k * (w - 3)) ** 2 / 2 for k in range(3)])] + [(w - 2) ** 2 / 2]
    assert history[2].scalars["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_contexts_say_the_task(stream):
    federation = stream(rounds=3, evaluate_every=10)
    federation.run()
    first = [(round, client, 0, len(STREAM[client][0])) for round in (1, 2) for client in (0, 1)]
    # Evaluation after round 2 sees what is sent for round 3, and the task of round 2.
    after = [(3, client, 0, len(STREAM[client][0])) for client in (0, 1)]
    last = [(round, client, 1, len(STREAM[client][1])) for round in (3, 4) for client in (0, 1)]
    assert federation.client.seen == [*first, *after, *last]


def test_the_last_rounds_of_tasks_are_evaluated(stream):
    history = stream(rounds=5, evaluate_every=4).run()
    assert [report.round for report in history if report.metrics] == [2, 4, 5]
