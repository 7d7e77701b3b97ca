"""Federations small enough for LiRA to play them in seconds, and a spy on what they held."""

from __future__ import annotations

from dataclasses import dataclass, field

from lit_fedad.federation.loop import Federation

# Two clients with ten images each, 16 pixels wide: a network learns by heart sooner than it learns the classes.
TINY = [
    *("data=motif_classes", "data.train_per_class=2", "data.test_per_class=2", "data.size=16"),
    *("image.size=16", "image.resize=null", "backbone=null", "partition=iid", "partition.clients=2"),
    *("task=classifier_convnet", "encoder.channels=8", "task.augment=false", "batch_size=5"),
    *("evaluation.every=9", "evaluation.pictures=0", "tracking=off", "fabric.accelerator=cpu"),
]
OVERFIT = ("method=fedavg", "rounds=2", "method.client.local_epochs=15", "task.learning_rate=0.02")


@dataclass
class Spy:
    """What federations held, by the name of their folder."""

    held: dict[str, list[list[int]]] = field(default_factory=dict)

    def run(self, federation: Federation, original):
        name = federation.checkpoints.folder.parent.name
        self.held[name] = [list(own) for own in federation.data.partition]
        return original(federation)
