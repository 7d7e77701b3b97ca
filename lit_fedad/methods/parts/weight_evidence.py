"""Says what weights and condensed images in messages show of single images (`Evidence`)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_fedad.contracts import Client, Message, MessageSpec, Task
from lit_fedad.contracts.evidence import (
    ChangedLayer,
    Invertible,
    SentImages,
    SentWeights,
    SharedModel,
    Shown,
)
from lit_fedad.methods.parts.condensed_images import IMAGES
from lit_fedad.tasks.classifier import Classifier
from lit_fedad.tasks.patches import CHANNEL_STATISTICS


def weights_sent(client: Client, received: Message, sent: Message) -> list[Shown]:
    """Lists what an upload shows of single images: a classifier's changed last layer, and weights that predict."""
    shown, change = list[Shown](), _last_layer(client.task, received, sent)
    if change is not None:
        shown.append(change)
    return [*shown, SharedModel()] if _predicts(client.task, received, sent) else shown


def weights_received(client: Client, received: Message) -> list[Shown]:
    """Lists what the server's message shows of single images: weights that predict, if it has some."""
    return [SharedModel()] if _predicts(client.task, received, received) else []


def invertible_model(client: Client, received: MessageSpec, sent: MessageSpec) -> Invertible | None:
    """Says whether an upload holds images, or an attack can reconstruct images from a classifier's changed weights."""
    task = client.task
    if IMAGES in sent:
        return SentImages(_as_pixels)
    if isinstance(task, Classifier) and not sent.keys().isdisjoint(_weights(task) & received.keys()):
        return SentWeights(lambda images: task.classifier(task({"image": images})), task.classes)
    return None


def _as_pixels(sent: Message) -> Tensor:
    images = sent[IMAGES]
    return images / 255 if images.dtype == torch.uint8 else images.clamp(0, 1)


def _weights(task: Task) -> set[str]:
    return {name for name, _ in task.named_parameters()}


def _predicts(task: Task, received: Message, message: Mapping[str, Any]) -> bool:
    """Returns whether an observer can predict with a message: it holds weights, and a bank, if needed, is sent too."""
    return not lacks_bank(task, received) and not message.keys().isdisjoint(_weights(task))


def lacks_bank(task: Task, received: Message) -> bool:
    """Returns whether predictions need what clients compute from local images, such as a bank, which is never sent."""
    return task.prepares and received.keys().isdisjoint({*task.local_buffers} - {*CHANNEL_STATISTICS})


def _last_layer(task: Task, received: Message, sent: Message) -> ChangedLayer | None:
    """Computes how weight and bias of the last layer changed in training; None if they were not received and sent."""
    if not isinstance(task, Classifier) or not isinstance(task.classifier, nn.Linear):
        return None
    # The values that the client loaded: APPLE's message holds the models of all clients.
    before = {f"classifier.{name}": value.detach() for name, value in task.classifier.named_parameters()}
    if not all(n in received and n in sent and sent[n].shape == value.shape for n, value in before.items()):
        return None
    changes = [sent[name].to(value) - value for name, value in before.items()]
    bias = changes[1] if len(changes) > 1 else changes[0].new_zeros(len(changes[0]))
    return ChangedLayer(changes[0], bias, task, lambda batch: task.classifier(task(batch)))
