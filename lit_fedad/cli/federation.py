"""The command ``federation``: the coordinator of real sites, which share nothing but messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lit_fedad.core.options import section_of
from lit_fedad.report.console import Display


def init(
    out: str,
    host: str,
    sites: tuple[str, ...],
    overrides: Sequence[str],
    port: int = 9443,
    link: int = 9442,
    timeout: float = 3600.0,
    classes: tuple[str, ...] = (),
) -> None:
    """Makes the folder of real sites' coordinator: settings, certificates and Flower's configuration.

    Args:
        out: The new folder.
        host: Name or address by which sites reach this machine.
        sites: Names of the sites.
        overrides: Overrides of the configuration.
        port: Port that sites connect to.
        link: Port of Flower's SuperLink, on this machine alone.
        timeout: Longest exchange in seconds.
        classes: Names of the classes that all sites together hold, where the task learns classes.
    """
    from lit_fedad.flower.federation_folder import SECTIONS, FederationFolder
    from lit_fedad.sites.overrides import with_size

    own = [word for word in overrides if section_of(word) in SECTIONS]
    folder = FederationFolder.create(
        Path(out),
        host=host,
        port=port,
        link=link,
        sites=list(sites),
        overrides=with_size([word for word in overrides if word not in own]),
        own=own,
        timeout=timeout,
        classes=list(classes),
    )
    Display().where_next(
        [
            ("settings", str(folder.path / "federation.yaml")),
            (
                "give sites",
                f"{folder.path / 'ca.crt'}, offer.json and the address {folder.host}:{folder.port}",
            ),
            ("put here", ", ".join(str(folder.path / "keys" / f"{name}.pub") for name in folder.sites)),
            ("then", f"lit-fedad federation start fed={out}"),
        ]
    )


def start(fed: str) -> None:
    """Runs a federation until its end.

    Args:
        fed: The coordinator's folder.
    """
    from lit_fedad.flower import coordinator
    from lit_fedad.flower.federation_folder import FederationFolder
    from lit_fedad.tracking.sender import where_compared

    folder, display = FederationFolder.open(Path(fed)), Display()
    for name, fingerprint in folder.fingerprints().items():
        display.note(f"site {name}: {fingerprint}")
    coordinator.start(folder, display)
    display.where_next(
        [
            ("files", str(folder.run)),
            ("sites", f"lit-fedad federation status fed={fed}"),
            *where_compared([folder.run]),
            ("new images", f"lit-fedad predict run={folder.detector} images=FOLDER"),
        ]
    )


def status(fed: str) -> None:
    """Prints rounds, bytes, false alarms and troubles of every site.

    Args:
        fed: The coordinator's folder.
    """
    from lit_fedad.flower.federation_folder import FederationFolder
    from lit_fedad.sites.status import read_status, status_rows

    folder, display = FederationFolder.open(Path(fed)), Display()
    progress = read_status(folder.run)
    display.note(f"round {progress['round']} of {progress['rounds']}")
    display.table(status_rows(progress["sites"]))
    for name, site in progress["sites"].items():
        for trouble in site["troubles"][-3:]:
            display.note(f"site {name}: {trouble}")


def renew(fed: str) -> None:
    """Issues the coordinator's certificates again, in place.

    Args:
        fed: The coordinator's folder.
    """
    from lit_fedad.flower.federation_folder import FederationFolder

    folder = FederationFolder.open(Path(fed))
    folder.renew()
    Display().where_next(
        [
            ("certificates", f"{folder.path / 'ca.crt'}, {folder.path / 'server.pem'}"),
            ("sites", "go on with the ca.crt that they have, until its own date; then give them this one"),
        ]
    )
