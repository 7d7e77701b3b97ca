"""The commands ``federation`` and ``site``: a federation of machines that share nothing but messages."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import require
from lit_fedad.core.options import read, separate, split
from lit_fedad.report.console import Display


@dataclass(frozen=True)
class FederationInit:
    """Options of ``lit-fedad federation init``.

    Attributes:
        out: The new folder.
        host: Name or address by which sites reach this machine.
        sites: Names of the sites.
        port: Port that sites connect to.
        link: Port of Flower's SuperLink, on this machine alone.
        timeout: Longest exchange in seconds.
        classes: Names of the classes that all sites together hold, where the task learns classes.
    """

    out: str
    host: str
    sites: tuple[str, ...]
    port: int = 9443
    link: int = 9442
    timeout: float = 3600.0
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FederationOptions:
    """Options of ``lit-fedad federation start`` and ``status``.

    Attributes:
        fed: The coordinator's folder.
    """

    fed: str


@dataclass(frozen=True)
class SiteInit:
    """Options of ``lit-fedad site init``.

    Attributes:
        out: The new folder.
        name: Name of the site.
        address: The coordinator's host and port.
        ca: The coordinator's ``ca.crt``.
        apart: Whether its products are its own, even where another site's have the same name.
        epsilon: Largest budget of differential privacy of all runs that it takes part in, whose sites draw the noise.
        stages: Products of each stage in which images come, joined by ``+``; none: all are there from the start.
    """

    out: str
    name: str
    address: str
    ca: str
    apart: bool = False
    epsilon: float | None = None
    stages: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiteOptions:
    """Options of ``lit-fedad site start`` and ``status``.

    Attributes:
        site: The site's folder.
    """

    site: str


def federation(options: Sequence[str]) -> None:
    """Makes, runs or shows a federation of sites, at its coordinator.

    Args:
        options: ``init``, ``start`` or ``status``, and its options.

    Raises:
        UserError: For bad input, or if the run fails.
    """
    known = {"init": _init_federation, "start": _start_federation, "status": _federation_status}
    _dispatch("federation", options, known)


def site(options: Sequence[str]) -> None:
    """Makes, runs or shows a site.

    Args:
        options: ``init``, ``start`` or ``status``, and its options.

    Raises:
        UserError: For bad input, or if the coordinator refuses the site.
    """
    _dispatch("site", options, {"init": _init_site, "start": _start_site, "status": _site_status})


def _dispatch(
    command: str, options: Sequence[str], known: Mapping[str, Callable[[Sequence[str]], None]]
) -> None:
    action, *rest = options or [""]
    if action not in known:
        raise UserError(f"the {command} command is: {', '.join(f'{command} {name}' for name in known)}")
    require("flower", f"lit-fedad {command}")
    known[action](rest)


def _init_federation(options: Sequence[str]) -> None:
    declared, others = separate(FederationInit, options, "federation init")
    chosen, _ = read(FederationInit, declared, "federation init")
    from lit_fedad.flower.coordinator import FederationFolder

    own = [word for word in others if _section(word) in ("cache", "fabric", "public", "tracking")]
    folder = FederationFolder.create(
        Path(chosen.out),
        host=chosen.host,
        port=chosen.port,
        link=chosen.link,
        sites=list(chosen.sites),
        words=[word for word in others if word not in own],
        own=own,
        timeout=chosen.timeout,
        classes=list(chosen.classes),
    )
    Display().where_next(
        [
            ("settings", str(folder.path / "federation.yaml")),
            ("give sites", f"{folder.path / 'ca.crt'} and the address {folder.host}:{folder.port}"),
            ("put here", ", ".join(str(folder.path / "keys" / f"{name}.pub") for name in folder.sites)),
            ("then", f"lit-fedad federation start fed={chosen.out}"),
        ]
    )


def _start_federation(options: Sequence[str]) -> None:
    chosen, _ = read(FederationOptions, options, "federation start", overrides=False)
    from lit_fedad.flower import coordinator

    folder, display = coordinator.FederationFolder.open(Path(chosen.fed)), Display()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for name, fingerprint in folder.fingerprints().items():
        display.note(f"site {name}: {fingerprint}")
    coordinator.start(folder, display)
    display.where_next(
        [
            ("files", str(folder.run)),
            ("sites", f"lit-fedad federation status fed={chosen.fed}"),
            ("compare", "mlflow ui"),
            ("new images", f"lit-fedad predict run={folder.detector} images=FOLDER"),
        ]
    )


def _federation_status(options: Sequence[str]) -> None:
    chosen, _ = read(FederationOptions, options, "federation status", overrides=False)
    from lit_fedad.flower.coordinator import FederationFolder
    from lit_fedad.sites.status import read_status, status_rows

    folder, display = FederationFolder.open(Path(chosen.fed)), Display()
    status = read_status(folder.run)
    rows = status_rows(status["sites"])
    display.note(f"round {status['round']} of {status['rounds']}")
    display.table(rows)
    for name, own in status["sites"].items():
        for trouble in own["troubles"][-3:]:
            display.note(f"site {name}: {trouble}")


def _init_site(options: Sequence[str]) -> None:
    declared, others = separate(SiteInit, options, "site init")
    chosen, _ = read(SiteInit, declared, "site init")
    from lit_fedad.flower.site_folder import SiteFolder

    for word in others:
        if _section(word) not in ("data", "cache", "fabric"):
            raise UserError(
                f"site init has no key '{word}': a site sets data, cache and fabric; all else the coordinator"
            )
    folder, fingerprint = SiteFolder.create(
        Path(chosen.out),
        Path(chosen.ca),
        name=chosen.name,
        address=chosen.address,
        data=[word for word in others if _section(word) == "data"],
        own=[word for word in others if _section(word) != "data"],
        apart=chosen.apart,
        epsilon=chosen.epsilon,
        stages=list(chosen.stages),
    )
    Display().where_next(
        [
            ("settings", str(folder.path / "site.yaml")),
            ("send", f"{folder.path / 'key.pub'} to the coordinator's operator; tell it by telephone"),
            ("fingerprint", fingerprint),
            ("then", f"lit-fedad site start site={chosen.out}"),
        ]
    )


def _start_site(options: Sequence[str]) -> None:
    chosen, _ = read(SiteOptions, options, "site start", overrides=False)
    from lit_fedad.flower import site_folder

    folder = site_folder.SiteFolder.open(Path(chosen.site))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the coordinator hears of a clean stop
    site_folder.start(folder, Display())


def _site_status(options: Sequence[str]) -> None:
    chosen, _ = read(SiteOptions, options, "site status", overrides=False)
    from lit_fedad.flower.keys import fingerprint
    from lit_fedad.flower.site_folder import SiteFolder

    folder = SiteFolder.open(Path(chosen.site))
    rows = [("site", folder.name), ("coordinator", folder.address)]
    rows += [("fingerprint", fingerprint(folder.path / "key.pub"))]
    rows += [("run", f"{run}, state after step {step}") for run, step in folder.runs().items()]
    if spent := folder.ledger.spent:
        epsilon, delta = folder.ledger.total
        most = "" if folder.epsilon is None else f" of {folder.epsilon:g}"
        rows += [("spent", f"epsilon {epsilon:.4g}{most} at delta {delta:g}, in {len(spent)} runs")]
    rows += [("report", str(page)) for page in folder.reports()]
    rows += [("detector", str(own)) for own in folder.detectors()]
    Display().where_next(rows)


def _section(word: str) -> str:
    return split(word)[0].partition(".")[0]
