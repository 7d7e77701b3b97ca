"""Which method works with which task, and small settings for the pairs; derived from what both declare."""

from __future__ import annotations

import functools
import re

import yaml

from lit_fedad.core import config_groups
from lit_fedad.core.building import locate
from lit_fedad.core.config_groups import choices
from lit_fedad.core.errors import UserError
from lit_fedad.methods.feddm import ImageCondenser
from lit_fedad.methods.parts.condensed_server import CondensedClient


def target(group, name, *keys):
    """The class that a file of the configuration names, or the file that it builds on; composing would take seconds."""
    content = yaml.safe_load((config_groups.conf_folder() / group / f"{name}.yaml").read_text())
    node = content
    for key in (*keys, "_target_"):
        node = node.get(key, {}) if isinstance(node, dict) else {}
    if node:
        return locate(node)
    base = next(base for base in content["defaults"] if isinstance(base, str) and base != "_self_")
    return target(group, base, *keys)


TASKS = {
    **{
        name: target("task", name)
        for name in (
            "memory_bank",
            "classifier",
            "contrastive",
            "subspace",
            "deep_svdd",
            "one_class_svm",
            "panda",
            "csi",
            "elsa",
            "feature_neighbours",
            "feature_svm",
            "reverse_distillation",
            "padim",
            "simplenet",
            "dinomaly",
        )
    },
    "autoencoder": target("task/autoencoder", "train"),
    "feature_autoencoder": target("task/autoencoder", "frozen"),
    "efficient_ad": target("task", "efficient_ad", "task"),
}


def made_of(method):
    """Classes and functions that a method's file names, with those of the file that it builds on."""
    text = (config_groups.conf_folder() / "method" / f"{method}.yaml").read_text()
    bases = [base for base in yaml.safe_load(text)["defaults"] if isinstance(base, str) and base != "_self_"]
    return frozenset(re.findall(r"_target_: ([\w.]+)", text)).union(*map(made_of, bases))


def differ_in_code(methods):
    """Of methods that are made of the same and differ in settings alone, that of the shortest name."""
    first = {made_of(method): method for method in sorted(methods, key=len, reverse=True)}
    return [method for method in methods if method in first.values()]


@functools.cache
def client_class(method):
    return target("method", method, "method", "client")


def refusal(method, task):
    """Why a method does not work with a task, as its client says; None where it does."""
    try:
        client_class(method).check_task(TASKS[task])
    except UserError as error:
        return str(error)
    return None


def of_method(method, given):
    """Overrides with the form of a task that is a method's own, in place of the form that suits all."""
    own = {
        ("federated_bank", "task=memory_bank"): ("task=memory_bank_sums",),
        ("prototype_statistics", "task=classifier_convnet"): ("task=classifier",),
        **{("gldp", f"encoder.channels={n}"): ("features=train", f"encoder.channels={n}") for n in (4, 8)},
        ("prototype_statistics", "encoder.channels=8"): ("features.size=32",),
        ("prototype_statistics", "encoder.channels=4"): ("features.size=32",),
    }
    return [part for override in given for part in own.get((method, override), (override,))]


# Derived from what methods and tasks declare: a new method is played through all of its pairs by being there.
PAIRS = {(method, task): refusal(method, task) for method in choices("method") for task in TASKS}
SHARES_IMAGES = [name for name in choices("method") if issubclass(client_class(name), ImageCondenser)]
CONDENSES = [name for name in choices("method") if issubclass(client_class(name), CondensedClient)]
# Classifiers' own methods play in stages, but for those whose server trains on condensed images.
IN_STAGES = [
    name
    for name in choices("method")
    if client_class(name).needs is TASKS["classifier"] and name not in CONDENSES
]
CONTRASTIVE_ONLY = [name for name in choices("method") if client_class(name).needs is TASKS["contrastive"]]
OWN = {
    **{m: ["public.count=8", "method.server.distillation.queue=64"] for m in CONTRASTIVE_ONLY},
    "deep_svdd": ["method.client.pretraining=1"],
    "fedmix": ["method.client.local_epochs=1", "method.client.weight=0.3"],
    "fedgen": ["method.client.local_epochs=1", "method.client.hidden=8", "method.server.steps=2"],
    "fedgan": ["method.client.local_epochs=1", "method.client.width=8"],
    "dfrd": ["method.client.local_epochs=1", "method.server.width=8", "method.server.steps=1"],
    "desa": [
        "method.client.local_epochs=1",
        "method.client.anchors=2",
        "method.client.min_class_images=1",
        "method.client.condensation.steps=2",
        "method.client.condensation.batch=4",
    ],
    "fedrep": ["partition=iid"],  # under any task, in place of its preset's stages
    "gldp": ["method.client.base_epochs=1", "method.client.head_epochs=2"],
    "creff": ["method.client.local_epochs=1", "method.server.retraining_epochs=2"],
    "fedic": [
        "method.client.local_epochs=1",
        "method.server.steps=2",
        "public.count=8",
        "partition.server_labelled=2",
    ],
    **{
        m: [
            "partition=iid",
            "method.client.min_class_images=1",
            "method.client.min_synthetic=2",
            "method.client.condensation.steps=2",
            "method.client.condensation.batch=4",
            "method.server.training.epochs=2",
        ]
        for m in SHARES_IMAGES
    },
    "fedvck_sums": [
        "partition=iid",
        "method.server.images=2",
        "method.server.descent.steps=2",
        "method.server.training.epochs=2",
    ],
}
# Classes that come stage after stage, for methods that are about them.
STREAM = ["partition=task_stream", "partition.classes=2", "partition.stages=2", "partition.imbalance=1"]
