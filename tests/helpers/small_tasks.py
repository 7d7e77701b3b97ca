"""Small forms of the tasks, with data that suit them."""

from __future__ import annotations

import numpy as np

MOTIFS = (
    "data=motif_classes", "~data.train_per_product", "~data.test_per_product", "data.train_per_class=12",
    "data.test_per_class=3", "data.size=16", "image.size=16",
)  # fmt: skip
"""Drawn classes of small images."""

STREAM = (
    "experiment=gldp_small", *MOTIFS, "partition=task_stream", "partition.stages=2", "partition.imbalance=2",
    "partition.server_labelled=2", "encoder.channels=4",
)  # fmt: skip
"""Classes that come in two stages."""

CONDENSING = (
    *MOTIFS, "partition=iid", "encoder.channels=4", "method.client.min_class_images=3", "method.client.min_synthetic=2",
    "method.client.condensation.steps=2", "method.client.condensation.batch=4", "method.server.training.epochs=2",
)  # fmt: skip
"""Classes whose images clients condense."""

SEMANTIC = (
    "experiment=semantic_small", "features=train", "data=motifs", "~data.train_per_product", "~data.test_per_product",
    "data.train_per_class=5", "data.test_per_class=1", "data.train_per_set=2", "data.test_per_set=5", "data.size=16",
    "image.size=16", "encoder.channels=4", "task.projection=8", "public.count=8",
    "method.server.distillation.queue=64", "task.warmup=1", "partition.clients=2",
)  # fmt: skip
"""Drawn classes of which one is normal, for FADngs."""


def small_tasks(folder):
    """Overrides by task; labelled images are written to the folder."""
    draw = np.random.default_rng(0)
    labels = np.arange(24) % 3
    images = (draw.integers(0, 60, (24, 32, 32, 3)) + 60 * labels[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "train.npz", images=images, labels=labels)
    np.savez(folder / "test.npz", images=images[:9], labels=labels[:9])
    motifs = [
        "data=motifs", "~data.train_per_product", "~data.test_per_product", "data.train_per_class=4",
        "data.test_per_class=1", "data.train_per_set=1", "data.test_per_set=5", "data.size=16", "image.size=16",
    ]  # fmt: skip
    untrained = ["features=frozen", "backbone=test_resnet", "features.size=32", "features.hidden=0"]
    return {
        "memory_bank": ["task=memory_bank", "data=textures", "data.size=64", "data.train_per_product=8"],
        "subspace": ["task=subspace", "data=textures", "data.size=64", "data.train_per_product=8"],
        "padim": ["task=padim", "task.channels=5", "data=textures", "data.size=64", "data.train_per_product=8"],
        "simplenet": ["task=simplenet", "task.hidden=8", "data=textures", "data.size=64", "data.train_per_product=8"],
        "dinomaly": [
            "task=dinomaly", "backbone.name=vit_tiny_patch16_224", "backbone.layers=[0,1]", "data=textures",
            "data.size=64", "data.train_per_product=8",
        ],
        "efficient_ad": [
            "task=efficient_ad", "task.width=8", "task.latent=4", "data=textures", "data.size=64",
            "data.train_per_product=8",
        ],
        "classifier": [
            "task=classifier_convnet", "encoder.channels=8", "data=packed", f"data.root={folder}",
            "data.train=train.npz", "data.test=test.npz", "~data.train_per_product", "~data.test_per_product",
        ],
        "autoencoder": [
            "task=autoencoder", "features=train", "encoder=convnet", "encoder.channels=8", "task.decoder.channels=8",
            "data=textures", "data.size=64", "data.train_per_product=8",
        ],
        "feature_autoencoder": [
            "task=autoencoder", "features=frozen", "features.hidden=8", "task.bottleneck=4", "data=textures",
            "data.size=64", "data.train_per_product=8",
        ],
        "reverse_distillation": [
            "task=reverse_distillation", "task.blocks=1", "image.size=64", "data=textures", "data.size=64",
            "data.train_per_product=8",
        ],
        "deep_svdd": [
            "task=deep_svdd", "features=train", "encoder.channels=4", "task.decoder.channels=4", "task.width=8",
            *motifs,
        ],
        "panda": [
            "task=panda", "features=frozen", "backbone=test_resnet", "features.size=32", "features.hidden=8", *motifs,
        ],
        "one_class_svm": [
            "task=one_class_svm", "features=frozen", "backbone=test_resnet", "features.size=32", "task.hidden=8",
            "task.width=8", "task.fourier=16", *motifs,
        ],
        "csi": [
            "task=csi", "features=train", "encoder=resnet18_narrow", "encoder.channels=4", "task.projection=8",
            "task.samples=1", *motifs,
        ],
        "elsa": [
            "task=elsa", "features=train", "encoder=resnet18_narrow", "encoder.channels=4", "task.projection=8",
            "task.prototypes=8", "task.warmup=1", *motifs,
        ],
        "feature_neighbours": ["task=feature_neighbours", *untrained, *motifs],
        "feature_svm": ["task=feature_svm", *untrained, *motifs],
        "contrastive": [
            "task=contrastive", "features=train", "encoder=resnet18_narrow", "encoder.channels=4", "task.projection=8",
            "task.warmup=1", *motifs,
        ],
    }  # fmt: skip
