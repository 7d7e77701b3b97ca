"""The classifier: its step, its scores, its configurations, and its life under a plain Trainer."""

import numpy as np
import pytest
import torch
from helpers.trainers import plain_trainer
from torch.utils.data import DataLoader

from lit_fedad.contracts.task import learned_state
from lit_fedad.core.building import build
from lit_fedad.core.config import compose
from lit_fedad.models.convnets import ConvNet, ResNetCifar
from lit_fedad.tasks.classifier import Classifier, crop_and_flip


def make(classes: int = 3, seed: int = 0, **overrides) -> Classifier:
    torch.manual_seed(seed)
    return Classifier(ConvNet(image_size=16, channels=16), classes, **overrides)


def coloured_images(count: int = 25, size: int = 16) -> DataLoader:
    """Noise in whose class's colour channel the mean is shifted; the last batch holds one image."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, size, size, generator=draw)
    labels = torch.arange(count) % 3
    images[torch.arange(count), labels] += 1
    data = [{"image": image, "label": label} for image, label in zip(images, labels, strict=True)]
    return DataLoader(data, batch_size=8)


@torch.no_grad()
def test_objective_is_the_cross_entropy():
    task = make()
    features, labels = torch.randn(5, task.num_features), torch.tensor([0, 1, 2, 0, 1])
    logits = (features @ task.classifier.weight.T + task.classifier.bias).double()
    probabilities = logits.exp() / logits.exp().sum(1, keepdim=True)
    outputs = task.objective(features, {"label": labels})
    assert outputs["loss"].item() == pytest.approx(
        float(-probabilities[range(5), labels].log().mean()), rel=1e-5
    )
    assert float(outputs["accuracy"]) == pytest.approx(
        float((probabilities.argmax(1) == labels).double().mean())
    )


def test_prediction_is_the_logits_and_their_uncertainty():
    task = make().eval()
    batch = next(iter(coloured_images()))
    with torch.no_grad():
        prediction = task.predict_step(batch)
        logits = task.classifier(task.encoder(batch["image"]))
    torch.testing.assert_close(prediction.logits, logits)
    torch.testing.assert_close(prediction.image_score, 1 - (logits - logits.logsumexp(1, True)).exp().amax(1))
    assert prediction.anomaly_map is None


def test_only_training_looks_at_augmented_images():
    task, batch = make(), next(iter(coloured_images()))
    views = []
    task.encoder.register_forward_pre_hook(lambda module, inputs: views.append(inputs[0]))
    task.training_step(batch)
    task.predict_step(batch)
    assert not torch.equal(views[0], batch["image"])
    assert torch.equal(views[1], batch["image"])
    assert torch.equal(task.view(batch)["label"], batch["label"])
    assert make(augment=False).view(batch) is batch


def test_crops_are_all_shifts_up_to_the_padding_and_half_of_them_are_mirrored():
    image = np.arange(1, 41, dtype=np.float32).reshape(2, 5, 4)
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1)))
    crops = [padded[:, top : top + 5, left : left + 4] for top in range(3) for left in range(3)]
    numbers = {crop[..., ::turn].tobytes(): (turn, n) for n, crop in enumerate(crops) for turn in (1, -1)}
    torch.manual_seed(0)
    views = crop_and_flip(torch.from_numpy(image).expand(600, -1, -1, -1), padding=1)
    found = [numbers[view.numpy().tobytes()] for view in views]
    assert set(found) == set(numbers.values())
    assert sum(turn == -1 for turn, _ in found) == pytest.approx(300, abs=60)  # five deviations


def test_training_images_are_shifted_by_up_to_an_eighth_of_the_side():
    views = make().view({"image": torch.ones(200, 1, 16, 16)})["image"]
    assert int((views == 0).all(3).sum(2).max()) == int((views == 0).all(2).sum(2).max()) == 2


def test_features_and_head_make_up_the_state():
    task, other = make(), make(seed=1)
    batch = next(iter(coloured_images()))
    task.training_step(batch)  # moves running statistics
    other.load_state_dict(task.state_dict())
    expected, actual = task.eval().predict_step(batch), other.eval().predict_step(batch)
    assert torch.equal(expected.logits, actual.logits)
    heads = tuple(f"{name}." for name in task.output_modules)
    rest = {name for name in learned_state(task) if not name.startswith(heads)}
    assert rest == {name for name in task.state_dict() if name.startswith("encoder.")}
    assert set(learned_state(task)) - rest == {"classifier.weight", "classifier.bias"}


def test_a_step_on_one_image_is_finite_and_leaves_running_statistics_alone():
    torch.manual_seed(0)
    task = Classifier(ResNetCifar(18), classes=2)
    before = {name: buffer.clone() for name, buffer in task.named_buffers()}
    task.training_step({"image": torch.randn(1, 3, 32, 32), "label": torch.tensor([1])})["loss"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in task.parameters())
    assert all(torch.equal(buffer, before[name]) for name, buffer in task.named_buffers())


def test_learns_under_a_plain_trainer():
    task, loader = make(augment=False), coloured_images()

    def loss_and_accuracy() -> tuple[float, float]:
        predictions = plain_trainer(1).predict(task, loader)
        logits = torch.cat([prediction.logits for prediction in predictions])
        labels = torch.cat([batch["label"] for batch in loader])
        right = (logits.argmax(1) == labels).float().mean()
        return float(torch.nn.functional.cross_entropy(logits, labels)), float(right)

    before, _ = loss_and_accuracy()
    plain_trainer(8).fit(task, loader)
    after, accuracy = loss_and_accuracy()
    assert after < before / 2
    assert accuracy == 1


@pytest.mark.parametrize(
    ("option", "classes", "parameters"),
    [
        ("classifier", 10, 11_168_832 + 5_130),
        ("classifier_resnet34", 10, 21_276_992 + 5_130),
        ("classifier_convnet", 9, 317_961),
        ("classifier_convnet image.channels=1", 9, 317_961 - 2 * 9 * 128),
        # FedVCK's ResNet-18 for OrganC: 1.12e7
        ("classifier_resnet18_224 image.channels=1", 11, 11_176_512 - 2 * 49 * 64 + 5_643),
    ],
)
def test_configurations(option, classes, parameters):
    config = compose(["method=fedavg", *f"task={option}".split(), "~backbone", "image.size=28"])
    task = build(config["task"], classes=classes)
    assert task.kind == "classification"
    assert sum(parameter.numel() for parameter in task.parameters()) == parameters
    optimizer = task.configure_optimizers()
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.01, 0.9)
    assert optimizer.defaults["weight_decay"] == 1e-4
