import tracemalloc
from itertools import chain

import lightning as L
import numpy as np
import pytest
import torch
from helpers.draws import generator
from helpers.trainers import plain_trainer
from PIL import Image
from torch import nn

from lit_fedad.core.errors import UserError
from lit_fedad.data.datamodule import FederatedDataModule, ImageDataset, Targets
from lit_fedad.data.feature_cache import FeatureCache
from lit_fedad.data.sample import Sample
from lit_fedad.data.transform import ImageTransform

TRANSFORM = ImageTransform(size=12)
PARTITION = [[0, 2, 4, 6], [1, 3], [5, 7, 8, 9, 10]]


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(1)
    found = []
    for number in range(14):
        path = folder / f"{number}.png"
        Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(path)
        mask = None
        if number > 11:
            mask = folder / f"{number}_mask.png"
            Image.fromarray(np.eye(12, dtype=np.uint8) * 255).save(mask)
        found.append(Sample(path, "thing", "hole" if mask else "good", mask))
    return found


@pytest.fixture
def module(samples):
    return FederatedDataModule(
        ImageDataset(samples[:11], TRANSFORM),
        ImageDataset(samples[11:], TRANSFORM, with_masks=True),
        PARTITION,
        batch_size=2,
        eval_batch_size=2,
    )


def order(loader) -> list[list[int]]:
    return [batch["index"].tolist() for batch in loader]


def test_items_equal_batches(samples):
    dataset = ImageDataset(samples, TRANSFORM, with_masks=True)
    assert len(dataset) == 14
    batch = dataset.__getitems__([13, 3])
    assert batch["image"].shape == (2, 3, 12, 12)
    assert batch["label"].tolist() == [1, 0]
    assert torch.equal(batch["mask"][0], torch.eye(12, dtype=torch.uint8))
    for position, index in enumerate([13, 3]):
        item = dataset[index]
        assert torch.equal(item["image"], TRANSFORM.image(samples[index].path))
        for key in ("image", "mask", "label", "index"):
            assert torch.equal(item[key], batch[key][position])
    assert "mask" not in ImageDataset(samples, TRANSFORM)[13]


def test_masks_are_held_once(samples):
    transform = ImageTransform(512)
    bits = 512 * 512 // 8
    tracemalloc.start()
    targets = Targets(samples[:1] * 100, transform, with_masks=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * 100 * bits
    assert not targets[[0, 99]]["mask"].any()


def test_oblong_masks_come_in_the_shape_of_their_images(samples):
    transform = ImageTransform(size=(6, 12))
    batch = ImageDataset(samples, transform, with_masks=True).__getitems__([13, 3])
    assert batch["image"].shape == (2, 3, 6, 12)
    assert batch["mask"].shape == (2, 6, 12)
    assert torch.equal(batch["mask"][0], transform.mask(samples[13].mask, samples[13].path))
    assert batch["mask"][0].sum() == 12  # the diagonal, of which no pixel is lost
    assert not batch["mask"][1].any()


def test_cached_features_come_in_the_same_batches_as_images(samples, tmp_path):
    cache = FeatureCache(tmp_path, TRANSFORM, lambda images: [images], "identity")
    cache.fill(samples)
    batches = [
        next(iter(FederatedDataModule(data, data, PARTITION).client_loader(2, generator(3))))
        for data in (
            cache.dataset(samples, Targets(samples, TRANSFORM, with_masks=True)),
            ImageDataset(samples, TRANSFORM, with_masks=True),
        )
    ]
    for key in ("label", "mask", "index"):
        assert torch.equal(batches[0][key], batches[1][key])
    torch.testing.assert_close(batches[0]["pyramid"][0], batches[1]["image"], rtol=2**-11, atol=1e-6)


def test_a_client_gets_its_images_in_an_order_that_the_generator_alone_decides(module):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = order(module.client_loader(2, generator(5)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert order(module.client_loader(2, generator(5))) == first
    assert [len(batch) for batch in first] == [2, 2, 1]
    assert sorted(chain(*first)) == PARTITION[2]
    assert len({str(order(module.client_loader(2, generator(seed)))) for seed in range(10)}) > 5


def test_each_pass_has_another_order_and_replays(module):
    passes = []
    for _ in range(2):
        loader = module.client_loader(2, generator(5))
        passes.append([order(loader) for _ in range(4)])
    assert passes[0] == passes[1]
    assert len({str(single) for single in passes[0]}) > 1


def test_without_shuffling_the_partition_decides(module):
    assert order(module.client_loader(0, generator(0), shuffle=False)) == [[0, 2], [4, 6]]


def test_all_clients_together(module):
    assert sorted(chain(*order(module.train_dataloader()))) == list(range(11))
    torch.manual_seed(3)
    shuffled = order(module.train_dataloader())
    torch.manual_seed(4)
    assert order(module.train_dataloader()) != shuffled


def test_the_test_set_keeps_its_order_and_the_global_random_state(module):
    before = torch.get_rng_state()
    batches = list(module.test_dataloader())
    assert torch.equal(torch.get_rng_state(), before)
    assert [batch["index"].tolist() for batch in batches] == [[0, 1], [2]]
    assert [batch["label"].tolist() for batch in batches] == [[0, 1], [1]]
    assert batches[1]["mask"].sum() == 12


@pytest.mark.parametrize(
    ("partition", "client", "message"),
    [
        ([[0], [1, 11]], 0, "client 1 holds image 11, but there are 11 training images"),
        ([[0], [-1]], 0, "client 1 holds image -1"),
        ([[0], [1]], 2, "client 2 does not exist: the partition has 2 clients"),
        ([[0], []], 1, "client 1 holds no training images"),
    ],
)
def test_bad_partitions_are_named(module, partition, client, message):
    with pytest.raises(UserError, match=message):
        FederatedDataModule(module.train, module.test, partition).client_loader(client, generator(0))


class Mean(L.LightningModule):
    """Learns the mean colour; collects what it is given."""

    def __init__(self):
        super().__init__()
        self.colour = nn.Parameter(torch.zeros(3))
        self.trained, self.tested, self.predicted = [], [], []

    def training_step(self, batch, batch_idx):
        self.trained += batch["index"].tolist()
        return (batch["image"].mean(dim=(2, 3)) - self.colour).square().mean()

    def test_step(self, batch, batch_idx):
        self.tested += batch["index"].tolist()

    def predict_step(self, batch, batch_idx):
        return batch["label"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_plain_trainer_takes_it(module, tmp_path):
    trainer = plain_trainer(2, default_root_dir=tmp_path)
    model = Mean()
    trainer.fit(model, datamodule=module)
    trainer.test(model, datamodule=module, verbose=False)
    assert sorted(model.trained) == sorted(2 * list(range(11)))
    assert model.tested == [0, 1, 2]
    assert torch.cat(trainer.predict(model, module.test_dataloader())).tolist() == [0, 1, 1]
    assert model.colour.abs().sum() > 0
