"""How an experiment's parts are put together, where no run shows it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lightning.fabric import Fabric
from PIL import Image

import lit_fedad
from lit_fedad.contracts import Context
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import sha256
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.experiment.build import build_images, build_model, build_public
from lit_fedad.experiment.federations import open_checkpoints
from lit_fedad.experiment.local_clients import _check_test_images, build_run, workers
from lit_fedad.experiment.train import train
from lit_fedad.federation.checkpoint import read_meta
from lit_fedad.report.console import Display


@pytest.fixture
def photographs(tmp_path):
    """Paths of three images on disk, of unequal sizes."""
    paths = []
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 256, (20 + number, 24, 3), np.uint8)
        paths.append(tmp_path / "private" / f"{number}.png")
        paths[-1].parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(paths[-1])
    return paths


@pytest.fixture
def arrays(tmp_path):
    """Overrides of labelled images in memory, 12 pixels wide."""

    def write(height):
        for part in ("train", "test"):
            images = np.zeros((6, height, 12, 3), np.uint8)
            np.savez(tmp_path / f"{part}.npz", images=images, labels=np.arange(6) % 2)
        task = [
            "method=fedavg",
            "task=classifier_convnet",
            "encoder.channels=8",
            "debug=seconds",
            "tracking=off",
        ]
        data = ["data=packed", f"data.root={tmp_path}", "data.train=train.npz", "data.test=test.npz"]
        return [*task, *data, "image.size=12", f"out={tmp_path / 'run'}"]

    return write


def files(train, test):
    return ImageSet(
        "plates",
        tuple(Sample(path, "plate") for path in train),
        tuple(Sample(path, "plate") for path in test),
    )


def test_a_file_that_is_a_client_s_or_a_test_image_cannot_be_public(photographs, tmp_path):
    overrides = ["method=fadngs", "image.size=8", "public=folder", f"public.root={tmp_path / 'private'}"]
    config = compose(overrides)
    for images in (files(photographs[:1], []), files([], photographs[1:2])):
        with pytest.raises(UserError, match="1 of 3 images are also in plates"):
            build_public(config, images)
    other = tmp_path / "other.png"
    Image.fromarray(np.zeros((20, 24, 3), np.uint8)).save(other)
    public = build_public(config, files([other], [other]))
    assert public is not None
    assert public.shape == (3, 3, 8, 8)


def test_public_images_are_read_for_methods_that_look_at_them(photographs):
    assert build_public(compose(["method=fedavg", "public=synthetic"]), files(photographs, [])) is None


def test_only_classifiers_look_at_grey_images(photographs):
    with pytest.raises(UserError, match="image.channels=1: task Contrastive looks at three channels"):
        build_images(compose(["method=fadngs", "image.channels=1"]))
    public = ["method=fedic", "public=synthetic", "image.channels=1"]
    with pytest.raises(UserError, match="image.channels=1: public images have three channels"):
        build_public(compose(public), files(photographs, []))


def test_images_have_the_configured_channels(tmp_path):
    overrides = ["method=fedavg", "data=motif_classes", "task=classifier", "debug=seconds", "tracking=off"]
    grey = ["~data.train_per_product", "~data.test_per_product", "image.size=32", "image.channels=1"]
    with pytest.raises(
        UserError, match="image.channels=1, but the images of motif_classes have 3; give image.ch"
    ):
        train(compose([*overrides, *grey, f"out={tmp_path / 'run'}"]), quiet=True)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("task._target_=os.getcwd", r"task\._target_=os\.getcwd is no Task"),
        ("method.client._target_=builtins.dict", r"method\.client\._target_=builtins\.dict is no Client"),
    ],
)
def test_what_is_no_task_or_client_is_refused(override, said):
    with pytest.raises(UserError, match=said):
        build_images(compose(["method=fedavg", override]))


def test_what_is_no_reader_of_images_is_refused():
    config = compose(["method=fedavg"]) | {"data": {"_target_": "os.getcwd"}}
    with pytest.raises(UserError, match=r"data\._target_=os\.getcwd returns a str, no ImageSet"):
        build_images(config)


def test_a_run_without_test_images_is_refused_before_anything_is_sent(photographs, tmp_path):
    given = [
        f"data.root={tmp_path}",
        "data.train_normal=[private]",
        "data.test_normal=[]",
        "data.test_anomalous=[]",
    ]
    with pytest.raises(UserError, match="has no test images, by which a run is judged; give some"):
        train(compose(["method=fedavg", "data=folders", *given, "debug=seconds", f"out={tmp_path / 'run'}"]))


def test_a_set_without_training_images_is_named(photographs):
    nothing = ImageSet("mine", (), (Sample(photographs[0], "mine"),))
    with pytest.raises(UserError, match="^data: mine has no training images"):
        _check_test_images(nothing)


@pytest.mark.parametrize(
    "given", [{"path": "a.png"}, {"path": Path("a.png"), "mask": "b.png"}], ids=["path", "mask"]
)
def test_a_sample_whose_path_is_a_text_is_refused(given):
    with pytest.raises(TypeError, match=r"^Sample\(.*\): give each as a pathlib\.Path$"):
        Sample(category="mine", **given)


def test_an_image_is_not_trained_on_and_tested(photographs, tmp_path):
    both = {"mine": photographs}
    with pytest.raises(UserError, match=r"0\.png: is given for training and for testing; remove it from one"):
        lit_fedad.train("fedavg", normal=both, test={"mine": {"good": photographs[:1]}}, out=tmp_path / "run")


def test_an_image_is_not_normal_and_anomalous_in_a_test_of_one_product(photographs, tmp_path):
    tested = {"mine": {"good": photographs[:2], "scratch": photographs[1:2]}}
    with pytest.raises(
        UserError, match=r"is given as a normal and as an anomalous test image of mine; remove it"
    ):
        lit_fedad.train("fedavg", normal={"mine": photographs[2:]}, test=tested, out=tmp_path / "run")


def test_an_image_may_be_normal_to_one_product_and_anomalous_to_another(photographs):
    one, other = (Sample(photographs[0], name, defect) for name, defect in (("cat", "good"), ("dog", "cat")))
    _check_test_images(ImageSet("animals", (Sample(photographs[1], "cat"),), (one, other)))


@pytest.mark.parametrize(
    ("overrides", "processes", "message"),
    [
        (["federation=secure"], 1, "Ray workers neither mask nor noise sums yet"),
        ([], 2, "Ray starts the processes; give fabric.devices=1"),
        ([], 1, r"simulation\.workers needs ray: pip install 'lit-fedad\[simulation\]'"),
        (["simulation.cpus=-1"], 1, r"simulation\.cpus=-1\S* must be at least 0"),
    ],
)
def test_workers_that_cannot_play_are_refused_before_anything_runs(
    monkeypatch, overrides, processes, message
):
    monkeypatch.setattr("lit_fedad.core.extras.find_spec", lambda name: None)
    config = compose(["method=federated_subspace", "simulation.workers=2", *overrides])
    with pytest.raises(UserError, match=message):
        workers(config, SimpleNamespace(world_size=processes))


def test_what_ray_does_not_play_is_refused_before_images_are_read(tmp_path):
    words = ["method=fedavg", "federation=secure", "simulation.workers=2"]
    config = compose([*words, "data=folders", f"data.root={tmp_path / 'none'}"])
    with pytest.raises(UserError, match="Ray workers neither mask nor noise sums yet"):
        build_run(Fabric(accelerator="cpu", devices=1), config, Display(quiet=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["partition=products_in_turn", "rounds=2"], "rounds=2, but images come in 5 stages"),
        (["federation.sampler.min_clients=20"], "min_clients=20, but only 2 clients take part"),
        (["federation=secure"], r"federation\.secure_sum needs 3 clients, and 2 take part"),
        (
            ["federation=secure", "partition.clients=4", "federation.sampler.fraction=0.5"],
            r"needs 3 clients in a round, .* takes 2 of 4; give federation\.sampler\.fraction=1$",
        ),
        (["task.products=[brik]"], r"task\.products: no product 'brik'; the nearest is 'brick'"),
    ],
)
def test_rounds_that_cannot_be_played_are_refused_before_features_are_computed(overrides, message, tmp_path):
    given = ["method=federated_subspace", "debug=seconds", "partition.clients=2", f"cache.folder={tmp_path}"]
    with pytest.raises(UserError, match=message):
        build_run(Fabric(accelerator="cpu", devices=1), compose([*given, *overrides]), Display(quiet=True))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["federated_subspace", "panda"])
def test_a_wrong_mask_is_refused_before_features_are_computed(method, photographs, tmp_path):
    for place in ("train/good/0.png", "test/good/0.png", "test/dent/0.png", "ground_truth/dent/0.png"):
        path = tmp_path / "plate" / place
        path.parent.mkdir(parents=True)
        Image.open(photographs["dent" in place]).save(path)
    Image.new("L", (9, 9)).save(path)
    given = ["data=mvtec_mixture", f"data.root={tmp_path / 'plate'}", "partition=pooled"]
    cache = tmp_path / "cache"
    config = compose([f"method={method}", *given, "debug=seconds", f"cache.folder={cache}"])
    with pytest.raises(UserError, match="the mask is 9x9 but its image"):
        build_run(Fabric(accelerator="cpu", devices=1), config, Display(quiet=True))
    assert not cache.exists()


def test_without_workers_nothing_of_ray_is_needed(monkeypatch):
    monkeypatch.setattr("lit_fedad.core.extras.find_spec", lambda name: None)
    assert workers(compose(["method=fedavg"]), SimpleNamespace(world_size=1)) is None


@pytest.mark.slow
def test_batches_of_one_image_are_refused_where_predictions_need_statistics_of_several():
    one = ["method=fedavg", "data=textures", "batch_size=1"]
    with pytest.raises(UserError, match="batch_size=1: batch normalisation"):
        build_model(compose([*one, "task=deep_svdd", "encoder=resnet18_narrow"]), ["plate"])
    build_model(compose(["method=feddymem", "backbone=own", "batch_size=1"]), ["plate"])


def test_learning_rates_fall_where_the_configuration_or_the_method_says_so():
    def factors(*overrides):
        small = ["experiment=small", "backbone=own", "image.size=64", "rounds=3"]
        client = build_model(compose([*overrides, *small]), ["plate"]).client
        rates = []
        for number in (0, 1, 2, 3):
            client.context = Context(seed=0, round=number)
            rates.append(client.optimizer_of_round().param_groups[0]["lr"])
        return [rate / rates[0] for rate in rates]

    falling = pytest.approx([1, 1, 0.75, 0.25])  # (1 + cos(pi (t - 1) / 3)) / 2
    assert factors("method=fedavg") == [1, 1, 1, 1]
    assert factors("method=fedavg", "learning_rate_decay=cosine") == falling
    assert factors("method=feddetect", "features=frozen") == falling
    with pytest.raises(UserError, match=r"learning_rate_decay='linear' must be one of \['cosine', 'null'\]"):
        factors("method=fedavg", "learning_rate_decay=linear")


def test_a_task_with_schedules_beside_its_optimiser_is_refused_in_one_line(monkeypatch):
    client = build_model(compose(["method=fedavg", "backbone=own", "image.size=64"]), ["plate"]).client
    optimiser = client.configure_optimizers()
    monkeypatch.setattr(client.task, "configure_optimizers", lambda: {"optimizer": optimiser})
    with pytest.raises(UserError, match="configure_optimizers gives a dict: return one optimiser"):
        client.optimizer_of_round()


def test_images_in_memory_that_are_not_square_are_refused(arrays):
    with pytest.raises(UserError, match=r"have 8 x 12 pixels \(height, width\).*make them square"):
        train(compose(arrays(height=8)), quiet=True)


def test_images_in_memory_are_normalised_by_their_data_section_alone(arrays):
    """Training would read the data's, later commands the image section's."""
    with pytest.raises(UserError, match="image.mean: .*leave image.mean out"):
        train(compose([*arrays(height=12), "+image.mean=[0.1]"]), quiet=True)


def test_a_checkpoint_keeps_the_hashes_of_the_own_code_that_its_run_uses(tmp_path, monkeypatch):
    (tmp_path / "own_codec.py").write_text("used = True")
    (tmp_path / "own_unused.py").write_text("used = False")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LIT_FEDAD_PACKAGES", "own_codec,own_unused")
    config = {"federation": {"channel": {"_target_": "own_codec.Codec"}}}
    checkpoints = open_checkpoints(tmp_path / "run", config, SimpleNamespace(fingerprint="weights"))
    checkpoints.begin(1)
    meta = read_meta(checkpoints.commit(1, {"server": {}, "history": []}))
    assert meta["code"] == {"own_codec": sha256(tmp_path / "own_codec.py")}
