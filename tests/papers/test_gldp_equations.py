"""GLDP (Guo et al., STHFL, 2023), equation by equation, against loops in NumPy."""

import numpy as np
import pytest
import torch
from helpers.gldp import (
    COMMON,
    FABRIC,
    KINDS,
    LABELS,
    OLD,
    WIDTH,
    arrays,
    assert_known,
    descended,
    embed,
    kl,
    make_client,
    make_images,
    means,
    moved,
    packed,
    parameters,
    ready,
    softmax,
    some,
    terms,
    told_by,
)

from lit_fedad.contracts import Context, Update
from lit_fedad.federation.client_runner import fit
from lit_fedad.memory.prototypes import Prototypes
from lit_fedad.methods.gldp import CLASSES, VECTORS, GLDPServer, global_relation, local_relation


def test_equation_2():
    client, images = make_client(lam=None), make_images(LABELS)
    expected, _, _ = terms(parameters(client), *arrays(images), {}, {})
    found = client.training_step(next(iter(images)))
    assert found.keys() == {"loss", "accuracy"}
    assert float(found["loss"].detach()) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("relation", ["embedding", "logit"])
@pytest.mark.parametrize("lam", [None, 0.0, 0.3, 1.0])
def test_equations_3_and_4(relation, lam):
    """t = 1 step of the base under the fixed head, then s = 2 steps of the head on the fixed base."""
    client, images = ready(relation=relation, lam=lam), make_images(LABELS)
    x, y = arrays(images)
    weights = parameters(client)
    base, head = weights[:2], weights[2:]

    def objective(weights, teacher):
        """The old prototypes' predictions are constants: they are those of the teacher's head."""
        entropy, local, shared = terms(weights, x, y, OLD, COMMON, relation, teacher)
        return entropy if lam is None else entropy + lam * local + (1 - lam) * shared

    base = descended(lambda mu: objective([*mu, *head], head), base)
    for _ in range(2):
        head = descended(lambda nu, teacher=head: objective([*base, *nu], teacher), head)
    fit(client, images, FABRIC)
    for found, expected in zip(parameters(client), [*base, *head], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("weighted", [False, True])
def test_equation_5(weighted):
    server = GLDPServer(make_client(), weighted=weighted)
    draw = np.random.default_rng(0)
    sizes = {0: 5, 3: 20, 4: 15}
    bases = {c: {k: draw.normal(size=v.shape) for k, v in server.weights.items()} for c in sizes}
    none = {VECTORS: torch.zeros(0, WIDTH), CLASSES: torch.zeros(0, dtype=torch.int64)}
    server.aggregate(
        {c: Update({**{k: torch.tensor(v) for k, v in bases[c].items()}, **none}, sizes[c]) for c in sizes}
    )
    assert server.weights.keys() == {"encoder.layer.weight", "encoder.layer.bias"}
    shares = {c: size / 40 if weighted else 1 / 3 for c, size in sizes.items()}
    for name, merged in server.weights.items():
        expected = sum(share * bases[c][name] for c, share in shares.items())
        np.testing.assert_allclose(merged.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_equation_6(batch_size):
    """Over all images of a class, in whatever batches."""
    client, images = make_client(), make_images(LABELS, batch_size=batch_size)
    x, y = arrays(images)
    client.context = Context(0, 1, client=0)
    message = client.send(images)
    assert message[CLASSES].tolist() == [0, 1, 2]
    assert message[VECTORS].dtype == torch.float32
    assert_known(client.current, means(embed(parameters(client), x), y))
    assert torch.equal(message[VECTORS], client.current.vectors[:3])


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_equation_7(temperature):
    own = some(0, 1, 2, seed=3)
    vectors = packed(own).vectors.requires_grad_()
    old, counts = packed(some(0, 1, 3, seed=4)), torch.tensor([2, 1, 5, 0])
    found = local_relation(vectors, counts, old, temperature)
    expected = sum(
        kl(softmax(old.vectors[n].numpy() / temperature), softmax(own[n] / temperature)) for n in (0, 1)
    )
    assert float(found.detach()) == pytest.approx(expected, rel=1e-10)
    found.backward()
    # d KL / d own = (softmax(own) - softmax(old)) / temperature
    for n in range(KINDS):
        pull = softmax(own[n] / temperature) - softmax(old.vectors[n].numpy() / temperature) if n < 2 else 0
        np.testing.assert_allclose(
            vectors.grad[n].numpy(), pull / temperature * np.ones(WIDTH), rtol=1e-9, atol=1e-12
        )
    vectors = vectors.detach()
    assert float(local_relation(vectors, counts, packed({}))) == 0
    assert float(local_relation(vectors, counts, Prototypes(vectors, counts > 0))) == 0


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_equation_8(temperature):
    client, images = ready(relation="logit", temperature=temperature), make_images(LABELS)
    x, y = arrays(images)
    weights = parameters(client)
    cool = [*weights[:2], weights[2] / temperature, weights[3] / temperature]
    _, expected, _ = terms(cool, x, y, OLD, COMMON, "logit")
    found = client.training_step(next(iter(images)))["local_relation"]
    assert float(found.detach()) == pytest.approx(expected, rel=1e-9)
    assert expected > 0.01


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_equation_9(beta):
    client = make_client(beta=beta)
    old, current = some(0, 1, seed=5), some(1, 2, seed=6)
    client.old, client.current = packed(old), packed(current)
    client.context = Context(0, 2, client=0, stage=1)
    client.refresh(make_images(LABELS))
    assert_known(client.old, moved(old, current, beta))
    assert_known(client.current, {})


def test_equation_10():
    own = some(0, 1, 2, seed=7)
    vectors = packed(own).vectors.requires_grad_()
    common, counts = packed(some(0, 2, 3, seed=8)), torch.tensor([3, 1, 4, 0])
    found = global_relation(vectors, counts, common)
    expected = sum(
        share * sum((own[n] - common.vectors[n].numpy()) ** 2) / WIDTH
        for n, share in ((0, 3 / 8), (2, 4 / 8))
    )
    assert float(found.detach()) == pytest.approx(expected, rel=1e-10)
    found.backward()
    for n, share in enumerate((3 / 8, 0, 4 / 8, 0)):
        pull = 2 * share / WIDTH * (vectors.detach()[n] - common.vectors[n])
        np.testing.assert_allclose(vectors.grad[n].numpy(), pull.numpy(), rtol=1e-10)
    vectors = vectors.detach()
    assert float(global_relation(vectors, counts, packed({}))) == 0
    assert float(global_relation(vectors, counts, Prototypes(vectors, counts > 0))) == 0


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_equation_11(beta):
    """The mean over the clients that hold a class, each counted once, whatever their images."""
    server = GLDPServer(make_client(), beta=beta)
    before = some(0, 1, seed=1)
    server.auxiliary = dict(zip((VECTORS, CLASSES), packed(before, torch.float32).pack(), strict=True))
    own = {0: some(0, 2, seed=2), 1: some(2, seed=3), 5: some(0, 2, 3, seed=4)}
    sizes = {0: 30, 1: 5, 5: 1}
    updates = {}
    for client, known in own.items():
        vectors, classes = packed(known, torch.float32).pack()
        updates[client] = Update({**server.weights, VECTORS: vectors, CLASSES: classes}, sizes[client])
    server.aggregate(updates)
    holders = {n: [known[n] for known in own.values() if n in known] for n in range(KINDS)}
    mean = {n: sum(held) / len(held) for n, held in holders.items() if held}
    assert_known(told_by(server), moved(before, mean, beta))


@pytest.mark.parametrize("relation", ["embedding", "logit"])
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_equation_12(relation, lam):
    client, images = ready(relation=relation, lam=lam), make_images(LABELS)
    entropy, local, shared = terms(parameters(client), *arrays(images), OLD, COMMON, relation)
    found = {name: float(v.detach()) for name, v in client.training_step(next(iter(images))).items()}
    assert found["loss"] == pytest.approx(entropy + lam * local + (1 - lam) * shared, rel=1e-10)
    assert found["local_relation"] == pytest.approx(local, rel=1e-9)
    assert found["global_relation"] == pytest.approx(shared, rel=1e-9)
    assert min(local, shared) > 0.01


def test_equation_13():
    """By global prototypes; by its own, of which those of the current task come first; never an unknown class."""
    client, images = ready(), make_images(LABELS)
    client.met = torch.tensor([kind in (0, 3) for kind in range(KINDS)])
    met = {kind: vector for kind, vector in COMMON.items() if kind in (0, 3)}
    current = some(3, seed=9)
    client.current = packed(current)
    x, _ = arrays(images)
    with torch.no_grad():
        found = client.predict_step(next(iter(images)))
    z = embed(parameters(client), x)
    cases = ((met, found.logits), (COMMON, found.others["all"]), ({**OLD, **current}, found.others["lp"]))
    for known, logits in cases:
        for row, feature in zip(logits, z, strict=True):
            distances = {n: np.sqrt(sum((feature - c) ** 2)) for n, c in known.items()}
            assert int(row.argmax()) == min(distances, key=distances.get)
            for n in range(KINDS):
                assert float(row[n]) == pytest.approx(-distances.get(n, np.inf), rel=1e-5)
    nearest = [min(np.sqrt(sum((feature - c) ** 2)) for c in met.values()) for feature in z]
    np.testing.assert_allclose(found.image_score.numpy(), nearest, rtol=1e-5)
    head = z @ parameters(client)[2].T + parameters(client)[3]
    np.testing.assert_allclose(found.others["head"].numpy(), head, rtol=1e-10)
