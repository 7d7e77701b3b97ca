"""EfficientAD: loss, scores and quantiles against NumPy."""

import numpy as np
import pytest
import torch
from helpers.tiny_pyramid import TinyPyramid

from lit_fedad.contracts import Context
from lit_fedad.tasks.efficient_ad import EfficientAD


def make(**settings):
    torch.manual_seed(0)
    given = {"width": 6, "latent": 4, "hard": 0.8}
    task = EfficientAD(TinyPyramid(), grid=4, image_size=32, **{**given, **settings})
    draw = torch.Generator().manual_seed(1)
    task.load_statistics(torch.rand(8, generator=draw), 0.5 + torch.rand(8, generator=draw))
    return task.eval()  # without dropout


def images(number=3, seed=2):
    return {"image": torch.rand(number, 3, 32, 32, generator=torch.Generator().manual_seed(seed))}


def parts(task, image):
    """Teacher, both halves of the student, and the autoencoder: [n, positions, channels], float64."""
    with torch.no_grad():
        teacher = (task.embed({"image": image}) - task.mean) / task.scale
        outputs, rebuilt = task({"image": image}), task.autoencoder(image)
    return [x.double().numpy() for x in (teacher, outputs[..., :8], outputs[..., 8:], rebuilt)]


def test_the_loss_is_that_of_the_paper():
    task, batch = make(), images()
    torch.manual_seed(5)
    view = task.view(batch)
    assert not torch.equal(view["changed"], batch["image"])
    teacher, student, _, _ = parts(task, batch["image"])
    errors = np.sort(((teacher - student) ** 2).ravel())
    hard = errors[int(0.8 * len(errors)) :].mean()
    target, _, imitated, rebuilt = parts(task, view["changed"])
    expected = hard + ((target - rebuilt) ** 2).mean() + ((rebuilt - imitated) ** 2).mean()
    torch.manual_seed(5)
    assert task.training_step(batch)["loss"].item() == pytest.approx(expected, rel=1e-4)


def test_maps_are_scaled_by_quantiles_of_normal_images():
    task, batch, normal = make(low=0.6, high=0.8), images(), images(5, seed=3)
    task.refresh([normal], Context(seed=0, round=1))

    def errors(image):
        teacher, student, imitated, rebuilt = parts(task, image)
        return ((teacher - student) ** 2).mean(2), ((rebuilt - imitated) ** 2).mean(2)

    expected = 0.0
    for own, seen in zip(errors(batch["image"]), errors(normal["image"]), strict=True):
        ordered = np.sort(seen.ravel())
        low, high = (ordered[int(share * len(ordered))] for share in (0.6, 0.8))
        expected += 0.5 * 0.1 * (own - low) / (high - low)
    found = task.predict_step(batch)
    drawn = task.draw(torch.from_numpy(expected).float().flatten())
    torch.testing.assert_close(found.anomaly_map, drawn, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.image_score, drawn.flatten(1).amax(1), rtol=1e-3, atol=1e-3)


def test_image_scores_leave_out_the_rim_and_average_the_highest_pixels():
    task = make(rim=1, top=0.5)
    errors = torch.rand(2, 16, 2, generator=torch.Generator().manual_seed(4))
    found = task.predict(errors, images(2))  # quantiles are 0 and 1: a tenth of the mean of both errors
    inner = torch.zeros(2, 4, 4)
    inner[:, 1:3, 1:3] = 0.1 * errors.mean(2).view(2, 4, 4)[:, 1:3, 1:3]
    pixels = np.sort(task.draw_map(inner).flatten(1).numpy())[:, 32 * 32 // 2 :]
    np.testing.assert_allclose(found.image_score, pixels.mean(1), rtol=1e-5)


def test_the_teacher_is_standardised_by_local_images_unless_statistics_were_loaded():
    task, normal = (
        EfficientAD(TinyPyramid(), grid=4, image_size=32, width=6, latent=4).eval(),
        images(5, seed=3),
    )
    task.refresh([normal], Context(seed=0, round=1))
    features = task.embed(normal).flatten(0, 1)
    torch.testing.assert_close(task.mean, features.mean(0))
    torch.testing.assert_close(task.scale, features.std(0, correction=0), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("size", "grid"), [(32, 4), (64, 4), (64, 16), ((64, 32), 8)])
def test_images_pass_one_vector_and_the_student_computes_no_more_positions_than_the_grid(size, grid):
    task = EfficientAD(TinyPyramid(), grid=grid, image_size=size, width=6, latent=4).eval()
    pictures = torch.rand(2, 3, *task.size)
    assert task.autoencoder.encode(pictures).shape == (2, 4, 1, 1)
    assert task.autoencoder(pictures).shape == (2, task.vectors_per_image, 8)
    maps = task.student(pictures)
    assert all(abs(found - side) <= 1 for found, side in zip(maps.shape[2:], task.grid, strict=True))
    if maps.shape[2:] == task.grid:
        assert torch.equal(task({"image": pictures})[:, 1], maps[:, :, 0, 1])


def test_the_autoencoder_sees_other_brightness_contrast_or_saturation():
    """Each image is moved away from black, its mean grey or its grey version, by a factor from 0.8 to 1.2."""
    task, drawn = make(), 0.3 + 0.4 * images(40)["image"].double().numpy()  # nothing is clipped
    mean, std = (np.array(x)[:, None, None] for x in (task.backbone.mean, task.backbone.std))
    torch.manual_seed(0)
    changed = task.view({"image": torch.from_numpy((drawn - mean) / std).float()})["changed"]
    grey = np.tensordot(drawn, [0.299, 0.587, 0.114], axes=([1], [0]))[:, None]
    anchors = (np.zeros_like(drawn), grey.mean((2, 3), keepdims=True) + 0 * drawn, grey + 0 * drawn)
    kinds = []
    for image, found in enumerate(changed.double().numpy() * std + mean):
        errors = []
        for anchor in anchors:
            away, moved = drawn[image] - anchor[image], found - anchor[image]
            factor = (moved * away).sum() / (away * away).sum()
            errors.append(np.abs(moved - factor * away).max() if 0.8 <= factor <= 1.2 else np.inf)
        assert min(errors) < 1e-3
        kinds.append(int(np.argmin(errors)))
    assert set(kinds) == {0, 1, 2}


def test_a_first_step_is_adams_on_student_and_autoencoder():
    """Adam's first step is ``-lr g / (|g| + eps)``, with the decay in g."""
    task, batch = make(learning_rate=1e-3, weight_decay=0.1).train(), images()
    optimizer = task.configure_optimizers()
    before = {name: p.detach().clone() for name, p in task.named_parameters()}
    task.training_step(batch)["loss"].backward()
    optimizer.step()
    moved = {name.split(".")[0] for name, p in task.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"student", "autoencoder"}
    for name in ("student.0.weight", "autoencoder.output.2.weight"):
        weight = task.get_parameter(name)
        gradient = weight.grad + 0.1 * before[name]
        expected = -1e-3 * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(weight.detach() - before[name], expected, rtol=1e-2, atol=1e-6)
