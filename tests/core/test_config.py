"""Every configuration file composes and builds."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from PIL import Image

from lit_fedad.core import config
from lit_fedad.core.building import build
from lit_fedad.core.config import Config, chosen, compose
from lit_fedad.core.config_groups import choices, conf_folder
from lit_fedad.core.errors import UserError
from lit_fedad.core.nested import flatten
from lit_fedad.data.sample import ImageSet
from lit_fedad.experiment.build import build_model
from lit_fedad.federation.channel import Channel
from lit_fedad.federation.sampling import ClientSampler
from lit_fedad.tasks.classifier import Classifier
from lit_fedad.tasks.contrastive import Contrastive
from lit_fedad.tasks.contrastive_losses import RepresentationLoss

PRODUCTS = {
    "mvtec_textures": ["carpet", "grid", "leather", "tile", "wood"],
    "mpdd": ["bracket_black", "bracket_brown", "bracket_white", "connector", "metal_plate", "tubes"],
    "mvtec_mixture": ["a", "b"],
    "real_mixture": ["mvtec/bottle", "mvtec/screw", "other_ad/magnetic_tile"],
    "medical": ["medical/brain_mri", "medical/chest_xray", "other_ad/elpv_mono"],
    "paper": ["carpet", "grid", "leather", "tile", "wood"],
}


@pytest.fixture
def tree(tmp_path):
    """Paints product folders in MVTec layout, two images in each folder."""

    def paint(products):
        for product in products:
            for kind in ("train/good", "test/good", "test/bad"):
                folder = tmp_path / product / kind
                folder.mkdir(parents=True)
                for i in range(2):
                    Image.fromarray(np.full((40, 40, 3), 60 * i, np.uint8)).save(folder / f"{i}.png")
        return tmp_path

    return paint


def needs(group: str, option: str) -> list[str]:
    """What a file leaves to the person, as overrides."""
    missing = {
        ("partition", "file"): ["partition.path=clients.json"],
        ("partition", "by_group"): ["partition.group=patient"],
        ("data", "path_lists"): ["data.file=images.csv"],
        ("data", "coco"): ["data.root=images", "data.annotations=labels.json"],
        ("data", "packed"): ["data.root=images", "data.train=train.npz"],
        ("data", "labelled_csv"): [
            f"data.{key}=x" for key in ("root", "labels", "images", "id_column", "label_column")
        ],
        ("method", "fedrep"): ["task=autoencoder"],
        **{("method", name): ["data=motif_classes"] for name in ("feddm", "fedvck")},
        ("public", "folder"): ["public.root=images"],
        ("public", "packed"): ["public.root=images", "public.file=images.npz"],
        ("experiment", "cifar10"): ["data.root=images", "method=fedavg"],
        ("experiment", "fadngs"): ["data.root=images", "method=fadngs"],
        ("experiment", "semantic_cifar10"): ["data.root=images", "method=fadngs"],
        ("experiment", "semantic_small"): ["method=fadngs"],
        ("experiment", "gldp_small"): ["method=gldp"],
        ("experiment", "gldp_frozen"): ["method=gldp"],
        ("experiment", "gldp_cifar10_frozen"): ["data.root=images", "method=gldp"],
        ("experiment", "fedvck_small"): ["method=fedvck"],
        **{
            ("experiment", name): ["data.root=images", "method=fedvck"]
            for name in ("fedvck", "fedvck_organs", "fedvck_natural")
        },
        **{
            ("experiment", name): ["data.root=images", "method=gldp"]
            for name in ("gldp", "gldp_cifar10", "gldp_literal")
        },
        **{("contrastive_loss", loss): ["method=fadngs"] for loss in choices("contrastive_loss")},
    }
    embedded = {
        "textures",
        "motifs",
        "motif_classes",
        "default",
        "small",
        "gldp_small",
        "gldp_frozen",
        "fedvck_small",
    }
    rooted = group in ("data", "experiment") and option not in embedded
    return missing.get((group, option), ["data.root=images"] if rooted else [])


# Tables are no part of a run's configuration.
EVERY = [
    (path.parent.name, path.stem)
    for path in sorted(conf_folder().glob("*/*.yaml"))
    if path.parent.name != "table"
]


def test_all_groups_are_known():
    assert {group for group, _ in EVERY} >= {
        "method", "task", "data", "partition", "backbone", "federation", "tracking", "experiment", "debug",
        "encoder", "features", "contrastive_loss", "public", "condensation", "distillation",
    }  # fmt: skip
    assert {"feddymem", "local"} <= set(choices("method"))


@functools.cache
def composed(group: str, option: str, *overrides: str) -> Config:
    """A file's configuration, on which every check of the file looks."""
    return compose([f"{group}={option}", *needs(group, option), *overrides])


# Methods, experiments and backbones are built besides, below.
@pytest.mark.slow
@pytest.mark.parametrize(
    "group", sorted({group for group, _ in EVERY} - {"method", "experiment", "backbone"})
)
def test_every_file_of_a_group_composes(group):
    for option in [option for folder, option in EVERY if folder == group]:
        config = composed(group, option)
        json.dumps(config)  # plain dictionaries, lists and scalars
        assert config["method"]["name"], option


# Their own presets bring a task that takes classes, or frozen features.
BROUGHT = {
    "gldp": ["task=classifier", "features=train"],
    "prototype_statistics": ["task=classifier", "features=frozen"],
    "panda": ["features=frozen"],
}


def assert_builds(config: Config) -> None:
    json.dumps(config)
    assert config["method"]["name"]
    model = build_model(config, ["a", "b"])
    assert model.client.task is model.task
    type(model.client).check_task(type(model.task))
    if model.backbone is not None:
        assert not any(p.requires_grad for p in model.backbone.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("method", choices("method"))
def test_every_method_builds(method):
    """As its file has it, and under the smallest preset where its file brings another one."""
    own = composed("method", method, "backbone.weights=random")
    assert_builds(own)
    small = composed(
        "method", method, "experiment=small", "backbone.weights=random", *BROUGHT.get(method, [])
    )
    if small != own:
        assert_builds(small)


@pytest.mark.parametrize(
    ("data", "side", "limits"),
    [
        ("textures", 32, {"train_per_product": 4, "test_per_product": 4}),
        ("motif_classes", 32, {"train_per_class": 24, "test_per_class": 4}),
        ("pathmnist", 28, {"train_per_class": 24, "test_per_class": 4}),
        (
            "semantic_cifar10",
            32,
            {"test_per_set": 4, "normal.train_per_class": 24, "normal.test_per_class": 4},
        ),
        ("labelled_csv", 32, {}),
    ],
)
def test_the_debug_preset_fits_every_kind_of_data(data, side, limits):
    config = compose(["debug=seconds", f"data={data}", *needs("data", data)])
    assert config["image"]["size"] == side
    given = flatten(config["data"])
    assert {key: value for key, value in given.items() if "_per_" in key} == limits
    build({**config["data"], "_partial_": True})  # the reader takes every key


def test_the_grid_follows_the_size_of_images_and_tiles():
    given = ["image.size=[512,1024]", "image.tile=64"]
    assert [compose(given[:number])["task"]["grid"] for number in (0, 1, 2)] == [16, 64, 8]


def test_what_the_command_says_wins_over_the_debug_preset():
    config = compose(
        ["debug=seconds", "data=semantic_cifar10", "data.root=x", "data.normal.train_per_class=7"]
    )
    assert config["data"]["normal"]["train_per_class"] == 7
    assert compose(["debug=seconds", "data=pathmnist", "data.root=x", "image.size=64"])["image"]["size"] == 64
    with pytest.raises(
        UserError, match="unknown key 'data.train_per_product'; did you mean 'data.train_per_class'"
    ):
        compose(["debug=seconds", "data=cifar10", "data.root=x", "data.train_per_product=3"])
    assert compose(["debug=seconds", "backbone=null"])["backbone"] is None
    assert list(compose(["debug=seconds", "partition=pooled"])["partition"]) == ["_target_"]
    assert list(compose(["debug=seconds", "method=centralised"])["partition"]) == ["_target_"]  # one client
    server = compose(["debug=seconds", "method=creff", "method.server.matching_steps=7"])["method"]["server"]
    assert (server["matching_steps"], server["retraining_epochs"]) == (7, 2)  # of 300, the preset's most
    server = compose(["debug=seconds", "method=fedvck", "condensation.epochs=7"])["method"]["server"]
    assert server["training"]["epochs"] == 7
    given = ["debug=seconds", "method=fedavg", "method.client={local_epochs:3}"]
    assert compose(given)["method"]["client"]["local_epochs"] == 3
    given = ["debug=seconds", "method=fedavg", "task=csi"]
    assert compose(given)["encoder"]["channels"] == 16  # of 64
    assert compose([*given, "encoder.channels=64"])["encoder"]["channels"] == 64


def test_the_debug_preset_takes_the_keys_of_stages_that_its_configuration_shows():
    debug = ["debug=seconds", "method=gldp", "experiment=gldp_small"]
    shown = compose(debug)["partition"]
    assert (shown["clients"], shown["stages"], shown["imbalance"]) == (2, 2, 1)
    given = [*debug, "partition.stages=1", "partition.shards=equal"]
    assert compose(given)["partition"] == {**shown, "stages": 1, "shards": "equal"}
    assert chosen(given)["partition"] == "task_stream_small"  # read for conflicts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "backbone"),
    [*((e, None) for e in choices("experiment")), *(("paper", b) for b in choices("backbone"))],
)
def test_every_experiment_and_backbone_builds_its_model(experiment, backbone):
    """The paper's included: WRN-50-2, a memory of 56 x 56 slots of 1792 channels."""
    chosen = [f"backbone={backbone}"] if backbone else []
    chosen += ["method=feddymem_literal"] if experiment == "paper" else []  # as many slots as patches
    config = composed("experiment", experiment, *chosen, "backbone.weights=random")
    json.dumps(config)
    task = build_model(config, ["a", "b"]).task
    if isinstance(task, Classifier):
        assert task.classifier.out_features == 2
        widths = dict.fromkeys(("gldp_cifar10", "gldp_small"), 128)
        widths |= dict.fromkeys(("gldp_frozen", "gldp_cifar10_frozen"), 256)
        widths |= dict.fromkeys(("fedvck", "fedvck_organs", "fedvck_natural"), 2048)
        assert task.num_features == widths.get(experiment, 512)
        return
    if isinstance(task, Contrastive):
        assert task.encoder.num_features == {"fadngs": 512, "semantic_small": 448}.get(experiment, 128)
        assert 0 < task.warmup < task.rounds == config["rounds"]
        return
    section = config["task"]
    assert len(task.memory) == (section["slots"] or section["grid"] ** 2)
    if experiment == "paper" and backbone is None:
        assert task.memory.shape == (3136, 1792)


# Sets in other layouts are built by the tests of their loaders.
@pytest.mark.parametrize("data", ["textures", *sorted(set(choices("data")) & set(PRODUCTS))])
def test_every_data_source_builds(data, tree, tmp_path):
    if data == "textures":
        given = [
            f"data.root={tmp_path}",
            "data.size=32",
            "data.train_per_product=1",
            "data.test_per_product=2",
        ]
    else:
        given = [f"data.root={tree(PRODUCTS[data])}"]
    images = build(compose([f"data={data}", *given])["data"])
    assert isinstance(images, ImageSet)
    assert len(images.categories) == len(PRODUCTS.get(data, range(5)))


@pytest.mark.parametrize("experiment", sorted(set(choices("experiment")) & set(PRODUCTS)))
def test_every_experiment_finds_its_data(experiment, tree):
    images = build(compose([f"experiment={experiment}", f"data.root={tree(PRODUCTS[experiment])}"])["data"])
    assert len(images.train) == 2 * len(PRODUCTS[experiment])


@pytest.mark.parametrize("partition", choices("partition"))
def test_every_partition_deals_all_images(partition, tree, tmp_path):
    root = tree(["a", "b"])
    (tmp_path / "clients.json").write_text("[[0, 1], [2, 3]]")
    given = {"file": [f"partition.path={tmp_path}/clients.json"], "iid": ["partition.clients=3"]}
    small = {"clients": 2, "size": 2, "dominant": 1, "contamination": 0}
    given["dominant"] = given["dominant_small"] = [f"partition.{key}={value}" for key, value in small.items()]
    given["products_in_turn"] = ["partition.clients=2"]
    given["by_group"] = ["partition.clients=2", "partition.group='/[ab]/'"]
    for stream in ("task_stream", "task_stream_literal", "task_stream_small"):
        given[stream] = [f"partition.{key}" for key in ("clients=2", "classes=1", "stages=1", "imbalance=1")]
    given["dirichlet"] = given["ten_clients"] = ["partition.clients=2", "partition.min_size=1"]
    config = compose(
        [
            f"partition={partition}",
            "data=mvtec_mixture",
            f"data.root={root}",
            "data.products=[a,b]",
            *given.get(partition, []),
        ]
    )
    dealt = build(config["partition"])(build(config["data"]), 0)
    assert sorted(i for client in dealt.clients for i in client) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [(["method=fedavg"], "Dirichlet"), (["method=centralised"], "Pooled"),
     (["method=fedavg", "partition=by_product"], "ByProduct")],
)  # fmt: skip
def test_a_presets_number_of_clients_leaves_with_its_partition(overrides, kind):
    node = compose(["experiment=cifar10", "data.root=images", *overrides])["partition"]
    assert type(build(node)).__name__ == kind
    assert node.get("clients") == (10 if kind == "Dirichlet" else None)


@pytest.mark.parametrize("loss", choices("contrastive_loss"))
def test_every_contrastive_loss_is_what_the_task_is_trained_by(loss):
    section = compose(["method=fadngs", f"contrastive_loss={loss}"])["task"]["loss"]
    built = build(section)
    assert isinstance(built, RepresentationLoss)
    assert type(built).__name__.lower() == loss.replace("_", "")


def test_a_contrastive_task_that_names_no_loss_keeps_that_of_its_warm_up():
    """By which learning rates are meant: docs/fadngs.md says that FADngs without its parts is this task's FedAvg."""
    command = ["method=fedavg", "experiment=semantic_small", "task=contrastive"]
    plain, named = compose(command)["task"], compose([*command, "contrastive_loss=simclr"])["task"]
    assert (plain["loss"] or plain["warmup_loss"]) == named["loss"]


@pytest.mark.parametrize("public", choices("public"))
def test_every_source_of_public_images_builds(public, tree, tmp_path):
    tree(["a"])
    np.savez(tmp_path / "images.npz", images=np.zeros((6, 40, 40, 3), np.uint8), labels=np.zeros(6, np.int64))
    given = {
        "folder": [f"public.root={tmp_path}"],
        "packed": [f"public.root={tmp_path}", "public.file=images.npz"],
    }
    images = build(
        compose([f"public={public}", "public.count=5", *given.get(public, []), "image.size=16"])["public"]
    )
    assert (images.shape, images.dtype) == ((5, 3, 16, 16), torch.uint8)


CLIENT, SERVER = "client.condensation", "server.training"
CONDENSED = {"steps": f"{CLIENT}.steps", "batch": f"{CLIENT}.batch"}
TRAINED = {
    "epochs": f"{SERVER}.epochs",
    "server_rate": f"{SERVER}.learning_rate",
    "weight_decay": f"{SERVER}.weight_decay",
}
TAKEN = {
    "fedvck": {
        **CONDENSED, **TRAINED, "share": "client.share", "bias": "client.bias",
        "learning_rate": f"{CLIENT}.learning_rate", "clip": f"{CLIENT}.clip",
        "contrast": "server.contrast", "temperature": "server.temperature",
    },
    "fedvck_sums": {**TRAINED, "bias": "client.bias", "server_steps": "server.descent.steps"},
    "feddm": {**CONDENSED, "epochs": TRAINED["epochs"]},
    "desa": CONDENSED,
}  # fmt: skip
"""What methods take from the group `condensation`, as its comment says, and where."""


@pytest.mark.parametrize("method", TAKEN)
def test_methods_take_their_settings_of_condensation_from_its_group(method):
    keys = compose([f"method={method}"])["condensation"]
    given = {key: 1001 + number for number, key in enumerate(keys)}
    config = compose([f"method={method}", *(f"condensation.{key}={value}" for key, value in given.items())])
    places = {str(value): place for place, value in flatten(config["method"]).items()}
    assert {key: places[str(value)] for key, value in given.items() if str(value) in places} == TAKEN[method]


@pytest.mark.parametrize("federation", choices("federation"))
def test_every_federation_builds(federation):
    section = compose([f"federation={federation}"])["federation"]
    assert isinstance(build(section["sampler"]), ClientSampler)
    assert isinstance(build(section["channel"]), Channel)


def test_what_tests_compose_is_what_hydra_composes():
    words = [
        "rounds=7",
        "method=gldp",
        "+image.crop=5",
        "federation/privacy=central",
        "~cache",
        "debug=seconds",
    ]
    with initialize_config_dir(str(conf_folder().resolve()), version_base="1.3"):
        ours, whole = (
            function("config", words, return_hydra_config=True)
            for function in (config.hydra_compose, hydra_compose)
        )
        assert config.hydra_compose("config", words) == hydra_compose("config", words)
    assert ours.hydra.runtime.choices == whole.hydra.runtime.choices
