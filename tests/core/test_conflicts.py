"""Settings of presets for a part that another replaced, forms of images for one part alone, and what is not read."""

import re

import pytest

from lit_fedad.core.config import compose
from lit_fedad.core.conflicts import check_conflicts, replaced_encoder, unread, warn_of_unread
from lit_fedad.core.errors import UserError


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["method=fedic", "partition=iid"],
            "method=fedic sets partition.server_labelled, which partition=iid does not take; give partition=task_stream"
            " or task_stream_literal or task_stream_small, or ~partition.server_labelled",
        ),
        (
            ["experiment=medical", "data=textures"],
            "experiment=medical sets data.name and data.products, which data=textures does not take; give ~data.name"
            " ~data.products",
        ),
        (
            ["method=feddymem", "task=memory_bank_sums"],
            "method=feddymem sets task.head, which task=memory_bank_sums does not take; give task=memory_bank or"
            " memory_bank_means",
        ),
        (
            ["method=nearest_neighbour", "task=memory_bank_sums"],
            "method=nearest_neighbour sets task.reduce, which task=memory_bank_sums does not take; give"
            " task=memory_bank or memory_bank_means",
        ),
        (
            ["method=prototype_statistics", "experiment=gldp_small"],
            "method=prototype_statistics sets features.hidden, which features=train does not take; give"
            " features=frozen, or ~features.hidden",
        ),
        (
            ["method=feddymem", "task=classifier"],
            "FedDyMemClient works with task MemoryBank, not with Classifier",
        ),
    ],
)
def test_it_is_named_by_who_sets_it_with_the_files_that_take_it(overrides, said):
    with pytest.raises(UserError) as error:
        check_conflicts(compose(overrides), overrides)
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=fedic", "partition=iid", "~partition.server_labelled"],
        ["method=feddymem", "task=memory_bank_sums", "task.head=null"],
        ["method=gldp", "debug=seconds"],
    ],
)
def test_what_the_command_says_itself_is_left_to_it(overrides):
    check_conflicts(compose(overrides), overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["method=dfrd", "method.server.channels=4"], "give image.channels=4"),
        (["method=fedgan", "method.client.mean=[]"], "give data.mean=[]"),
        (["task=deep_svdd", "method=local", "task.std=[0]"], "give image.std=[0]"),
        (["method=gldp", "features.mean=[]"], "give data.mean=[]"),
        (
            ["method=fadngs", "data=semantic_cifar10", "data.root=x", "task.std=[0]"],
            "give data.normal.std=[0]",
        ),
    ],
)
def test_what_all_have_from_the_images_is_not_given_to_one_part(overrides, said):
    with pytest.raises(UserError, match=f"^{re.escape(overrides[-1])}: it is that of .*{re.escape(said)}$"):
        check_conflicts(compose(overrides), overrides)


def test_a_networks_own_channels_may_be_given():
    overrides = ["method=fedavg", "task=classifier_convnet", "encoder.channels=8"]
    check_conflicts(compose(overrides), overrides)


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("feddymem", ["backbone=resnet18", "grid=28"], []),
        ("feddymem", ["features=frozen", "public=synthetic"], ["features=frozen", "public=synthetic"]),
        ("feddymem", ["encoder=resnet18"], ["encoder=resnet18"]),
        ("fadngs", ["public=synthetic", "distillation=small", "warmup=2", "features=frozen"], []),
        ("fadngs", ["features=frozen", "backbone=resnet18"], []),
        ("fadngs", ["features=train", "backbone=resnet18"], ["backbone=resnet18"]),
        ("fedvck", ["condensation=small", "condensation.contrast=1.0"], []),
        ("feddm", ["condensation.steps=3", "condensation.contrast=1.0"], ["condensation.contrast=1.0"]),
        ("feddymem", ["calibration.share=0.3", "evaluation.client_test=balanced"], ["evaluation.client_test=balanced"]),
        ("gldp", ["calibration.share=0.3", "evaluation.client_test=balanced"], ["calibration.share=0.3"]),
        ("feddymem", ["public=null", "seed=3", "task.slots=9"], []),
        ("fedvck", ["evaluation.client_test=balanced"], ["evaluation.client_test=balanced"]),  # there are no stages
        ("fedvck", ["partition=file", "partition.path=p", "evaluation.client_test=balanced"], []),
        ("feddymem", ["evaluation.pro_limit=0.2", "evaluation.spro_limit=0.1"], ["evaluation.spro_limit=0.1"]),
        ("feddymem", ["data=mvtec_loco", "data.root=x", "evaluation.spro_limit=0.1"], []),
        ("fadngs", ["evaluation.pro_limit=0.2"], ["evaluation.pro_limit=0.2"]),  # there are no masks
        ("feddymem", ["simulation.address=auto", "simulation.workers=0"], ["simulation.address=auto"]),
        ("feddymem", ["simulation.address=auto", "simulation.workers=2"], []),
    ],
)  # fmt: skip
def test_settings_that_nothing_refers_to_are_found(method, given, expected):
    assert unread([f"method={method}", *given]) == expected


def test_a_tasks_encoder_that_a_preset_replaces_is_told():
    """The network is all in which `classifier_convnet` differs from `classifier`."""
    said = (
        "task=classifier_convnet comes with encoder=convnet, and experiment=gldp_small replaces it by resnet18_narrow;"
        " give encoder=convnet for the task's own"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$"):
        warn_of_unread(["method=fedrep", "task=classifier_convnet"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=fedrep", "task=classifier_convnet", "encoder=resnet18"],
        ["method=fedrep", "task=classifier"],  # the preset chooses it too, and a smaller network for it
        ["method=fedavg", "experiment=semantic_small", "task=one_class_svm"],  # on frozen features
        ["method=fedavg", "experiment=semantic_small", "task=csi", "features=train"],
        ["method=fedvck", "task=classifier_resnet18_224"],
        ["method=fedrep"],
    ],
)
def test_the_encoder_of_a_preset_is_told_only_where_it_replaces_another(overrides):
    assert replaced_encoder(overrides) is None
