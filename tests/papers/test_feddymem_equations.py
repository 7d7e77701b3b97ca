"""FedDyMem (arXiv 2502.21012), equation by equation, against loops in NumPy."""

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lit_fedad.contracts import Context, Update
from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.federation.client_runner import fit
from lit_fedad.memory.merge import KMeansAggregation
from lit_fedad.memory.reduce import PositionReduce
from lit_fedad.methods.feddymem import FedDyMemClient, FedDyMemServer
from lit_fedad.tasks.slot_distances import HingeLoss, Softmin

GRID, CHANNELS = 4, 8


@pytest.fixture
def literal(make_task):
    """The task of `feddymem_literal` at toy size."""
    return make_task(residual=False, score=Softmin(), reduce=PositionReduce(), learning_rate=1e-2)


def resized(layer: np.ndarray) -> np.ndarray:
    """Bilinear resampling of [C, H, W] to the grid, pixel centres aligned."""
    channels, height, width = layer.shape
    out = np.zeros((channels, GRID, GRID))
    for row in range(GRID):
        for column in range(GRID):
            y = min(max((row + 0.5) * height / GRID - 0.5, 0), height - 1)
            x = min(max((column + 0.5) * width / GRID - 0.5, 0), width - 1)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
            dy, dx = y - top, x - left
            upper = (1 - dx) * layer[:, top, left] + dx * layer[:, top, right]
            lower = (1 - dx) * layer[:, bottom, left] + dx * layer[:, bottom, right]
            out[:, row, column] = (1 - dy) * upper + dy * lower
    return out


def generated(task, row: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Eq. 9 to 11 for one patch."""
    weights = {name: p.detach().numpy().astype(np.float64) for name, p in task.head.named_parameters()}

    def layer(name, x):
        return weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]

    projected = np.maximum(layer("project", row), 0)  # Eq. 9
    coord = layer("coord_conv", np.concatenate([projected, place]))
    px, py = np.tanh(layer("phi_2", np.tanh(layer("phi_1", coord))))
    grid = weights["grid"]
    side = grid.shape[1]
    x, y = (px + 1) / 2 * (side - 1), (py + 1) / 2 * (side - 1)  # Eq. 10
    sampled = np.zeros(len(row))
    for i in range(side):
        for j in range(side):
            sampled += grid[:, i, j] * max(0, 1 - abs(y - i)) * max(0, 1 - abs(x - j))  # Eq. 11
    return layer("out", np.concatenate([sampled, coord]))


def maps_of(task, loader) -> np.ndarray:
    """All memory features [n, GRID * GRID, C]."""
    with torch.no_grad():
        return torch.cat([task(batch) for batch in loader]).double().numpy()


def test_equation_8(literal, make_loader):
    batch = next(iter(make_loader(1)))
    layers = [layer[0].double().numpy() for layer in literal.backbone(batch["image"])]
    expected = np.concatenate([resized(layer) for layer in layers])
    np.testing.assert_allclose(
        literal.embed(batch)[0].T.reshape(CHANNELS, GRID, GRID).numpy(), expected, rtol=1e-4, atol=1e-6
    )


def test_equations_9_to_11(literal, make_loader):
    batch = next(iter(make_loader(1)))
    rows, places = literal.embed(batch)[0].double().numpy(), literal.places.double().numpy()
    assert places[0].tolist() == [-0.75, -0.75]
    assert places[1].tolist() == [-0.25, -0.75]  # x first
    expected = [generated(literal, row, place) for row, place in zip(rows, places, strict=True)]
    np.testing.assert_allclose(literal(batch)[0].detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_equation_12(literal, make_loader):
    literal.loss = HingeLoss(threshold=0.4, neighbours=3)
    literal.threshold.fill_(0.4)
    literal.load_memory(torch.randn(GRID * GRID, CHANNELS))
    batch = next(iter(make_loader(3)))
    total = 0.0
    for patch in maps_of(literal, [batch]).reshape(-1, CHANNELS):
        distances = np.sort(np.linalg.norm(literal.memory.numpy() - patch, axis=1))
        total += sum(max(0.0, d - 0.4) for d in distances[:3])
    expected = total / (3 * GRID * GRID * 3)
    assert literal.training_step(batch)["loss"].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("round", [0, 1, 2, 5])
def test_equations_14_to_16(literal, make_loader, round):
    loader = make_loader(6)
    maps, memory = maps_of(literal, loader), torch.randn(GRID * GRID, CHANNELS)
    previous = None if round == 0 else memory
    ours = literal.reduce_memory(loader, Context(0, round, 0), previous)

    numerator, denominator = 0.0, 0.0
    for image in maps:
        weight = 1.0 if round == 0 else np.sqrt(((image - memory.numpy()) ** 2).sum())
        numerator, denominator = numerator + weight * image, denominator + weight
    mean = numerator / denominator
    alpha = 1 / (round + 1)
    expected = alpha * mean + (1 - alpha) * memory.numpy() * (round > 0)
    np.testing.assert_allclose(ours.memory.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_algorithm_3_ends_where_lloyd_stands_still():
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(3 * GRID * GRID, CHANNELS, generator=draw)
    merged = KMeansAggregation(max_steps=200)(
        vectors, torch.ones(len(vectors)), GRID * GRID, None, draw
    ).numpy()
    vectors = vectors.numpy()
    nearest = ((vectors[:, None] - merged) ** 2).sum(2).argmin(1)
    for slot in range(GRID * GRID):
        members = vectors[nearest == slot]
        if len(members):
            np.testing.assert_allclose(merged[slot], members.mean(0), rtol=1e-4, atol=1e-4)


def test_algorithm_5_trains_against_the_last_memory_and_keeps_heads(literal, make_loader):
    client = FedDyMemClient(literal)
    server = FedDyMemServer(client, KMeansAggregation())
    loader = make_loader(6)
    initial = {name: p.detach().clone() for name, p in literal.head.named_parameters()}
    memories, heads = [], []
    for round in range(3):
        server.context = Context(0, round)
        client.context = Context(0, round, 0)
        client.receive(server.broadcast(0))
        if round:
            assert torch.equal(literal.memory, memories[-1])
            fit(client, loader, Fabric(accelerator="cpu", devices=1))
        server.aggregate({0: Update(client.send(loader), 6)})
        memories.append(server.known["memory"])
        heads.append({name: p.detach().clone() for name, p in literal.head.named_parameters()})
    # Round 0 trains nothing; later rounds do, each from where the one before ended.
    assert all(torch.equal(initial[name], heads[0][name]) for name in initial)
    assert not torch.equal(heads[0]["project.weight"], heads[1]["project.weight"])
    assert not torch.equal(heads[1]["project.weight"], heads[2]["project.weight"])
    # One client: k-means of HW vectors into HW clusters returns them, in some order.
    uploaded = literal.reduce_memory(loader, client.context, memories[1]).memory
    distances = torch.cdist(uploaded, memories[2])
    assert float(distances.amin(1).max()) < 1e-3


@pytest.fixture(scope="module")
def preset():
    """The configuration of `feddymem_literal`, at toy size."""
    return compose(["method=feddymem_literal", "grid=4", "image.size=32", "backbone.weights=random"])


@pytest.fixture(scope="module")
def printed(preset):
    """The client as the preset builds it."""
    task = build(preset["task"], backbone=build(preset["backbone"]))
    return build(preset["method"]["client"], task=task).eval()


def printed_distances(task, rows: np.ndarray) -> np.ndarray:
    """Distances of patches [n, C] of whole images to the memory, ascending [n, slots], by Eq. 9 to 11."""
    places = np.tile(task.places.double().numpy(), (len(rows) // len(task.places), 1))
    features = [generated(task, row, place) for row, place in zip(rows, places, strict=True)]
    memory = task.memory.double().numpy()
    return np.sort([np.linalg.norm(memory - feature, axis=1) for feature in features], axis=1)


def test_the_literal_preset_has_the_printed_loss_and_scores(printed):
    task = printed.task
    torch.manual_seed(1)
    batch = {"image": torch.randn(2, 3, 32, 32)}
    raw = torch.cat([F.interpolate(f, size=4, mode="bilinear") for f in task.backbone(batch["image"])], dim=1)
    with torch.no_grad():
        task.load_memory(task(batch)[0] + 0.1 * torch.randn(GRID * GRID, 448))
    distances = printed_distances(task, raw.flatten(2).transpose(1, 2).flatten(0, 1).double().numpy())
    loss = np.maximum(0, distances[:, :3] - 0.01).mean()  # Eq. 12, K = 3
    weights = np.exp(-distances[:, :3])
    scores = weights[:, 0] / weights.sum(1) * distances[:, 0]  # of CFA, which Section IV-A follows
    maps = task.draw_map(torch.from_numpy(scores).float().view(2, GRID, GRID))
    assert printed.training_step(batch, 0)["loss"].item() == pytest.approx(loss, rel=1e-4)
    with torch.no_grad():
        found = task.predict(task(batch), batch)
    torch.testing.assert_close(found.anomaly_map, maps, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found.image_score, maps.flatten(1).amax(1), rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_the_literal_preset_sends_and_merges_what_is_printed(preset, printed):
    """Eq. 14 to 16 in round 2; k-means counts every slot alike, also those of a client with more images."""
    task, memory = printed.task, torch.randn(GRID * GRID, 448, generator=torch.Generator().manual_seed(2))
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    maps = task({"image": images}).double().numpy()
    task.load_memory(memory)
    printed.context = Context(0, 2, 0)
    message = printed.send(DataLoader([{"image": image} for image in images], batch_size=2))
    weights = [np.sqrt(((image - memory.numpy()) ** 2).sum()) for image in maps]
    mean = sum(w * image for w, image in zip(weights, maps, strict=True)) / sum(weights)
    assert message.keys() == {"memory"}
    np.testing.assert_allclose(
        message["memory"].numpy(), mean / 3 + memory.numpy() * 2 / 3, rtol=1e-3, atol=1e-5
    )
    server = build(preset["method"]["server"], client=printed)
    server.context, server.known = Context(0, 2), {"memory": memory}
    far = 100.0 * torch.arange(GRID * GRID)[:, None].expand(-1, 448)  # so that k-means finds the pairs
    server.aggregate({0: Update({"memory": far}, 9), 1: Update({"memory": far + 1}, 1)})
    merged = server.known["memory"][:, 0].sort().values
    torch.testing.assert_close(merged, far[:, 0] + 0.5)


def test_the_literal_preset_takes_steps_of_adam_from_a_head_of_each_client(printed):
    task, heads = printed.task, []
    for number in range(2):
        printed.drew_head = False
        printed.context = Context(0, 0, number)
        printed.receive({})
        heads.append(task.head.project.weight.detach().clone())
    assert not torch.equal(*heads)  # Algorithm 4, line 2
    optimizer = printed.configure_optimizers()
    weight = task.head.project.weight
    before, gradient = weight.detach().clone(), torch.randn_like(weight)
    weight.grad = gradient.clone()
    optimizer.step()
    slope = gradient + 5e-4 * before  # weight decay 5e-4 is part of Adam's gradient; rate 1e-3
    torch.testing.assert_close(
        weight.detach(), before - 1e-3 * slope / (slope.abs() + 1e-8), rtol=1e-4, atol=1e-6
    )
