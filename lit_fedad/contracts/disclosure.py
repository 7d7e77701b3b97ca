"""Declarations of what a message reveals about a client's images; every exchange and every client query has one."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar


class Kind(Enum):
    """The kind of information that a message reveals, in order from the least revealing to the images themselves."""

    COUNTS = "counts"
    SUMS = "sums"
    WEIGHTS = "weights"
    CLASS_STATISTICS = "class_statistics"
    PATCHES = "single_patches"
    SYNTHETIC_IMAGES = "synthetic_images"
    MEAN_IMAGES = "mean_images"
    IMAGES = "images"

    @property
    def words(self) -> str:
        """The kind's name as words of a sentence, such as "single patches"."""
        return self.value.replace("_", " ")


@dataclass(frozen=True)
class Disclosure:
    """One piece of information about a client's images that a message reveals.

    Attributes:
        kind: Kind of the information.
        what: Description of the information, for a reader who does not know the method.
        images: Smallest number of images that one value is computed from, for sums, weights (`Task.images_behind`),
            class statistics and mean images; None for all images of the client.
        noised: Whether the client adds noise of differential privacy before anybody else sees the values.
        by_product: Whether each value is computed from the images of a single product.
    """

    kind: Kind
    what: str
    images: int | None = None
    noised: bool = False
    by_product: bool = False


Disclosures = tuple[Disclosure, ...]


@dataclass(frozen=True)
class DisclosedBy:
    """The disclosures of an exchange, where they depend on the client's settings.

    Attributes:
        of: Returns the disclosures; takes the live client.
    """

    of: Callable[[Any], Disclosures]


TRAINED_WEIGHTS = Disclosure(Kind.WEIGHTS, "weights of the model, trained on the images")
"""The disclosure of methods that send trained weights, as most do."""


def counted(what: str) -> Disclosure:
    """Declares that counts, or a histogram, are sent."""
    return Disclosure(Kind.COUNTS, what)


def summed(what: str, images: int | None = None, by_product: bool = False) -> Disclosure:
    """Declares that sums or means over images are sent.

    Args:
        what: Description of the summed or averaged values.
        images: See `Disclosure`.
        by_product: See `Disclosure`.
    """
    return Disclosure(Kind.SUMS, what, images, by_product=by_product)


def by_class(what: str, images: int = 1) -> Disclosure:
    """Declares that statistics of each class or group of images are sent; a group may have as few as ``images``."""
    return Disclosure(Kind.CLASS_STATISTICS, what, images)


class Discloses:
    """The base of classes that send a message.

    A subclass that overrides the sending method must declare ``discloses``: what its message reveals about images.

    Attributes:
        sends: Name of the sending method.

    Raises:
        TypeError: When a subclass is defined that overrides the sending method without declaring ``discloses``, or
            whose ``discloses`` is no tuple of `Disclosure`.
    """

    sends: ClassVar[str] = "send"

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if cls.sends in vars(cls) and "discloses" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides {cls.sends}: say discloses = (...) beside it, what its message tells of a"
                " client's images (lit_fedad.contracts.disclosure)"
            )
        declared = vars(cls).get("discloses", ())
        parts = declared if isinstance(declared, tuple) else (declared,)
        if isinstance(declared, Disclosure) or any(isinstance(one, str | Kind) for one in parts):
            raise TypeError(
                f"{cls.__name__}: discloses={declared!r} must be a tuple of such as summed('...')"
            )
