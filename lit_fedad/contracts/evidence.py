"""What the messages of a method show of single images: the answer of a method to audits, which name none.

An observer sees what the server sends to a client and what the client sends back. A method lists what these messages
hold, in terms that any attack understands: vectors, moments, weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from lit_fedad.contracts.client import Client
from lit_fedad.contracts.message import Message, MessageSpec, Update
from lit_fedad.contracts.randomness import Context
from lit_fedad.core.errors import UserError

OfBatch = Callable[[Mapping[str, Any]], Tensor]
"""Computes a tensor of a batch of the data module, one row an image."""


@dataclass(frozen=True)
class SharedBank:
    """Vectors that the features of images lie near to.

    Attributes:
        vectors: Vectors [n, C].
        features: Computes patch features [B, P, C].
    """

    vectors: Tensor
    features: OfBatch


@dataclass(frozen=True)
class SharedMoments:
    """Mean and covariance of features.

    Attributes:
        mean: Mean [C], float64.
        covariance: Covariance [C, C], float64.
        features: Computes patch features [B, P, C], on the CPU.
    """

    mean: Tensor
    covariance: Tensor
    features: OfBatch


@dataclass(frozen=True)
class SharedSubspace:
    """Subspaces that the features of images lie in, one of them each image's.

    Attributes:
        centre: Their centres [N, C].
        basis: Orthogonal directions outside of them [N, C, K].
        features: Computes patch features [B, P, C].
    """

    centre: Tensor
    basis: Tensor
    features: OfBatch


@dataclass(frozen=True)
class SharedPrototypes:
    """Mean logits of classes, or their mean features.

    Attributes:
        means: Mean logits, or features, of each class that was sent [c, K].
        classes: These classes [c].
        logits: Computes the logits, or features, [B, K] that are averaged.
    """

    means: Tensor
    classes: Tensor
    logits: OfBatch


@dataclass(frozen=True)
class ChangedLayer:
    """The change of a linear layer whose outputs are class logits.

    Attributes:
        weight: Change of the weight [K, D].
        bias: Change of the bias [K].
        inputs: Computes the layer's inputs [B, D] before the change.
        logits: Computes its outputs [B, K] before the change.
    """

    weight: Tensor
    bias: Tensor
    inputs: OfBatch
    logits: OfBatch


@dataclass(frozen=True)
class SharedModel:
    """A model that predicts: the live client with what it received, or with the upload (`Evidence.predict`)."""


Shown = SharedBank | SharedMoments | SharedSubspace | SharedPrototypes | ChangedLayer | SharedModel
"""What a message can show."""


@dataclass(frozen=True)
class SentImages:
    """Images that are sent as they are.

    Attributes:
        images: Returns those of an upload in [0, 1] [n, ch, H, W].
    """

    images: Callable[[Message], Tensor]


@dataclass(frozen=True)
class SentBank:
    """A bank of features, which images can be sought for.

    Attributes:
        vectors: Returns a client's own vectors [n, C], of the message that it received and the one that it sent.
        encode: Computes patch features [B, P, C] of normalised images [B, ch, H, W], differentiably.
        of_images: Computes the bank [n, C] of some images.
        ordered: Whether vector i is of position i of the images.
    """

    vectors: Callable[[Message, Message], Tensor]
    encode: Callable[[Tensor], Tensor]
    of_images: Callable[[DataLoader, Context], Tensor]
    ordered: bool


@dataclass(frozen=True)
class SentWeights:
    """Trained weights of a classifier, whose change can be sought for as a gradient.

    Attributes:
        logits: Computes class logits [B, K] of normalised images [B, ch, H, W], differentiably.
        classes: Number of classes K.
        settle: Loads the weights that the client's gradients are taken at, as far as the server knows them, where they
            are not those that its own begin with.
    """

    logits: Callable[[Tensor], Tensor]
    classes: int
    settle: Callable[[], None] = lambda: None


Invertible = SentImages | SentBank | SentWeights
"""What of an upload images can be reconstructed from."""


@dataclass(frozen=True)
class Evidence:
    """What an observer of a method's messages learns of single images; nothing by default.

    Each function is called with the live client after it has received the server's message.

    Attributes:
        sent: Lists what an upload shows. Takes the client, whose personal state is that before the run, the message
            that it received, and the upload.
        received: Lists what the server's message shows. Takes the client and the message.
        predict: Turns the live client (second) into the best predictor that can be built from an upload (third) before
            the server (first) merges it, and raises `UserError` where there is none; None where uploads score no image.
        invertible: Says what of an exchange's upload images can be reconstructed from; None for nothing. Takes the
            client, and the declared forms of what it receives and sends.
        densities: Returns means [n, C] and covariances [n, C, C] of the Gaussians that each client sent last, by
            client; takes the server. None where no densities are sent.
    """

    sent: Callable[[Any, Message, Message], Sequence[Shown]] = lambda client, received, sent: ()
    received: Callable[[Any, Message], Sequence[Shown]] = lambda client, received: ()
    predict: Callable[[Any, Any, Update], None] | None = None
    invertible: Callable[[Any, MessageSpec, MessageSpec], Invertible | None] = lambda client, received, sent: (
        None
    )
    densities: Callable[[Any], Mapping[int, tuple[Tensor, Tensor]]] | None = None


def nothing_to_attack(client: Client) -> UserError:
    """Builds the error for methods whose uploads score no image."""
    return UserError(
        f"{type(client).__name__}: what its clients send scores no image: there is nothing to attack"
    )
