"""Three sites with labelled images in memory, of classes or with semantic anomalies, and the same in one process."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from helpers.pairs import OWN, PAIRS, differ_in_code, of_method
from helpers.sites import DEBUG, HERE, NAMES, OPEN, OwnTests
from helpers.small_tasks import small_tasks
from lit_fedad.core.config import compose
from lit_fedad.core.config_groups import choices
from lit_fedad.evaluation.accuracy import AccuracyEvaluator, test_images
from lit_fedad.evaluation.calibration import alphas, calibration_scores
from lit_fedad.evaluation.predict import ImageScorer
from lit_fedad.evaluation.semantic import SemanticEvaluator, SemanticTest
from lit_fedad.experiment.train import train
from lit_fedad.report.console import Display
from lit_fedad.sites.settings import SiteSettings
from lit_fedad.sites.site import Site

CLASSES = ("dark", "grey", "light")
HELD = {"north": ("grey", "dark"), "east": CLASSES, "south": ("light", "grey")}
"""Classes of each site, as its own file numbers them."""

NEED_ALL_IMAGES = {"centralised", "nearest_neighbour"}
NEEDS_LABELLED_IMAGES = {"fedic"}
PLACES = ("/_anomalous", "/embedded/2")
"""Entries of personal states that are places of images in their set: a site counts its own from 0."""
STAY = NEED_ALL_IMAGES | NEEDS_LABELLED_IMAGES
CROSS = differ_in_code([m for m in choices("method") if m not in STAY])
LEARN_CLASSES = [m for m in CROSS if PAIRS[m, "classifier"] is None]
SEMANTIC = [
    *((m, "contrastive") for m in CROSS if PAIRS[m, "contrastive"] is None and m not in LEARN_CLASSES),
    ("fedavg", "contrastive"),
    *((m, m) for m in ("deep_svdd", "panda", "elsa")),
    ("fedavg", "csi"),
    ("local", "one_class_svm"),
    ("local", "feature_neighbours"),
]
"""Methods that learn no classes, and weights that are shared or stay."""

_PER_CLASS = {"train": 6, "test": 3}
_TOGETHER = "all"
ODD = "odd"  # the set of semantic anomalies


def words_of(method, task, folder):
    """A small form of a method and its task: words of the federation, and those of its coordinator."""
    form = [
        w
        for w in small_tasks(folder)[task]
        if w.lstrip("~").split(".")[0].split("=")[0] not in ("data", "image")
    ]
    own = [word for word in OWN.get(method, []) if not word.startswith("partition")]
    public = [word for word in own if word.startswith("public")]
    return [
        f"method={method}",
        *of_method(method, form),
        *(w for w in own if w not in public),
        *DEBUG,
    ], public


def pack(folder, own_numbers):
    """Writes every site's images to a folder of its own, and all of them to another.

    Sites number their classes as they please where `own_numbers` is set, and else as all do.
    """
    draw = np.random.default_rng(0)
    whole = {part: ([], []) for part in ("train", "test", "odd")}
    for name in NAMES:
        (folder / name).mkdir()
        for part, count in _PER_CLASS.items():
            labels = np.arange(count * len(HELD[name])) % len(HELD[name])
            shades = np.array([CLASSES.index(own) for own in HELD[name]])[labels]
            images = _shaded(draw, shades)
            named = (labels, HELD[name]) if own_numbers else (shades, CLASSES)
            _save(folder / name / f"{part}.npz", images, *named)
            whole[part][0].append(images)
            whole[part][1].append(shades)
        odd = _shaded(draw, np.full(4, 3))
        _save(folder / name / "odd.npz", odd, np.zeros(4, int), (ODD,))
        whole["odd"][0].append(odd)
        whole["odd"][1].append(np.zeros(4, int))
    (folder / _TOGETHER).mkdir()
    for part, (images, labels) in whole.items():
        names = (ODD,) if part == "odd" else CLASSES
        _save(folder / _TOGETHER / f"{part}.npz", np.concatenate(images), np.concatenate(labels), names)
    ends = np.cumsum([0, *map(len, whole["train"][1])])
    parts = [list(range(begin, end)) for begin, end in pairwise(ends)]
    (folder / "parts.json").write_text(json.dumps(parts))


def class_data(root):
    """What an operator says of labelled images."""
    return ("data=packed", f"data.root={root}", "data.train=train.npz", "data.test=test.npz")


def semantic_data(root):
    """What an operator says of images of which other classes are the anomalies."""
    return (
        "data=semantic_cifar10_packed", f"data.root={root}", "data.normal.train=train.npz",
        "data.normal.test=test.npz", "~data.anomalies.imagenet", "data.anomalies.cifar100.train=null",
        "data.anomalies.cifar100.test=odd.npz", "data.contaminants=null",
    )  # fmt: skip


_MORE_THAN_THERE_ARE = {
    class_data: ("data.train_per_class=1000", "data.test_per_class=1000"),
    semantic_data: (
        "data.normal.train_per_class=1000", "data.normal.test_per_class=1000", "data.test_per_set=1000",
    ),
}  # fmt: skip
"""Limits in place of those of the debug preset, so that one process reads all that the sites have."""


def sites(folder, data):
    """Three sites."""
    return [
        Site(
            SiteSettings(
                name,
                folder / name,
                data(folder / name),
                (*HERE, f"cache.folder={folder / name / 'cache'}"),
                policy=OPEN,
            ),
            Display(quiet=True),
        )
        for name in NAMES
    ]


def in_one_process(folder, words, data, *own):
    """The run of the same federation, whose clients are scored on their own test images."""
    config = compose([
        *words, *data(folder / _TOGETHER), *_MORE_THAN_THERE_ARE[data], "partition=file",
        f"partition.path={folder / 'parts.json'}", "~partition.clients", "tracking=off", f"out={folder / 'one'}",
        f"cache.folder={folder / 'cache'}", *HERE, *own,
    ])  # fmt: skip
    clients = OwnTests(partial(_evaluator_of, data))
    train(config, clients, quiet=True)
    return clients.run


def _evaluator_of(data, run):
    counts = torch.from_numpy(run.local.partition.counts(run.local.images))
    judges = {client: _judge(run, client) for client in run.federation.clients}
    if data is class_data:
        tested = torch.stack([test_images(judge.loader, len(CLASSES)) for judge in judges.values()])
        evaluator = AccuracyEvaluator(None, counts, run.fabric, tested, common=False)
    else:
        evaluator = SemanticEvaluator(run.local.images.anomalies, common=False)
    evaluator.score = lambda client, number: evaluator.unpack(
        evaluator.pack(judges[number].score(client, number))
    )
    return evaluator


def _judge(run, client):
    """Scores a client of one process on the images that its site holds: those of its turn in the files."""
    data, module = run.local, run.local.module
    odd = 4 if len(data.images.classes) > len(CLASSES) else 0
    ends = np.cumsum([0, *(_PER_CLASS["test"] * len(HELD[name]) for name in NAMES)])
    chosen = [
        *range(ends[client], ends[client + 1]),
        *range(ends[-1] + odd * client, ends[-1] + odd * (client + 1)),
    ]
    loader = module._loader(module.test, chosen, module.eval_batch_size, False, torch.Generator())
    if not odd:
        return AccuracyEvaluator(
            loader, torch.from_numpy(data.partition.counts(data.images)), run.fabric, common=False
        )
    scores = calibration_scores(
        run.config, data.images, data.partition, module, run.fabric, run.federation.method
    )
    test = SemanticTest(
        ImageScorer(loader, run.fabric),
        data.images.test_labels[chosen],
        data.images.normal_classes,
        scores,
        alphas(run.config)[0],
    )
    return SemanticEvaluator(data.images.anomalies, test, common=False)


def _shaded(draw, shades):
    noise = draw.integers(0, 60, (len(shades), 32, 32, 3))
    return (noise + 60 * shades[:, None, None, None]).astype(np.uint8)


def _save(path, images, labels, classes):
    np.savez(path, images=images, labels=labels, classes=np.array(classes))
