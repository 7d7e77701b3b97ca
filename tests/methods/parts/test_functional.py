"""A task with other weights in its place."""

import pytest
import torch
from helpers.frozen import frozen_encoder

from lit_fedad.methods.parts.functional import copied, evaluating, pooled, trainable, with_weights
from lit_fedad.tasks.classifier import Classifier


@pytest.fixture
def batch(make_points):
    return next(iter(make_points(6, batch_size=6)))


@pytest.fixture
def others(make_classifier):
    """Trainable weights of another initialisation."""
    return {name: p.detach().clone().requires_grad_() for name, p in trainable(make_classifier(1)).items()}


def state_of(task):
    return {name: entry.clone() for name, entry in task.state_dict().items()}


def test_the_task_behaves_as_one_that_has_these_weights(make_classifier, batch, others):
    task, other = make_classifier(0).eval(), make_classifier(1).eval()
    other.backbone = task.backbone
    actual = with_weights(task, others, lambda task: task.predict_step(batch).logits)
    assert torch.equal(actual, other.predict_step(batch).logits)
    assert not torch.equal(actual, task.predict_step(batch).logits)


def test_entries_that_are_not_given_stay(make_classifier, batch):
    task = make_classifier().eval()
    zero = {name: torch.zeros_like(p) for name, p in task.named_parameters() if name.startswith("classifier")}
    assert not with_weights(task, zero, lambda task: task.predict_step(batch).logits).any()
    assert torch.equal(with_weights(task, zero, lambda task: task(batch)), task(batch))


def test_gradients_reach_the_weights_given_and_no_others(make_classifier, batch, others):
    task = make_classifier()
    with_weights(task, others, lambda task: task.training_step(batch)["loss"]).backward()
    assert all(weight.grad is not None for weight in others.values())
    assert all(parameter.grad is None for parameter in task.parameters())


def test_gradients_are_those_of_a_task_that_has_these_weights(make_classifier, batch, others):
    task, other = make_classifier(0), make_classifier(1)
    other.backbone = task.backbone
    with_weights(task, others, lambda task: task.training_step(batch)["loss"]).backward()
    other.training_step(batch)["loss"].backward()
    for name, parameter in trainable(other).items():
        assert torch.equal(others[name].grad, parameter.grad)


def test_the_tasks_own_weights_come_back_even_after_an_error(make_classifier, others, exactly):
    task = make_classifier()
    before, identities = state_of(task), [id(p) for p in task.parameters()]

    def fail(task):
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        with_weights(task, others, fail)
    exactly(state_of(task), before)
    assert [id(p) for p in task.parameters()] == identities


def test_buffers_can_be_put_in_place_too(make_classifier, batch):
    task = make_classifier().eval()
    statistics = {"downsample.1.running_mean": torch.full((3,), 2.0)}
    expected = make_classifier().eval()
    expected.load_state_dict(statistics, strict=False)
    assert torch.equal(with_weights(task, statistics, lambda task: task(batch)), expected(batch))
    assert not task.downsample[1].running_mean.any()


def test_evaluating_uses_and_leaves_running_statistics(make_classifier, batch, exactly):
    task = make_classifier().train()
    before = state_of(task)
    with evaluating(task):
        features = task(batch)
    assert torch.equal(features, make_classifier().eval()(batch))
    exactly(state_of(task), before)


@pytest.mark.parametrize("training", [True, False])
def test_evaluating_ends_with_the_mode_it_found(make_classifier, training):
    task = make_classifier().train(training)
    with evaluating(task):
        assert not any(module.training for module in task.modules())
    assert all(module.training == training for module in task.modules())


def test_evaluating_ends_after_an_error_too(make_classifier):
    task = make_classifier().train()
    with pytest.raises(ArithmeticError), evaluating(task):
        raise ArithmeticError
    assert task.training


def test_a_frozen_backbone_is_not_trainable(make_classifier):
    names = {"downsample.0.weight", "downsample.0.bias", "downsample.1.weight", "downsample.1.bias"}
    assert set(trainable(make_classifier())) == names | {"classifier.weight", "classifier.bias"}


def test_pooled_features_are_one_vector_an_image():
    features = torch.randn(4, 7, 3)
    assert torch.equal(pooled(features[:, 0]), features[:, 0])
    torch.testing.assert_close(pooled(features), sum(features[:, i] for i in range(7)) / 7)


def test_a_copy_shares_the_frozen_backbone_and_nothing_that_trains():
    task = Classifier(frozen_encoder(hidden=2), 3)
    copy = copied(task)
    assert copy.encoder.backbone is task.encoder.backbone
    assert not {id(p) for p in trainable(copy).values()} & {id(p) for p in trainable(task).values()}
