"""Many forged messages over all methods, and the table of what they did."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save

from helpers.fuzz.declared import lie
from helpers.fuzz.record import Recording, overrides, record
from helpers.fuzz.trial import BAD, Found, Stage, Verdict
from helpers.fuzz.wire import forge
from helpers.pairs import IN_STAGES, PAIRS, differ_in_code
from helpers.small_tasks import small_tasks
from lit_fedad.core.config_groups import choices
from lit_fedad.core.errors import UserError
from lit_fedad.report.html import markdown_table

VARIANTS = {
    "8 bits": ("federated_bank", "fedavg", "fadngs_code"),
    "16 bits": ("fadngs", "federated_patchcore"),
    "two clients": ("fedavg", "federated_bank", "dbe", "fadngs", "feddm", "gldp"),
    "not robust": ("fedavg", "federated_bank", "federated_patchcore", "scaffold", "fadngs", "gldp"),
    "median": ("fedavg",),
    "krum": ("fedavg",),
}
"""Methods that are played once more: with coded messages, with nobody to tell who of two lies, with other defences."""
GIVEN = {
    "": [],
    "8 bits": ["federation=byte"],
    "16 bits": ["federation=half"],
    "two clients": ["partition.clients=2"],
    "not robust": ["federation/robust=off"],
    "median": ["federation/robust=median"],
    "krum": ["federation/robust=krum"],
}
FOREIGN = [
    save({"memory": torch.zeros(16, 80), "counts": torch.ones(16), "radii": torch.ones(16)}),
    save({"count": torch.tensor(4), "mean": torch.zeros(80), "variance": torch.ones(80)}),
    save({"classifier.weight": torch.zeros(3, 128), "classifier.bias": torch.zeros(3)}),
]
"""Messages of other methods."""
# A server that learns by itself takes most of the time.
SHORT = {
    "creff": ["method.server.matching_steps=3", "method.server.features_per_class=3"],
    "dfrd": [
        "method.server.batch_size=8",
        "method.server.generator_steps=1",
        "method.server.distillation_steps=1",
    ],
    "fedic": ["encoder.channels=4"],
    **{
        method: ["method.server.distillation.epochs=1", "encoder.channels=2", "task.projection=4"]
        for method in ("fadngs", "fadngs_code", "fadngs_literal")
    },
}


@dataclass(frozen=True)
class Trial:
    """A forged message and what became of it; name and number draw it again.

    Attributes:
        name: Method, task and coding.
        number: Its number in the campaign of this name.
        kind: ``declared`` or ``wire``.
        what: Exchange, client and lie.
        found: What became of it.
    """

    name: str
    number: int
    kind: str
    what: str
    found: Found


def plays(all_of_them: bool) -> list[tuple[str, str, str]]:
    """Lists method, task and variant: one task of each method of its own code, or of all two, and the variants."""
    found = []
    for method in choices("method") if all_of_them else differ_in_code(choices("method")):
        suiting = [task for (name, task), why in PAIRS.items() if name == method and why is None]
        wanted = ("classifier", "memory_bank") if all_of_them else ("classifier",)
        found += [(method, task, "") for task in wanted if task in suiting] or [(method, suiting[0], "")]
    if not all_of_them:
        return found
    first = {method: task for method, task, _ in reversed(found)}
    return found + [(method, first[method], variant) for variant, own in VARIANTS.items() for method in own]


def stage(method: str, task: str, variant: str, folder: Path, *own: str) -> Stage:
    """Records a small honest run of `plays`; the folder may be shared by many."""
    tasks = small_tasks(folder)
    small = ["data.train_per_product=4"] if "data=textures" in tasks[task] else []
    if task == "memory_bank":
        small += ["task.head.hidden=16", "task.head.grid_size=2"] if _has_head(method) else []
    given = overrides(method, task, tasks, folder, *small, *SHORT.get(method, []), *GIVEN[variant], *own)
    return Stage(record(", ".join(filter(None, (method, task, variant))), given))


def skewed(method: str, task: str, seed: int, folder: Path) -> list[str]:
    """Overrides by which two of four clients hold one image and two; stages are skewed by themselves."""
    if method in IN_STAGES:
        return [f"seed={seed}"]
    images = list(range({"classifier": 24, "contrastive": 12}.get(task, 20)))
    Random(seed).shuffle(images)
    half = 3 + (len(images) - 3) // 2
    path = folder / f"skewed_{task}_{seed}.json"
    path.write_text(json.dumps({"clients": [images[:1], images[1:3], images[3:half], images[half:]]}))
    return [f"seed={seed}", "partition=file", f"partition.path={path}", "~partition.clients"]


def _has_head(method: str) -> bool:
    sums = ("federated_bank",)
    return method not in (*sums, "federated_patchcore", "nearest_neighbour")


def play(stage: Stage, number: int, seed: int) -> Trial:
    """Plays one trial of a stage; even numbers are declared where clients send anything, odd ones are wire."""
    recording = stage.recording
    draw = Random(f"{seed} {recording.name} {number}")
    index = _moment(recording, draw)
    moment = recording.moments[index]
    client = draw.choice(sorted(moment.blobs))
    honest, blob = stage.honest(index, client), moment.blobs[client]
    kind = "wire" if number % 2 or not honest.message else "declared"
    if kind == "wire":
        others = [b for i, m in enumerate(recording.moments) if i != index for b in m.blobs.values() if b]
        forged, what = forge(honest, blob, [*others, *FOREIGN], draw)
        found = stage.play(index, client, forged)
    else:
        message, what = lie(honest, draw)
        try:
            forged = stage.receiver.link.pack(message, honest.spec, moment.context, "the client")
        except UserError as error:
            found = Found(Verdict.REJECTED, str(error))
        else:
            found = stage.play(index, client, forged)
    where = f"round {moment.context.round}, {moment.exchange.name}, client {client}"
    return Trial(recording.name, number, kind, f"{where}: {what}", found)


def _moment(recording: Recording, draw: Random) -> int:
    """Draws an exchange; those in which clients send nothing are drawn seldom."""
    talking = [i for i, m in enumerate(recording.moments) if any(m.blobs.values())]
    silent = [i for i in range(len(recording.moments)) if i not in talking]
    return draw.choice(silent if not talking or (silent and draw.random() < 0.03) else talking)


def bad(found: Iterable[Trial]) -> list[str]:
    """One line for each trial that should not have ended as it did."""
    return [
        f"{t.found.verdict}: {t.name} #{t.number} {t.kind}, {t.what}: {t.found.why}"
        for t in found
        if t.found.verdict in BAD
    ]


def tabulated(found: list[Trial]) -> str:
    """The verdicts by method and kind, over all tasks and variants, as a Markdown table."""
    counts = Counter()
    for trial in found:
        for name in (trial.name.split(",")[0], "**all**"):
            counts[name, trial.kind, trial.found.verdict] += 1
    rows = [
        [name, kind, *(str(counts[name, kind, verdict]) for verdict in Verdict)]
        for name in [*dict.fromkeys(trial.name.split(",")[0] for trial in found), "**all**"]
        for kind in ("declared", "wire")
        if any(counts[name, kind, verdict] for verdict in Verdict)
    ]
    return markdown_table(["method", "kind", *(str(v) for v in Verdict)], rows)
