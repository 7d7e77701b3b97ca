"""Finds the images of an update that are new: those that no client holds, and that are no test images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.data.additions import Addition
from lit_fedad.data.content import content_hashes
from lit_fedad.data.image_files import entries
from lit_fedad.data.partition import Partition
from lit_fedad.data.pictures import read_picture
from lit_fedad.data.sample import ImageSet, Sample
from lit_fedad.deployment.predict import listed
from lit_fedad.deployment.reviews import Reviews
from lit_fedad.report.console import Display

_KNOWN = "are part of the detector already, or copies"


@dataclass(frozen=True, kw_only=True)
class NewImages:
    """Finds the images of an update that no client holds yet.

    Attributes:
        folder: Folder of new normal images: with a folder for each client, named by its number, or of one client.
        client: Client whose images all are; None where there is a folder for each.
        product: Product that all images show; None where a client's images lie in a folder for each product.
        reviews: File of reviews: only images that it calls false alarms are taken; None for all.
        force: Whether new products are taken.
        clients: Numbers of the run's clients.
        images: The run's images, with those of earlier updates.
        partition: Their partition.
        memo: File of hashes that are known already; None to compute all.
        display: Shows remarks and warnings.
        page: Page that is read of a file of several; None where each file must hold a single one.
        unreadable: Errors about images that cannot be read.
    """

    folder: Path
    client: int | None = None
    product: str | None = None
    reviews: str | None = None
    force: bool = False
    clients: Sequence[int]
    images: ImageSet
    partition: Partition
    memo: Path | None
    display: Display
    page: int | None = None
    unreadable: list[UserError] = field(default_factory=list)

    def find(self) -> Addition:
        """Lists the new images of each client that has some.

        Raises:
            UserError: If there is none, a folder or client is unknown, or one is a test image of the run.
        """
        # A model trained with an image of calibration would score it too well, and the threshold would be too low.
        held = (*self.partition.clients, *self.partition.calibration)
        samples = [self.images.train[index] for indices in held for index in indices]
        known_hashes = set(self._hashes([sample.path for sample in samples]).values())
        test_hashes = set(self._hashes([sample.path for sample in self.images.test]).values())
        reviews = None if self.reviews is None else Reviews(Path(self.reviews))
        new_images, repeated = {}, 0
        for client, folder in self._folders().items():
            if client not in self.clients:
                raise UserError(f"client={client}: the run has clients {', '.join(map(str, self.clients))}")
            new, num_known = self._new(folder, known_hashes, test_hashes, reviews)
            repeated += num_known
            if new:
                new_images[client] = tuple(new)
        if not new_images:
            if self.unreadable:
                raise self.unreadable[0]
            hint = f"; the {repeated} there {_KNOWN}" if repeated else ""
            kind = "new image" if reviews is None else f"new image that {self.reviews} calls a false alarm"
            raise UserError(f"images={self.folder}: no {kind} there{hint}")
        if repeated:
            self.display.note(f"{repeated} images {_KNOWN}")
        products = {sample.category for sample in samples}
        if (
            new_products := {sample.category for images in new_images.values() for sample in images}
            - products
        ):
            if not self.force:  # a review says nothing of the product, whose name may be misspelt
                raise UserError(
                    f"product={min(new_products)}: the detector has {', '.join(sorted(products))}; force=true adds"
                    " a new one"
                )
            self.display.note(f"new products: {', '.join(sorted(new_products))}")
        return Addition(new_images)

    def _new(
        self, folder: Path, known_hashes: set[bytes], test_hashes: set[bytes], reviews: Reviews | None
    ) -> tuple[list[Sample], int]:
        """Lists the new images in a client's folder, which are known from then on, and counts those that were known."""
        paths, left_out = listed(folder)
        if left_out:
            self.display.warn(left_out)
        new, num_known = [], 0
        for path, content in self._hashes(paths).items():
            # By its path below the folder of all clients, which may have images of the same name.
            if reviews and reviews.of(path, self.folder) != "false alarm":
                continue
            if content in test_hashes:
                raise UserError(f"{path}: is a test image of the run; give others")
            if content in known_hashes:
                num_known += 1
            else:
                sample = Sample(path.resolve(), self._product(path, folder))
                if self._readable(path):
                    new.append(sample)
                    known_hashes.add(content)
        return new, num_known

    def _hashes(self, paths: Sequence[Path]) -> dict[Path, bytes]:
        return content_hashes(paths, self.memo)

    def _readable(self, path: Path) -> bool:
        """Tells whether training could read an image; warns where it could not."""
        try:
            read_picture(path, self.page)
        except UserError as error:
            self.display.warn(f"{error}; it is left out")
            self.unreadable.append(error)
            return False
        return True

    def _folders(self) -> dict[int, Path]:
        """Returns the folder of each client."""
        root = self.folder
        if not root.is_dir():
            raise UserError(
                f"images={root}: {'is a file; give its folder' if root.exists() else 'no such folder'}"
            )
        if self.client is not None:
            return {self.client: root}
        folders = entries(root)
        for path in folders:
            if not (path.is_dir() and path.name.isdecimal() and path.name == str(int(path.name))):
                numbers = f"{self.clients[0]} to {self.clients[-1]}"
                raise UserError(
                    f"{path}: is no folder named by a client's number, {numbers}; or give client=N"
                )
        return {int(path.name): path for path in folders}

    def _product(self, path: Path, folder: Path) -> str:
        """Returns the product that an image shows: the given one, else its folder's name, else the only one."""
        if self.product is not None:
            return self.product
        first, *below = path.relative_to(folder).parts
        if below:
            return first
        if len(self.images.categories) > 1:
            raise UserError(
                f"{path}: which product? give product=NAME ({', '.join(self.images.categories)}), or a folder for each"
            )
        return self.images.categories[0]
