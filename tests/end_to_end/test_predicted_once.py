"""After the last round each test image is predicted once by every model: metrics, decisions and pictures share it."""

from collections import Counter

import pytest
from torch.nn.modules.module import register_module_forward_pre_hook

from lit_fedad.contracts import Client, Task
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.deployment.predict import evaluate
from lit_fedad.experiment.run import RunCallback

MOTIFS = (
    "data=motifs",
    "features=train",
    "encoder=resnet18_narrow",
    "encoder.channels=4",
    "task.projection=8",
)
STREAM = ("partition=products_in_turn", "partition.order=[gravel,grain]", "partition.clients=2", "rounds=2")


def of_test(batch):
    """Indices of the test images in a batch."""
    return batch["of_test"].tolist() if "of_test" in batch else []


class Counts(RunCallback):
    """Passes over test images since the last but one round of a run: forward passes, and predictions."""

    def __init__(self):
        self.forward, self.predicted = Counter(), Counter()

    def clear(self):
        self.forward.clear()
        self.predicted.clear()

    def on_checkpoint(self, federation, report):
        if report.round == federation.rounds - 1:
            self.clear()


@pytest.fixture
def counts(monkeypatch):
    """Counts passes over batches of test sets, whoever asks for them."""
    found, tests = Counts(), []
    build, predict = FederatedDataModule.__init__, Client.predict_step

    def build_and_mark(module, train, test, *rest):
        build(module, train, test, *rest)
        if isinstance(test, range):  # of lengths alone, by which rounds are checked before images are read
            return
        kind = type(test)
        if not any(type(other) is kind for other in tests):
            read = kind.__getitems__

            def read_and_mark(dataset, indices):
                batch = read(dataset, indices)
                if any(dataset is other for other in tests):
                    batch["of_test"] = batch["index"]
                return batch

            monkeypatch.setattr(kind, "__getitems__", read_and_mark)
        tests.append(test)

    def predict_and_count(client, batch, *rest):
        found.predicted.update(of_test(batch))
        return predict(client, batch, *rest)

    def count_forward(module, given):
        if isinstance(module, Task):
            found.forward.update(of_test(given[0]))

    monkeypatch.setattr(FederatedDataModule, "__init__", build_and_mark)
    monkeypatch.setattr(Client, "predict_step", predict_and_count)
    hook = register_module_forward_pre_hook(count_forward)
    yield found
    hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("models", "overrides"),
    [
        (1, ("method=federated_bank",)),
        (2, ("method=fedavg", "task=memory_bank")),
        (2, ("method=local", *STREAM)),
        (2, ("method=local", "task=contrastive", *MOTIFS)),
    ],
    ids=["one model", "a bank each", "a stream", "semantic anomalies"],
)
def test_each_test_image_is_predicted_once_by_every_model(lab, counts, tmp_path, models, overrides):
    lab.train_with([counts], tmp_path, *overrides, "evaluation.pictures=1")
    assert counts.forward
    assert set(counts.forward.values()) == set(counts.predicted.values()) == {models}
    pictures = {path.name for path in (tmp_path / "figures").iterdir()}
    assert pictures & {"heatmaps.png", "representations.png"}
    counts.clear()
    evaluate(str(tmp_path))
    assert set(counts.forward.values()) == set(counts.predicted.values()) == {models}
