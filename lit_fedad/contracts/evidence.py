"""What the messages of a method show about single images; audits read it, and so need not know any method.

An observer sees what the server sends to a client and what the client sends back. A method lists what these messages
contain, in terms that any attack understands: vectors, moments, weights.
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
"""A function that computes a tensor from a batch of the data module, with one row for each image."""


@dataclass(frozen=True)
class SharedBank:
    """Vectors that lie close to the features of images.

    Attributes:
        vectors: The vectors [n, C].
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
    """N affine subspaces; the features of an image lie in one of them.

    Attributes:
        centre: Centres of the subspaces [N, C].
        basis: Directions orthogonal to each subspace [N, C, K].
        features: Computes patch features [B, P, C].
    """

    centre: Tensor
    basis: Tensor
    features: OfBatch


@dataclass(frozen=True)
class SharedPrototypes:
    """Mean logits of classes, or their mean features.

    Attributes:
        means: Mean logits, or mean features, of each class that was sent [c, K].
        classes: Numbers of the classes that were sent [c].
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
        logits: Computes the layer's outputs [B, K] before the change.
    """

    weight: Tensor
    bias: Tensor
    inputs: OfBatch
    logits: OfBatch


@dataclass(frozen=True)
class SharedModel:
    """A model that predicts: the live client with the received message, or with the upload (`Evidence.predict`)."""


Shown = SharedBank | SharedMoments | SharedSubspace | SharedPrototypes | ChangedLayer | SharedModel
"""The kinds of content by which a message can show whether an image was trained with."""


@dataclass(frozen=True)
class SentImages:
    """Images that are sent as they are.

    Attributes:
        images: Returns the images in an upload [n, ch, H, W], in [0, 1].
    """

    images: Callable[[Message], Tensor]


@dataclass(frozen=True)
class SentBank:
    """A bank of features, from which an attack can reconstruct images that have such features.

    Attributes:
        vectors: Returns a client's own vectors [n, C]; takes the message that the client received and the one that it
            sent.
        encode: Computes patch features [B, P, C] of normalised images [B, ch, H, W], differentiably.
        of_images: Computes the bank [n, C] that some images would give.
        ordered: Whether vector i belongs to position i of the images.
    """

    vectors: Callable[[Message, Message], Tensor]
    encode: Callable[[Tensor], Tensor]
    of_images: Callable[[DataLoader, Context], Tensor]
    ordered: bool


@dataclass(frozen=True)
class SentWeights:
    """Trained weights of a classifier, whose change an attack can invert as it inverts a gradient.

    Attributes:
        logits: Computes class logits [B, K] of normalised images [B, ch, H, W], differentiably.
        classes: Number of classes K.
        settle: Loads the weights at which the client computes its gradients, as far as the server knows them; does
            nothing where these are the weights that the client starts from.
    """

    logits: Callable[[Tensor], Tensor]
    classes: int
    settle: Callable[[], None] = lambda: None


Invertible = SentImages | SentBank | SentWeights
"""The kinds of content of an upload from which images can be reconstructed."""


@dataclass(frozen=True)
class Evidence:
    """What an observer of a method's messages learns about single images; nothing by default.

    Each function is called with the live client after it has received the server's message.

    Attributes:
        sent: Lists what an upload shows. Takes the client (with the personal state that it had before the run), the
            message that it received, and the upload.
        received: Lists what the server's message shows. Takes the client and the message.
        predict: Turns the live client into the best predictor that can be built from an upload before the server
            merges it, and raises `UserError` where none can be built. Takes the server, the client and the upload. None
            where uploads score no image.
        invertible: Returns the part of an exchange's upload from which images can be reconstructed, or None. Takes the
            client, and the declared forms of the messages that it receives and sends.
        densities: Returns, by client, the means [n, C] and covariances [n, C, C] of the Gaussians that each client sent
            last; takes the server. None where no densities are sent.
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
