"""Training from Python: a configuration in keywords, or images as lists of paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, cast

from lit_fedad.contracts import Task
from lit_fedad.core.config import Config, compose
from lit_fedad.core.conflicts import check_conflicts, warn_of_unread
from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import require
from lit_fedad.core.files import (
    absent,
    given_path,
    long_path_in_one_line,
    removed_on_failure,
    unwritable_in_one_line,
)
from lit_fedad.core.nested import flatten
from lit_fedad.core.typed_words import as_override_value
from lit_fedad.data.datamodule import FederatedDataModule
from lit_fedad.data.labelled import Images
from lit_fedad.data.layout_names import NORMAL, ZERO, bare
from lit_fedad.data.path_lists import list_text
from lit_fedad.deployment.live_detector import LiveDetector, load_detector
from lit_fedad.experiment.build import Model, build_data, build_images, build_model, build_partition
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.processes import make_fabric
from lit_fedad.report.console import Display

Paths: TypeAlias = Sequence[str | os.PathLike[str]]
Labelled: TypeAlias = Mapping[str, Paths]

_ImageList: TypeAlias = tuple[Path, str]  # a file and its text

_LISTS = "lit_fedad.data.path_lists.path_lists"  # reads the images of a run that `train` was given by client
_ALONE = "images"  # the client and product of a plain list


@dataclass(frozen=True)
class TrainedRun(os.PathLike[str]):
    """A complete run.

    Attributes:
        path: Its folder.
        result: Content of ``result.json``.
    """

    path: Path
    result: Mapping[str, Any]

    def __fspath__(self) -> str:
        return str(self.path)

    def detector(
        self, client: int | str | None = None, alpha: float | None = None, product: str | None = None
    ) -> LiveDetector:
        """Loads a trained client.

        Args:
            client: Number of the client, or its name where `train` was given images by client; None for the client
                with most training images.
            alpha: Promised rate of false alarms; None for the run's own.
            product: Product that all images show, where it is known.

        Raises:
            UserError: If there is no such client or product, or the run learned classes.
        """
        partition = self.result["partition"]
        if client in partition["products"]:
            column = partition["products"].index(client)
            holders = [number for number, own in enumerate(partition["counts"]) if own[column]]
            client = holders[0] if len(holders) == 1 else client
        elif isinstance(client, str) and not client.isdecimal() and self._named:
            raise UserError(f"client={client}: the run has clients {', '.join(partition['products'])}")
        return load_detector(self.path, client, alpha, product)

    @property
    def _named(self) -> bool:
        """Whether clients have the names that `train` was given."""
        return bool(RunFolder(self.path).config()["data"]["_target_"] == _LISTS)


class Federation:
    """A federation of clients that has not trained yet; its parts train under a plain `lightning.Trainer` too.

    Args:
        clients: Paths of normal training images by client's name.
        method: Name of the method.
        test: Paths of test images by client's name and label, as in `train`.
        out: Folder of the run; None for one in ``outputs``.
        settings: Other keys of the configuration.

    Attributes:
        config: The configuration.

    Raises:
        UserError: If the input is invalid.
    """

    def __init__(
        self,
        clients: Mapping[str, Paths],
        method: str = "feddymem",
        *,
        test: Mapping[str, Labelled] | None = None,
        out: str | os.PathLike[str] | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.config, self._listed = _configured(method, None, clients, test, out, settings)

    @cached_property
    def task(self) -> Task:
        """What a client learns, a LightningModule with untrained weights, ready to be trained."""
        return self._model.task.train()  # a Trainer leaves modes as they are

    @cached_property
    def data(self) -> FederatedDataModule:
        """The images of all clients, a LightningDataModule, as the task sees them."""
        fabric = make_fabric(**{**self.config["fabric"], "callbacks": []})
        partition = build_partition(self.config, self._images)
        return build_data(
            self.config, self._images, partition, self._model, fabric, Display(quiet=True)
        ).module

    def train(self, quiet: bool = False) -> TrainedRun:
        """Trains it, continues it where it was interrupted, or returns it where it is complete.

        Args:
            quiet: Whether only warnings are printed.

        Raises:
            UserError: If the input is invalid.
        """
        return _trained(self.config, self._listed, quiet)

    @cached_property
    def _images(self) -> Images:
        with _written(self._listed, self.config):
            return build_images(self.config)

    @cached_property
    def _model(self) -> Model:
        return build_model(self.config, self._images.categories)


def train(
    method: str = "feddymem",
    data: str | None = None,
    *,
    normal: Paths | Mapping[str, Paths] | None = None,
    test: Labelled | Mapping[str, Labelled] | None = None,
    out: str | os.PathLike[str] | None = None,
    settings: Mapping[str, object] | None = None,
    quiet: bool = False,
) -> TrainedRun:
    """Trains a federation, continues it where it was interrupted, or returns it where it is complete.

    Args:
        method: Name of the method.
        data: Name of a data configuration; None for the default, or for ``normal``.
        normal: In place of ``data``: paths of normal training images; by client's name, they are a federation.
        test: Paths of test images by label: ``"good"``, and one name for each defect. By client's name, where
            ``normal`` is. None for a random fifth of each client's normal images (``data.train_share``), which shows
            false alarms alone.
        out: Folder of the run; None for one in ``outputs``.
        settings: Other keys of the configuration, such as ``{"rounds": 20, "data.root": "/data/mvtec"}``.
        quiet: Whether only warnings are printed.

    Returns:
        The run.

    Raises:
        UserError: If the input is invalid.
    """
    return _trained(*_configured(method, data, normal, test, out, settings), quiet)


def _trained(config: Config, listed: _ImageList | None, quiet: bool) -> TrainedRun:
    # After `require`: it imports what only training needs.
    from lit_fedad.experiment.train import train as run

    with long_path_in_one_line(), _written(listed, config):
        result = run(config, quiet=quiet)
    return TrainedRun(RunFolder.of(config).path, result)


def _configured(
    method: str,
    data: str | None,
    normal: Paths | Mapping[str, Paths] | None,
    test: Labelled | Mapping[str, Labelled] | None,
    out: str | os.PathLike[str] | None,
    settings: Mapping[str, object] | None,
) -> tuple[Config, _ImageList | None]:
    """Composes the configuration of what `train` is given, and the list of images that it names."""
    require("train", "lit_fedad.train")
    if not isinstance(settings, Mapping | None):
        raise UserError('settings: give values by key: {"rounds": 20, "image.size": 128}')
    given: dict[str, object] = {"method": method}
    listed: _ImageList | None = None
    if data is not None:
        given["data"] = data
    if out is not None:
        given["out"] = out = given_path("out", out)
    if normal is not None:
        if data is not None:
            raise UserError("data= and normal= are both given; give one of them")
        listed = _image_list(normal, test, Path(out or "outputs"))
        given |= {"data": "path_lists", "data.file": str(listed[0]), "partition": "by_product"}
        given["partition.clients"] = None  # each name is one, also where a preset says how many
    elif test is not None:
        raise UserError("test= needs normal=, the training images")
    keys = {**given, **flatten(settings or {})}
    overrides = [f"{key}={_value(key, value)}" for key, value in keys.items()]
    config = compose(overrides)
    check_conflicts(config, overrides)
    warn_of_unread(overrides)
    return config, listed


@contextmanager
def _written(listed: _ImageList | None, config: Config) -> Iterator[None]:
    """Writes the list of a run's images; where the block fails before the run has begun, it leaves nothing.

    Raises:
        UserError: If it cannot be written.
    """
    if listed is None:
        yield
        return
    file, text = listed
    made = absent(file)
    with unwritable_in_one_line(file, within=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    begun = RunFolder.of(config).path / "config.yaml"
    # A run of another list has no use for this one.
    with removed_on_failure(made, unless=None if begun.exists() else begun):
        yield


def _image_list(
    normal: Paths | Mapping[str, Paths], test: Labelled | Mapping[str, Labelled] | None, folder: Path
) -> _ImageList:
    """Returns a run's list of images; the file's name follows from its content.

    Raises:
        UserError: If paths are no list or no files, a client has no training images, test images are of other
            clients, or normal ones are called otherwise than good.
    """
    by_client = _lists("normal", normal if isinstance(normal, Mapping) else {_ALONE: normal})
    if test is not None and not isinstance(test, Mapping):
        raise UserError('test: give paths by label: {"good": [...], "scratch": [...]}')
    if test is None:
        tested: dict[str, Labelled] = {}
    elif isinstance(normal, Mapping):
        tested = dict(cast("Mapping[str, Labelled]", test))
    else:
        tested = {_ALONE: cast("Labelled", test)}
    if not by_client:
        raise UserError("normal: no client is named; give paths of its images by each client's name")
    if empty := [name for name, paths in by_client.items() if not paths]:
        raise UserError(f"normal: {empty[0]} has no training image")
    for name, labelled in tested.items():
        if name not in by_client:
            raise UserError(f"test: '{name}' is no client; normal= names {', '.join(by_client)}")
        if not isinstance(labelled, Mapping):
            raise UserError('test: give paths by label: {"good": [...], "scratch": [...]}')
        tested[name] = _lists("test", labelled)
        words = {str(label): label for label in labelled if label != "good"}
        if odd := [label for word, label in words.items() if bare(word) in NORMAL or word.lower() in ZERO]:
            raise UserError(
                f"test: normal images are called 'good', and other labels are defects; not {odd[0]!r}"
            )
    for paths in (*by_client.values(), *chain.from_iterable(own.values() for own in tested.values())):
        if lost := [path for path in paths if not given_path("normal, test", path).is_file()]:
            raise UserError(f"{os.fspath(lost[0])}: no such image")
    text = list_text(by_client, tested)
    name = f"images-{sha256(text.encode(errors='surrogateescape')).hexdigest()[:12]}.csv"
    return folder.absolute() / name, text


def _lists(key: str, named: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns lists of paths by name; a single path, which is a sequence of characters, is refused."""
    for paths in named.values():
        if isinstance(paths, str | os.PathLike) or not isinstance(paths, Iterable):
            raise UserError(f"{key}: give a list of paths, not {paths!r}")
    lists = {name: list(paths) for name, paths in named.items()}
    for path in chain.from_iterable(lists.values()):
        if not isinstance(path, str | os.PathLike):
            raise UserError(f"{key}: give paths of image files, not {type(path).__name__}")
    return lists


def _value(key: str, value: object) -> str:
    """Writes a value of a key as an override of the configuration has it."""
    if isinstance(value, str) and re.fullmatch(r"[\w./+-]+", value):
        return value
    try:
        return as_override_value(os.fspath(value) if isinstance(value, os.PathLike) else value)
    except TypeError:
        raise UserError(
            f"{key}: give a number, a text, a list or a section, not {type(value).__name__}"
        ) from None
