"""GLDP's client and images, small enough to play by hand, and the paper's equations in NumPy."""

import numpy as np
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.memory.prototypes import Prototypes
from lit_fedad.methods.gldp import CLASSES, VECTORS, GLDPClient, GLDPServer
from lit_fedad.tasks.classifier import Classifier

STEP, WIDTH, KINDS = 0.1, 3, 4
FABRIC = Fabric(accelerator="cpu", devices=1)


class Encoder(nn.Module):
    """tanh(W x + b) of images of four numbers."""

    num_features = WIDTH

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, WIDTH)

    def forward(self, images):
        return torch.tanh(self.layer(images.flatten(1)))


def make_client(**settings) -> GLDPClient:
    """In double precision; plain gradient steps."""
    torch.manual_seed(0)
    task = Classifier(Encoder(), KINDS, augment=False, learning_rate=STEP, momentum=0, weight_decay=0)
    client = GLDPClient(task.double(), **{"base_epochs": 1, "head_epochs": 2, **settings})
    return client.eval()


def make_images(labels, seed: int = 0, batch_size: int = 100) -> DataLoader:
    draw = torch.Generator().manual_seed(seed)
    data = [
        {"image": torch.randn(1, 2, 2, generator=draw, dtype=torch.float64) + label, "label": label}
        for label in labels
    ]
    return DataLoader(data, batch_size)


def arrays(loader) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 4] and labels [n]."""
    batches = list(loader)
    x = torch.cat([batch["image"].flatten(1) for batch in batches])
    return x.numpy(), torch.cat([batch["label"] for batch in batches]).numpy()


def some(*classes, seed: int = 0) -> dict[int, np.ndarray]:
    """A prototype of each of these classes."""
    draw = np.random.default_rng(seed)
    return {n: draw.normal(size=WIDTH) for n in classes}


def packed(known: dict[int, np.ndarray], dtype=torch.float64) -> Prototypes:
    vectors = torch.tensor(np.array(list(known.values())).reshape(-1, WIDTH), dtype=dtype)
    return Prototypes.unpack(vectors, torch.tensor(list(known), dtype=torch.int64), KINDS)


def told_by(server: GLDPServer) -> Prototypes:
    return Prototypes.unpack(server.auxiliary[VECTORS], server.auxiliary[CLASSES], KINDS)


def assert_known(found: Prototypes, expected: dict[int, np.ndarray]) -> None:
    assert found.known.nonzero().squeeze(1).tolist() == sorted(expected)
    for n, vector in expected.items():
        np.testing.assert_allclose(found.vectors[n].numpy(), vector, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------ by hand


def softmax(rows: np.ndarray) -> np.ndarray:
    powers = np.exp(rows - rows.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def kl(old: np.ndarray, new: np.ndarray) -> float:
    return float(sum(o * np.log(o / n) for o, n in zip(old, new, strict=True)))


def parameters(client) -> list[np.ndarray]:
    """W, b of the base mu and of the head nu."""
    task = client.task
    return [p.detach().numpy().copy() for p in (*task.encoder.parameters(), *task.classifier.parameters())]


def embed(mu, x: np.ndarray) -> np.ndarray:
    return np.tanh(x @ mu[0].T + mu[1])


def means(features: np.ndarray, y: np.ndarray) -> dict[int, np.ndarray]:
    """Eq. 6."""
    return {int(n): sum(features[y == n]) / np.sum(y == n) for n in np.unique(y)}


def moved(old: dict, new: dict, beta: float) -> dict[int, np.ndarray]:
    """Eq. 9 and 11: new classes are added."""
    both = {n: beta * old[n] + (1 - beta) * new[n] for n in old.keys() & new.keys()}
    return {**old, **new, **both}


def terms(weights, x, y, old, common, relation="embedding", teacher=None) -> tuple[float, float, float]:
    """Cross-entropy (Eq. 2), LP (Eq. 7 or 8) and GP (Eq. 10) of a batch; the teacher is a head, or the same one."""
    features = embed(weights[:2], x)
    chances = softmax(features @ weights[2].T + weights[3])
    entropy = np.mean([-np.log(p[n]) for p, n in zip(chances, y, strict=True)])
    own = means(features, y)
    if relation == "embedding":
        local = sum(kl(softmax(old[n]), softmax(own[n])) for n in old.keys() & own.keys())
    else:
        expected = means(chances, y)
        matrix, bias = teacher or weights[2:]
        former = {n: softmax(matrix @ c + bias) for n, c in old.items()}
        local = sum(kl(former[n], expected[n]) for n in old.keys() & own.keys())
    shared = sum(
        np.sum(y == n) / len(y) * np.mean((own[n] - common[n]) ** 2) for n in common.keys() & own.keys()
    )
    return float(entropy), float(local), float(shared)


def slope(function, at: np.ndarray) -> np.ndarray:
    """The gradient by central differences."""
    gradient = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[place] = 1e-6
        gradient[place] = (function(at + step) - function(at - step)) / 2e-6
    return gradient


def descended(loss, weights: list[np.ndarray]) -> list[np.ndarray]:
    """One step down the loss, a function of all these weights."""

    def with_part(k):
        return lambda part: loss([*weights[:k], part, *weights[k + 1 :]])

    return [w - STEP * slope(with_part(k), w) for k, w in enumerate(weights)]


OLD, COMMON = some(0, 3, seed=1), some(0, 1, seed=2)
LABELS = [0, 1, 2, 0, 1, 0, 2, 0]  # class 3 is not here, and 2 has no prototype anywhere


def ready(**settings) -> GLDPClient:
    """A client that knows older prototypes, and those of all clients."""
    client = make_client(**settings)
    client.old, client.common_prototypes = packed(OLD), packed(COMMON)
    return client
