"""The ``doctor`` command: it checks whether this machine has what the library needs."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from lit_fedad import __version__
from lit_fedad.core.errors import UserError, first_line
from lit_fedad.core.extras import EXTRAS, install, lacking
from lit_fedad.report.console import Display

_PACKAGES = ("torch", "torchvision", "lightning", "torchmetrics", "timm", "hydra-core", "numpy", "mlflow")
_PORTS = {"serve": 8080, "ui": 7860, "federation, sites": 9443, "federation, Flower": 9442, "mlflow ui": 5000}
_LEAST_DISK = 2 * 2**30  # bytes: features of some thousand images, and a run


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        check: Name of what was checked.
        state: ``ok``; ``note`` if runs can do without it; ``trouble`` if no run can start.
        remark: What was found, and what to do.
    """

    check: str
    state: str
    remark: str


def doctor(display: Display) -> None:
    """Prints a table of versions, devices, weights, cache, disk, ports and extras.

    Raises:
        UserError: If a check finds something that keeps every run from starting.
    """
    findings = [
        finding for check in (versions, devices, weights, disk, ports, extras) for finding in _run(check)
    ]
    display.table([finding._asdict() for finding in findings])
    if troubles := [finding for finding in findings if finding.state == "trouble"]:
        raise UserError(f"{len(troubles)} in trouble, first {troubles[0].check}: {troubles[0].remark}")


def _run(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Returns the findings of a check; an error, such as a package that cannot be imported, is a finding too."""
    findings: list[Finding] = []
    try:
        findings.extend(check())  # keeps the findings before an error
    except (ImportError, OSError, RuntimeError) as error:
        findings.append(Finding(check.__name__, "trouble", f"cannot be checked: {first_line(error)}"))
    return findings


def versions() -> Iterator[Finding]:
    """Finds the versions of this package, of Python and of the packages on which most of it depends."""
    yield Finding("lit-fedad", "ok", __version__)
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in _PACKAGES:
        try:
            yield Finding(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            optional = name in EXTRAS["train"]
            yield Finding(name, "note" if optional else "trouble", f"not installed: pip install {name}")


def devices() -> Iterator[Finding]:
    """Finds the processors, and lets each accelerator add two numbers."""
    import torch

    cores = os.cpu_count() or 1
    yield Finding("cpu", "ok", f"{cores} cores, {torch.get_num_threads()} threads")
    names = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    for name in names:
        try:
            torch.ones(2, device=name).sum().item()
            yield Finding(name, "ok", torch.cuda.get_device_name(name))
        except RuntimeError as error:
            yield Finding(name, "trouble", f"{first_line(error)}; fabric.accelerator=cpu does without it")
    if not names:
        yield Finding("accelerator", "note", "none: runs take the CPU")


def weights() -> Iterator[Finding]:
    """Finds out whether weights of backbones can be downloaded, and which are used if they cannot."""
    from lit_fedad.models.backbones import OWN_WEIGHTS, hub_trouble
    from lit_fedad.models.lite import LITE, first_installed

    own = OWN_WEIGHTS.is_file()
    yield Finding("own weights", "ok" if own else "trouble", "in the package" if own else "install it anew")
    trouble = hub_trouble()
    if word := first_installed():
        instead = f"{LITE[word].name} of {LITE[word].package} takes their place"
    else:
        instead = f"the library's own take their place; {install('weights')}"
    yield Finding(
        "ImageNet weights",
        "note" if trouble else "ok",
        f"{trouble}; {instead}" if trouble else "can be downloaded",
    )


def disk() -> Iterator[Finding]:
    """Finds out whether the cache and this folder can be written, and how much room they have."""
    from lit_fedad.experiment.datasets import cache_folder

    cache = cache_folder({"cache": {"folder": None}})
    for name, folder in (("cache", cache), ("outputs", Path("outputs").absolute())):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=existing):
                pass
            free = shutil.disk_usage(existing).free
        except OSError as error:
            yield Finding(name, "trouble", f"{folder}: cannot be written ({error.strerror})")
            continue
        state = "ok" if free >= _LEAST_DISK else "note"
        yield Finding(name, state, f"{folder}: {free / 2**30:.1f} GiB free")


def ports() -> Iterator[Finding]:
    """Finds out which ports other programs have taken."""
    for name, port in _PORTS.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                yield Finding(f"port {port}", "ok", f"free for {name}")
            except OSError:
                yield Finding(f"port {port}", "note", f"taken; {name} needs another, or runs already")


def extras() -> Iterator[Finding]:
    """Finds out which extras are installed, and what the others lack."""
    for extra, modules in EXTRAS.items():
        missing = lacking(extra)
        yield Finding(
            f"extra {extra}",
            "note" if missing else "ok",
            f"lacks {', '.join(missing)}: {install(extra)}" if missing else ", ".join(modules),
        )
