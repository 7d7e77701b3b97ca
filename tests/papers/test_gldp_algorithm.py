"""GLDP (Guo et al., STHFL, 2023): its Algorithm 1 and its preset to the letter, against loops in NumPy."""

import numpy as np
import pytest
from helpers.gldp import (
    COMMON,
    FABRIC,
    KINDS,
    LABELS,
    OLD,
    Encoder,
    arrays,
    assert_known,
    embed,
    make_client,
    make_images,
    means,
    moved,
    packed,
    parameters,
    some,
    terms,
    told_by,
)

from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.state import detached, load_state, state_of
from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.federation.client_runner import fit
from lit_fedad.memory.prototypes import Prototypes
from lit_fedad.methods.gldp import CLASSES, VECTORS, GLDPServer
from lit_fedad.tasks.classifier import Classifier

TASKS = {
    0: [make_images([0, 1, 0, 1, 1], 1), make_images([1, 2, 2], 2), make_images([0, 3, 3, 2], 3)],
    1: [make_images([2, 2, 3], 4), make_images([0, 2, 0, 0], 5), make_images([1, 1, 2], 6)],
}


@pytest.mark.parametrize("beta", [0.5, 0.2])
@pytest.mark.parametrize(
    "rounds",
    [
        [{0: 0, 1: 0}, {0: 0, 1: 0}, {0: 1, 1: 1}, {0: 1, 1: 1}],
        [{0: 0}, {0: 0, 1: 0}, {1: 1}, {0: 1, 1: 1}],  # rounds skipped, of them the first of a task
        [{0: 0}, {1: 0}, {1: 1}, {1: 1}, {0: 2, 1: 2}],  # a whole task skipped
        [{0: 0, 1: 0}, {1: 2}, {0: 2, 1: 2}],  # and a first visit that is not the first task's
        [{0: 0, 1: 0}, {0: 1, 1: 1}, {0: 0, 1: 0}, {0: 1, 1: 1}],  # stages that come again: literally
    ],
)
def test_algorithm_1(rounds, beta):
    """Each round names its participants and their tasks."""
    client = make_client(beta=beta)
    server = GLDPServer(client, beta=beta)
    shelf = {number: detached(state_of(client)) for number in TASKS}
    common, old, current, last = {}, {0: {}, 1: {}}, {0: {}, 1: {}}, {0: 0, 1: 0}
    start = parameters(client)[:2]
    for round, participants in enumerate(rounds, start=1):
        server.context = Context(0, round)
        updates, bases, sent = {}, {}, {}
        for number, stage in participants.items():
            broadcast = server.broadcast(number)
            client.context = Context(0, round, client=number, stage=stage)
            load_state(client, shelf[number])
            client.receive(broadcast)
            # Everyone starts from the last mean and the last global prototypes, whoever trained just before.
            for found, expected in zip(parameters(client), start, strict=False):
                np.testing.assert_allclose(found, expected, rtol=1e-12)
            assert_known(client.common_prototypes, common)
            loader = TASKS[number][stage]
            client.refresh(loader)
            if stage != last[number]:
                old[number] = moved(old[number], current[number], beta)
                last[number] = stage
            assert_known(client.old, old[number])
            fit(client, loader, FABRIC)
            message = client.send(loader)
            x, y = arrays(loader)
            bases[number] = parameters(client)[:2]
            sent[number] = current[number] = means(embed(bases[number], x), y)
            # What is sent is the base and the prototypes of this task; the old ones stay as they were.
            assert message.keys() == {*server.weights, VECTORS, CLASSES}
            assert message[CLASSES].tolist() == sorted(sent[number])
            assert_known(Prototypes.unpack(message[VECTORS], message[CLASSES], KINDS), sent[number])
            assert_known(client.old, old[number])
            assert_known(client.local, {**old[number], **current[number]})
            shelf[number] = detached(state_of(client))
            updates[number] = Update(message, len(y))
        server.aggregate(updates)
        start = [sum(parts) / len(parts) for parts in zip(*bases.values(), strict=True)]
        held = {n: [own[n] for own in sent.values() if n in own] for n in range(KINDS)}
        common = moved(common, {n: sum(v) / len(v) for n, v in held.items() if v}, beta)
        assert_known(told_by(server), common)


@pytest.mark.slow
def test_the_literal_preset_is_as_printed():
    """Eq. 12 with lambda = 0.5, Eq. 9 and 11 with beta = 0.5, and the numbers of Section 5."""
    config = compose(["method=gldp", "experiment=gldp_literal", "data.root=x"])
    given = {k: v for k, v in config["task"].items() if k not in ("_target_", "encoder", "augment")}
    client = build(
        config["method"]["client"], task=Classifier(Encoder(), KINDS, augment=False, **given).double()
    ).eval()
    client.old, client.common_prototypes = packed(OLD), packed(COMMON)
    images = make_images(LABELS)
    entropy, local, shared = terms(parameters(client), *arrays(images), OLD, COMMON)
    found = client.training_step(next(iter(images)))["loss"]
    assert float(found.detach()) == pytest.approx(entropy + 0.5 * local + 0.5 * shared, rel=1e-9)
    current = some(1, 3, seed=6)
    client.current, client.context = packed(current), Context(0, 2, client=0, stage=1)
    client.refresh(images)
    assert_known(client.old, moved(OLD, current, 0.5))
    assert build(config["method"]["server"], client=client).beta == 0.5
    assert (given["learning_rate"], given["weight_decay"], config["batch_size"]) == (0.01, 1e-4, 32)
    assert client.base_epochs + client.head_epochs == 30
    # Fifty global rounds of five tasks, with the same clients within each.
    assert config["partition"]["schedule"] == "literal"
    assert (config["rounds"], config["federation"]["sampler"]["resample_every"]) == (250, 5)
