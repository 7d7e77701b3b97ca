"""The subspace under differential privacy: what an image adds, the three sums, resumed runs, an audit by canaries."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid
from scipy.stats import binom
from torch import nn
from torch.utils.data import DataLoader

from lit_fedad.audits.statistics import sum_products
from lit_fedad.contracts import Context, Update
from lit_fedad.contracts.sums import HiddenByNoiseError
from lit_fedad.contracts.task import channel_scale
from lit_fedad.core.errors import UserError
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.memory.moments import symmetric
from lit_fedad.methods.federated_subspace import FederatedSubspaceClient, FederatedSubspaceServer
from lit_fedad.methods.parts.noised_subspace import (
    ImageMeans,
    ImageProducts,
    Projected,
    _moments,
    public_frame,
    weight_of,
    whitener,
    without_negative,
)
from lit_fedad.models.scenes import Scenes
from lit_fedad.privacy.image_privacy import ImagePrivacy, Plan, mu_of
from lit_fedad.privacy.noised_sums import Noised, clipped_sum, gaussian
from lit_fedad.privacy.secure_aggregation import SecureSum
from lit_fedad.tasks.subspace import Subspace

KEY = b"secret".ljust(32)


def subspace(backbone=None, **changes):
    torch.manual_seed(0)
    return Subspace(backbone or TinyPyramid(), **{"grid": 4, "image_size": 32, "share": 0.9, **changes})


def play(federate, data, rounds=0, epsilon=1e4, folder=None, secure_sum=None, task=None, **privacy):
    return federate(
        FederatedSubspaceClient,
        FederatedSubspaceServer,
        task=task or subspace(),
        data=data,
        rounds=rounds,
        folder=folder,
        secure_sum=secure_sum,
        sampler=ClientSampler(on_failure="skip"),
        privacy=ImagePrivacy(epsilon=epsilon, **privacy),
        noise_key=KEY,
    )


@pytest.fixture
def data(make_loader):
    return {client: make_loader(size, client) for client, size in enumerate((6, 5, 9))}


def patches(task, data):
    """Features by image [n, P, C], float64."""
    return torch.cat([task.embed(batch) for loader in data.values() for batch in loader]).double()


def looking(task, directions, frame):
    """A client that looks along so many directions of a frame."""
    return SimpleNamespace(task=task, directions=directions, frame=frame)


def public(task, directions):
    centre, frame = public_frame(task, directions)
    return {"centre": centre.float(), "frame": frame.float()}


def test_the_public_frame_has_uncorrelated_directions_in_which_usual_features_have_length_one():
    task = subspace()
    moments = _moments(task)
    frame = public_frame(task, 5)[1]
    covariance = frame.T @ moments.covariance @ frame
    variances = covariance.diagonal()
    assert float(variances.sum()) == pytest.approx(1)
    assert variances.tolist() == sorted(variances.tolist(), reverse=True)
    torch.testing.assert_close(covariance, variances.diag(), rtol=0, atol=1e-9)
    # All are directions of scaled features; those of the most variance are kept.
    scale = channel_scale(moments.variance, 1.0)
    largest = torch.linalg.eigvalsh(moments.scaled(scale).covariance).flip(0)[:5]
    torch.testing.assert_close(variances, largest / largest.sum())


def test_the_public_frame_is_that_of_drawn_scenes():
    task = subspace()
    scenes = Scenes(size=32, scenes=128, textures=48).views(0)[0]
    mean, std = (torch.tensor(values)[:, None, None] for values in (task.backbone.mean, task.backbone.std))
    rows = task.embed({"image": (scenes - mean) / std}).flatten(0, 1).double()
    centre, frame = public_frame(task, 5)
    torch.testing.assert_close(centre, rows.mean(0), rtol=1e-4, atol=1e-5)
    covariance = ((rows - rows.mean(0)) @ frame).T @ ((rows - rows.mean(0)) @ frame) / len(rows)
    torch.testing.assert_close(covariance, covariance.diagonal().diag(), rtol=0, atol=1e-4)
    assert float(covariance.trace()) == pytest.approx(1, rel=1e-4)


def test_scenes_go_where_the_backbone_is_which_may_be_on_the_gpu_before_the_rest_of_the_task(monkeypatch):
    task, seen = subspace(), set()
    task.backbone.to("meta")

    def embed(batch):
        seen.add(batch["image"].device.type)
        return torch.zeros(len(batch["image"]), 1, task.num_features)

    monkeypatch.setattr(task, "embed", embed)
    _moments(task)
    assert seen == {"meta"}


def test_every_image_adds_its_mean_or_products_at_length_one(data):
    task = subspace()
    frame = public(task, 4)
    projected = (patches(task, data) - frame["centre"].double()) @ frame["frame"].double()
    loader = DataLoader([row for held in data.values() for row in held.dataset], batch_size=3)
    means = torch.cat([torch.full((20, 1), 0.5, dtype=torch.float64), projected.mean(1)], dim=1)
    expected = (means / means.norm(dim=1, keepdim=True)).sum(0)
    found = clipped_sum(ImageMeans(looking(task, 4, frame)), loader, 1.0)
    torch.testing.assert_close(torch.cat([found["weight"], found["mean"]]), expected, rtol=1e-4, atol=1e-4)
    sums = ImageProducts(looking(task, 4, frame))
    products = torch.stack([one.T @ one for one in projected])
    expected = sum(one / one.norm() for one in products)
    joined = sums.from_sums(None, clipped_sum(sums, loader, 1.0), 0.0)
    torch.testing.assert_close(joined["product"], expected, rtol=1e-4, atol=1e-4)


def test_products_are_unpacked_with_half_the_variance_beside_the_diagonal():
    sums = ImageProducts(looking(subspace(), 60, {}))
    noise = gaussian(KEY, Context(0, 0), sums.shapes(), 1.0)["product"]
    # Far above the noise, so that nothing is negative or hidden.
    mean = torch.eye(60, dtype=torch.float64)[*torch.triu_indices(60, 60)] * 1e3
    found = sums.from_sums(None, {"product": mean + noise}, 1.0)
    assert float(found["noise"]) == pytest.approx(math.sqrt(120))
    matrix = found["product"] - 1e3 * torch.eye(60)
    torch.testing.assert_close(matrix.diagonal(), symmetric(noise, 60).diagonal(), rtol=1e-9, atol=1e-9)
    beside = matrix[*torch.triu_indices(60, 60, 1)]
    assert float(beside.var()) == pytest.approx(0.5, abs=0.14)  # eight deviations of 1,770 draws


@pytest.mark.parametrize("kind", [ImageMeans, ImageProducts])
@pytest.mark.parametrize("factor", [0.0, 1.0, 1e6, -1e6])
def test_one_image_changes_the_sum_by_at_most_the_clip(kind, factor):
    draw = torch.Generator().manual_seed(0)
    images = [{"image": torch.randn(3, 32, 32, generator=draw)} for _ in range(4)]
    more = [*images[:2], {"image": factor * torch.randn(3, 32, 32, generator=draw)}, *images[2:]]
    task = subspace()
    sums = kind(looking(task, 6, public(task, 6)))
    one, other = (clipped_sum(sums, DataLoader(held, batch_size=2), 0.5) for held in (images, more))
    change = math.sqrt(sum(float((one[name] - other[name]).square().sum()) for name in one))
    assert change == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("kind", [ImageMeans, ImageProducts])
def test_no_refusal_tells_that_an_image_overflows_what_the_server_has_sent(kind):
    """A frame so long that one image's products are infinite, and those of others are not."""
    draw = torch.Generator().manual_seed(0)
    images = [{"image": torch.randn(3, 32, 32, generator=draw)} for _ in range(4)]
    task = subspace()
    frame = public(task, 6)
    frame["frame"] *= 1e34 if kind is ImageMeans else 1e15
    sums, more = kind(looking(task, 6, frame)), [*images, {"image": torch.full((3, 32, 32), 1e6)}]
    one, other = (clipped_sum(sums, DataLoader(held, batch_size=5), 0.5) for held in (images, more))
    assert all(one[name].any() and one[name].equal(other[name]) for name in one)


def test_an_infinite_budget_is_the_plain_run(federate, data):
    plain = federate(FederatedSubspaceClient, FederatedSubspaceServer, task=subspace(), data=data, rounds=1)
    endless = play(federate, data, rounds=1, epsilon=None)
    assert endless.privacy is None
    for name, entry in plain.server.broadcast(0).items():
        assert endless.server.broadcast(0)[name].equal(entry)


def test_the_released_sum_is_attacked_by_its_product_with_what_an_image_adds(data):
    task = subspace()
    client = FederatedSubspaceClient(task, noised_directions=4)
    client.frame = public(task, 4)
    plan = Plan(ImagePrivacy(epsilon=1.0), sigma=2.0, releases=3)
    exchange = Noised(Projected("spread", ImageProducts), client, plan.noise, KEY)
    server = SimpleNamespace(context=Context(0, 0, exchange=1))
    updates = {c: Update(exchange.send(client, loader), 20) for c, loader in data.items()}
    noise = gaussian(KEY, server.context, ImageProducts(looking(task, 4, {})).shapes(), 2.0 * 0.5)["product"]
    plain = sum(update.message["product"] for update in updates.values())
    released = exchange.released(server, updates)
    torch.testing.assert_close(released["product"], plain + noise)
    # Each image adds a vector of length 1/2: half its products, of length 1.
    (batch,) = DataLoader(data[0].dataset, batch_size=6)
    own = (patches(task, {0: [batch]}) - client.frame["centre"].double()) @ client.frame["frame"].double()
    added = torch.stack([one.T @ one / (2 * (one.T @ one).norm()) for one in own])
    whole = symmetric(released["product"], 4) / math.sqrt(2)
    whole += whole.diag().diag() * (math.sqrt(2) - 1)
    found = sum_products(exchange.sums.by_image(client), exchange.noise.clip, batch, released)
    torch.testing.assert_close(found[:, 0], (added * whole).sum((1, 2)), rtol=1e-4, atol=1e-4)


def expected_subspace(task, data, directions, share):
    """The subspace of three sums without noise: centre in the frame's coordinates, and the projection outside it."""
    centre, frame = public_frame(task, directions)
    projected = (patches(task, data) - centre) @ frame
    weights = 1 / (projected.mean(1).square().sum(1) + 0.25).sqrt()
    mean = (weights[:, None] * projected.mean(1)).sum(0) / weights.sum()
    centred = projected - mean

    def products(rows):
        held = torch.stack([one.T @ one for one in rows])
        return (held / held.flatten(1).norm(dim=1)[:, None, None]).sum(0)

    first = products(centred)
    variances, axes = torch.linalg.eigh(first)
    rescaling = axes @ (variances.clamp(min=0) + 1e-4 * variances.mean()).rsqrt().diag() @ axes.T
    back = torch.linalg.inv(rescaling)
    variances, axes = torch.linalg.eigh(back @ products(centred @ rescaling) @ back)
    held = variances.flip(0).cumsum(0)
    outside = axes[:, : directions - 1 - int((held < share * held[-1]).sum())]
    return mean, frame, outside @ outside.T


@pytest.mark.parametrize("secure", [False, True])
def test_a_large_budget_gives_the_subspace_of_three_sums(federate, data, secure):
    given = {"where": "distributed", "secure_sum": SecureSum()} if secure else {}
    found = play(federate, data, epsilon=1e14, **given)
    mean, frame, outside = expected_subspace(subspace(), data, 8, 0.95)
    centre, basis = (found.server.subspace[name][0].double() for name in ("centre", "basis"))
    torch.testing.assert_close((centre - public_frame(subspace(), 8)[0]) @ frame, mean, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(basis @ basis.T, frame @ outside @ frame.T, rtol=0.01, atol=0.01)
    assert found.privacy["sums"] == 3
    assert found.server.diagnostics()["dimensions"] == 8 - basis.shape[1]


def test_fewer_directions_leave_the_others_out_of_scores(federate, data):
    found = federate(
        FederatedSubspaceClient,
        FederatedSubspaceServer,
        task=subspace(),
        data=data,
        rounds=0,
        privacy=ImagePrivacy(epsilon=1e9),
        noise_key=KEY,
        client={"noised_directions": 3},
    )
    directions = public_frame(subspace(), 3)[1].float()
    basis = found.server.subspace["basis"][0]
    beside = basis - directions @ torch.linalg.lstsq(directions, basis).solution
    assert float(beside.abs().max()) < 1e-4 * float(basis.abs().max())
    assert basis.shape[1] < 3


def test_rounds_bring_no_further_sum_and_cost_nothing(federate, data):
    found = play(federate, data, rounds=2, epsilon=1e3)
    assert [report.noised_sums for report in found.history] == [1, 1, 1, 0, 0]
    assert [sum(report.elements_up.values()) > 0 for report in found.history] == [True] * 3 + [False] * 2
    assert found.privacy["epsilon"] == pytest.approx(1e3, rel=1e-6)
    assert found.privacy["noise"] == pytest.approx(math.sqrt(3) / mu_of(1e3, 1e-5), rel=1e-6)


def test_a_resumed_run_keeps_what_was_spent_and_replays_the_same_noise(federate, data):
    first = play(federate, data, rounds=1, folder="one")
    again = play(federate, data, rounds=1, folder="two")
    assert again.server.subspace["basis"].equal(first.server.subspace["basis"])
    resumed = play(federate, data, rounds=1, folder="one")
    assert resumed.privacy == first.privacy
    assert resumed.released == 3
    assert resumed.server.subspace["basis"].equal(first.server.subspace["basis"])


def test_a_round_that_would_overdraw_is_not_played(federate, data):
    played = play(federate, data, rounds=1, epsilon=1e4)
    played.history[0].noised_sums = 7  # as of a run that has spent more than this one plans
    with pytest.raises(UserError, match="round 0 needs epsilon .* and the budget is 10000"):
        played.play(0)


def test_what_folds_and_noise_forbid_is_refused_in_one_line(federate, data):
    with pytest.raises(
        UserError, match="exchange 'moments' of FederatedSubspaceClient is no sum over images"
    ):
        play(federate, data, task=subspace(share="likelihood"))
    with pytest.raises(UserError, match="hides the images"):
        play(federate, data, epsilon=0.01)
    with pytest.raises(UserError, match=r"method\.client\.noised_directions"):
        FederatedSubspaceClient(subspace(), noised_directions=1)


def test_a_weight_of_up_to_three_deviations_of_the_noise_is_hidden_by_it():
    assert weight_of({"weight": torch.tensor(3.25)}, 1.0) == 3.25
    with pytest.raises(HiddenByNoiseError, match="give more images or a larger epsilon \\("):
        weight_of({"weight": torch.tensor(3.0)}, 1.0)


def test_products_whose_largest_variance_noise_alone_would_have_are_hidden_by_it():
    sums, found = ImageProducts(looking(subspace(), 2, {})), torch.tensor([3.0, 0.0, 1.0]).double()
    assert float(sums.from_sums(None, {"product": found}, 1.45)["noise"]) == pytest.approx(2.9)
    with pytest.raises(HiddenByNoiseError):
        sums.from_sums(None, {"product": found}, 1.55)


def test_whitened_directions_have_equal_variances_up_to_what_is_added():
    """A ridge of a half of the mean variance, 0.2, and three tenths of the noise."""
    results = {"product": torch.tensor([0.3, 0.1]).double().diag(), "noise": torch.tensor(1.0)}
    expected = torch.tensor([0.3 + 0.1 + 0.3, 0.1 + 0.1 + 0.3]).double().rsqrt().diag()
    torch.testing.assert_close(whitener(results, 0.5), expected)


def test_what_noise_made_negative_is_taken_for_no_variance():
    draw = torch.Generator().manual_seed(0)
    noisy = torch.randn(20, 20, generator=draw, dtype=torch.float64)
    noisy = noisy + noisy.T
    found = without_negative(noisy)
    assert float(torch.linalg.eigvalsh(found).min()) > -1e-9
    # The nearest such matrix: what is missing is orthogonal to it, and has no positive direction.
    assert abs(float((found * (noisy - found)).sum())) < 1e-9
    assert float(torch.linalg.eigvalsh(noisy - found).max()) < 1e-9


class Projection(nn.Module):
    """One vector of 48 channels an image: a fixed projection of its pixels."""

    channels, fingerprint = (48,), "projection"
    mean, std = TinyPyramid.mean, TinyPyramid.std

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.register_buffer("matrix", torch.randn(3 * 8 * 8, 48, generator=draw) / 14)

    def forward(self, images):
        return [(images.flatten(1) @ self.matrix)[:, :, None, None]]


def audited_epsilon(canaries, guesses, correct, delta, confidence=0.95):
    """The largest epsilon that so many correct guesses refute (Steinke et al., NeurIPS 2023, Theorem 5.2)."""

    def p_value(epsilon):
        rate = 1 / (1 + math.exp(-epsilon))
        worst = total = 0.0
        for fewer in range(1, correct + 1):
            total += binom.pmf(correct - fewer, guesses, rate)
            worst = max(worst, total / fewer)
        return binom.sf(correct - 1, guesses, rate) + 2 * canaries * delta * worst

    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) < 1 - confidence else (low, middle)
    return low


@pytest.mark.slow
def test_canaries_in_one_run_refute_no_smaller_epsilon_than_was_stated():
    epsilon, delta, clip, canaries = 4.0, 1e-5, 0.5, 400
    draw = torch.Generator().manual_seed(2)
    # Extreme images in directions of their own: each is clipped, and adds the most that is allowed.
    images = 1e3 * torch.randn(canaries, 3, 8, 8, generator=draw)
    inside = torch.rand(canaries, generator=draw) < 0.5
    honest = torch.randn(50, 3, 8, 8, generator=draw)
    task = subspace(Projection(), grid=1, image_size=8, rim=0, average_pool=False)
    sums = ImageProducts(looking(task, 48, {"centre": torch.zeros(48), "frame": torch.eye(48)}))

    def vectors(held):
        """What each image adds, clipped [n, sizes]."""
        loader = DataLoader([{"image": image} for image in held], batch_size=50)
        rows = [torch.cat([p[n].flatten(1) for n in sorted(p)], dim=1) for p in sums.per_image(loader)]
        return torch.cat([row * (clip / row.norm(dim=1, keepdim=True)).clamp(max=1) for row in rows])

    def bound(sigma, guesses):
        noise = gaussian(KEY, Context(0, 0), sums.shapes(), sigma * clip)
        released = exact + torch.cat([noise[name].flatten() for name in sorted(noise)])
        # The best linear guess of who is inside, by an attacker who knows every image.
        unknown = own @ (released - known - own.sum(0) / 2)
        scores = torch.linalg.solve(own @ own.T + 4 * (sigma * clip) ** 2 * torch.eye(canaries), unknown)
        order, half = scores.argsort(descending=True), guesses // 2
        correct = int(inside[order[:half]].sum() + (~inside[order[-half:]]).sum())
        return audited_epsilon(canaries, guesses, correct, delta)

    own, known = vectors(images), vectors(honest).sum(0)
    assert torch.allclose(own.norm(dim=1), torch.tensor(clip, dtype=torch.float64))
    held = [{"image": image} for image in torch.cat([honest, images[inside]])]
    total = clipped_sum(sums, DataLoader(held, batch_size=50), clip)
    exact = torch.cat([total[name].flatten() for name in sorted(total)])
    sigma = 1 / mu_of(epsilon, delta)
    assert 0.2 < bound(sigma, guesses=200) < epsilon
    assert bound(sigma / 50, guesses=340) > epsilon  # the control: with a fiftieth of the noise it is caught
