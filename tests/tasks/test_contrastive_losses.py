"""Losses over the projections of views, against loops over pairs of views."""

import math

import numpy as np
import pytest
import torch
from helpers.draws import normals
from helpers.tiny_pyramid import TinyPyramid
from torch import nn

from lit_fedad.core.errors import UserError
from lit_fedad.models.contrastive_views import ContrastiveViews, kept_turns
from lit_fedad.models.encoders import FrozenEncoder
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.contrastive_losses import (
    CRAD,
    CSI,
    CRADCode,
    CrossEntropy,
    Reconstruction,
    SimCLR,
    similarities,
)

TAU = 0.3
NORMAL = torch.tensor([True, False, True, True])


def powers(projections: torch.Tensor) -> dict[tuple, float]:
    """e^{sim / tau} of view v of image i with view w of image j, keyed (v, i, w, j)."""
    z = projections.double().numpy()
    z = z / np.linalg.norm(z, axis=2, keepdims=True)
    places = [(v, i) for v in range(z.shape[0]) for i in range(z.shape[1])]
    return {(*a, *b): math.exp(z[a] @ z[b] / TAU) for a in places for b in places}


def nt_xent(projections: torch.Tensor, skip=lambda v, i, w, j: False) -> float:
    """The mean over all views; views 2k and 2k + 1 attract each other, and pairs to skip do not repel."""
    views, size = projections.shape[:2]
    e, losses = powers(projections), []
    for v in range(views):
        for i in range(size):
            other = v + 1 if v % 2 == 0 else v - 1
            below = sum(
                e[v, i, w, j]
                for w in range(views)
                for j in range(size)
                if (w, j) != (v, i) and not skip(v, i, w, j)
            )
            losses.append(-math.log(e[v, i, other, i] / below))
    return float(np.mean(losses))


class Draws:
    """Draws every image brighter by the number of the call, and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images):
        self.calls += 1
        return images + self.calls


def turned_views(loss, images) -> tuple[list[int], list[int]]:
    """By how many quarters each view of the first image is turned, and the number of its draw (0: not drawn)."""
    draw = Draws()
    turns, numbers = [], []
    for view in loss.views(images, draw):
        number = round(float((view - images).mean()))
        numbers.append(number)
        turns += [
            t for t in range(4) if torch.allclose(view - number, torch.rot90(images, t, (2, 3)), atol=1e-5)
        ]
    assert draw.calls == max(numbers)
    return turns, numbers


@pytest.mark.parametrize(
    ("loss", "turns"),
    [
        (SimCLR(), [0, 0]),
        (CSI(), [0, 0, 1, 1, 2, 2, 3, 3]),
        (CRADCode(), [0, 0, 1, 1, 2, 2, 3, 3]),
        (CRAD(), [0, 0, 1, 1, 2, 2, 3, 3]),
        (CRAD(rotated_views=1), [0, 0, 1, 2, 3]),
        (CrossEntropy(2, 5), [0]),
    ],
)
def test_every_view_is_a_draw_of_its_own(loss, turns):
    found, numbers = turned_views(loss, torch.rand(2, 3, 4, 4))
    assert found == turns
    assert numbers == list(range(1, len(turns) + 1))


def test_reconstruction_looks_at_the_images_themselves():
    images = torch.rand(2, 3, 4, 4)
    loss = Reconstruction(lambda width, size: nn.Identity(), 4, 5)
    assert torch.equal(loss.views(images, Draws()), images[None])


def test_similarities_are_cosines_without_the_diagonal():
    z = normals(2, 3, 5)
    flat = z.double().flatten(0, 1).numpy()
    expected = flat @ flat.T / np.outer(np.linalg.norm(flat, axis=1), np.linalg.norm(flat, axis=1)) / TAU
    np.fill_diagonal(expected, -np.inf)
    np.testing.assert_allclose(similarities(z, TAU).numpy(), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(similarities(z, TAU, 3).numpy(), expected[:3], rtol=1e-4, atol=1e-6)


def test_simclr_is_nt_xent():
    z = normals(2, 4, 5)
    assert float(SimCLR(TAU)(z, {})["loss"]) == pytest.approx(nt_xent(z), rel=1e-5)


def test_csi_takes_every_rotation_for_an_image():
    z = normals(8, 4, 5)
    assert float(CSI(TAU)(z, {})["loss"]) == pytest.approx(nt_xent(z), rel=1e-5)
    # Sixteen instances of two views each.
    instances = z.view(4, 2, 4, 5).transpose(0, 1).reshape(2, 16, 5)
    torch.testing.assert_close(CSI(TAU)(z, {})["loss"], SimCLR(TAU)(instances, {})["loss"])


def crad_by_hand(projections: torch.Tensor, normal: list[bool]) -> float:
    views, size = projections.shape[:2]
    e, losses = powers(projections), []
    for v in (0, 1):
        for i in range(size):
            if not normal[i]:
                continue
            others = [(w, j) for w in range(views) for j in range(size) if (w, j) != (v, i)]
            positive = [(w, j) for w, j in others if w < 2 and normal[j]]
            ratio = sum(e[v, i, w, j] for w, j in positive) / sum(e[v, i, w, j] for w, j in others)
            losses.append(-math.log(ratio) / len(positive))
    return float(np.mean(losses))


@pytest.mark.parametrize("rotated_views", [1, 2])
@pytest.mark.parametrize("normal", [[True] * 4, NORMAL.tolist(), [False, False, True, False]])
def test_crad_is_equation_7_on_the_sets_of_equation_9(rotated_views, normal):
    z = normals(2 + 3 * rotated_views, 4, 5)
    found = CRAD(TAU, rotated_views)(z, {"normal": torch.tensor(normal)})["loss"]
    assert float(found) == pytest.approx(crad_by_hand(z, normal), rel=1e-5)


def test_without_anything_normal_crad_is_zero_with_a_gradient():
    z = normals(8, 3, 5).requires_grad_()
    loss = CRAD(TAU)(z, {"normal": torch.zeros(3, dtype=torch.bool)})["loss"]
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(z.grad, torch.zeros_like(z))


@pytest.mark.parametrize("normal", [NORMAL, torch.tensor([False, True, False, False])])
def test_scale_by_positives_only_multiplies(normal):
    losses, gradients = [], []
    for scaled in (False, True):
        z = normals(8, 4, 5).requires_grad_()
        loss = CRAD(TAU, scale_by_positives=scaled)(z, {"normal": normal})["loss"]
        loss.backward()
        losses.append(loss.detach())
        gradients.append(z.grad)
    positives = 2 * int(normal.sum()) - 1
    torch.testing.assert_close(losses[1], positives * losses[0])
    torch.testing.assert_close(gradients[1], positives * gradients[0])


@pytest.mark.parametrize("normal", [[True] * 4, NORMAL.tolist(), [False] * 4])
def test_crad_code_keeps_normal_images_of_one_rotation_from_repelling(normal):
    z = normals(8, 4, 5)

    def skip(v, i, w, j):
        return v // 2 == w // 2 and i != j and normal[i] and normal[j]

    found = CRADCode(TAU)(z, {"normal": torch.tensor(normal)})["loss"]
    assert float(found) == pytest.approx(TAU / 0.07 * nt_xent(z, skip), rel=1e-5)


def test_cross_entropy_ignores_contaminants():
    torch.manual_seed(0)
    loss, z = CrossEntropy(3, width=5), normals(1, 6, 5).requires_grad_()
    product = torch.tensor([2, 3, 0, 1, 7, 2])
    outputs = loss(z, {"category": product})
    outputs["loss"].backward()
    known = [0, 2, 3, 5]
    with torch.no_grad():
        logits = (z[0] @ loss.linear.weight.T + loss.linear.bias).double().numpy()[known]
    labels = product[known].numpy()
    picked = logits[range(4), labels] - np.log(np.exp(logits).sum(1))
    assert float(outputs["loss"].detach()) == pytest.approx(-picked.mean(), rel=1e-5)
    assert float(outputs["accuracy"]) == np.mean(logits.argmax(1) == labels)
    assert z.grad[0].abs().sum(1).gt(0).tolist() == [True, False, True, True, False, True]


def test_cross_entropy_of_contaminants_alone_is_zero_with_a_gradient():
    z = normals(1, 2, 5).requires_grad_()
    loss = CrossEntropy(3, width=5)(z, {"category": torch.tensor([3, 4])})["loss"]
    loss.backward()
    assert float(loss.detach()) == 0
    assert torch.equal(z.grad, torch.zeros_like(z))


def test_reconstruction_is_the_mean_squared_error():
    built = []

    def decoder(width, size):
        built.append((width, size))
        return nn.Sequential(nn.Linear(width, 3 * size * size), nn.Unflatten(1, (3, size, size)))

    loss = Reconstruction(decoder, image_size=4, width=5)
    assert built == [(5, 4)]
    z, images = normals(1, 6, 5), torch.rand(1, 6, 3, 4, 4)
    with torch.no_grad():
        found = loss(z, {"views": images})["loss"]
        expected = np.mean((loss.decoder(z[0]) - images[0]).double().numpy() ** 2)
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [SimCLR(TAU), CSI(TAU), CRAD(TAU), CRADCode(TAU), CrossEntropy(2, 5)])
def test_a_batch_of_one_image(loss):
    views = len(loss.views(torch.rand(1, 3, 4, 4), Draws()))
    z = normals(views, 1, 5).requires_grad_()
    loss = loss(z, {"normal": torch.tensor([True]), "category": torch.tensor([1])})["loss"]
    loss.backward()
    assert loss.isfinite()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("loss", [SimCLR, CSI, CRAD])
def test_the_base_temperature_scales_loss_and_gradient(loss):
    """tau / base temperature, 7.142857 at 0.5 over 0.07, as released for a learning rate of 0.01."""
    batch = {"normal": NORMAL}
    views = len(loss().turns)
    found = {}
    for base in (None, 0.07):
        z = normals(views, 4, 5).requires_grad_()
        value = loss(0.5, base_temperature=base)(z, batch)["loss"]
        value.backward()
        found[base] = float(value.detach()), z.grad
    assert found[0.07][0] / found[None][0] == pytest.approx(0.5 / 0.07, rel=1e-5)
    torch.testing.assert_close(found[0.07][1], found[None][1] * 0.5 / 0.07, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [SimCLR(), CSI(), CRAD(rotated_views=1), CRADCode(), CrossEntropy(2, 3)])
@pytest.mark.parametrize("views", [5, 10, 13])
def test_known_views_are_of_the_rotations_that_the_loss_wants(loss, views):
    kept = kept_turns(views)
    features = torch.zeros(6, views, 3)  # images, views, channels: rotation, image, place
    features[..., 0] = torch.tensor(kept)
    features[..., 1] = torch.arange(6).view(6, 1)
    features[..., 2] = torch.arange(views)
    found = loss.drawn_views(features)
    assert found.shape == (len(loss.turns), 6, 3)
    assert torch.equal(found[..., 0], torch.tensor(loss.turns)[:, None].expand(-1, 6).float())
    assert torch.equal(found[..., 1], torch.arange(6.0).expand(len(loss.turns), -1))
    for turn in set(loss.turns):  # twice the same only where there are too few
        places = found[[i for i, t in enumerate(loss.turns) if t == turn], :, 2]
        distinct = min(len(places), kept.count(turn))
        assert all(len(set(image.tolist())) == distinct for image in places.T)


def test_known_views_are_kept_in_half_precision_and_looked_at_in_single():
    features = normals(4, 5, 3).half()
    found = CrossEntropy(2, 3).drawn_views(features)
    assert found.dtype == torch.float32
    assert all(float((features[i].float() - view).abs().sum(1).min()) == 0 for i, view in enumerate(found[0]))


def test_known_views_differ_from_draw_to_draw():
    features = normals(8, 10, 2)
    torch.manual_seed(0)
    first, second = SimCLR().drawn_views(features), SimCLR().drawn_views(features)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(SimCLR().drawn_views(features), first)


def test_reconstruction_needs_pixels():
    """It is refused when the task is made, not after a warm-up."""
    loss = Reconstruction(lambda width, size: nn.Linear(width, size), 8, 4)
    encoder = FrozenEncoder(TinyPyramid(), size=32, hidden=4)
    with pytest.raises(UserError, match="features are no images"):
        Contrastive(encoder, loss, SimCLR(), 1, 2, views=ContrastiveViews())
