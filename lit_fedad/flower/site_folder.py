"""A site's folder: its keys, the certificate of the coordinator's authority, and settings that say where images are."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from lit_fedad.core.bounds import above
from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.files import forbidden_in_one_line, given_bytes
from lit_fedad.core.options import section_of
from lit_fedad.experiment.claim import locked
from lit_fedad.federation.chained_log import TIME, ChainedLog
from lit_fedad.flower.fleet import answer_requests
from lit_fedad.flower.keys import write_site_key
from lit_fedad.flower.settings_folder import NAME, SettingsFolder
from lit_fedad.privacy.ledger import LEDGER, Ledger
from lit_fedad.report.console import Display
from lit_fedad.sites.offer import OFFERED, Offer
from lit_fedad.sites.overrides import OPERATORS
from lit_fedad.sites.settings import PUBLIC, KeyRegistry, Policy, SiteSettings, write_sum_key
from lit_fedad.sites.site import AUDIT, Site
from lit_fedad.sites.states import FILES

_ENDS_S = 60.0
"""How long an earlier process of the site that was told to end may take, in seconds."""


@dataclass(frozen=True)
class SiteFolder(SettingsFolder):
    """A site's folder.

    Attributes:
        address: The coordinator's host and port.
        stages: Products of each stage in which images arrive, joined by ``+``; empty if all images are there at once.
        policy: What may leave the site (`Policy`). `SiteSettings` explains the other settings.
    """

    holds: ClassVar[str] = "site"
    name: str
    address: str
    data: Sequence[str]
    own: Sequence[str] = field(default_factory=list)
    apart: bool = False
    epsilon: float | None = None
    stages: Sequence[str] = field(default_factory=list)
    policy: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def create(cls, path: Path, authority: Path, **given: Any) -> tuple[SiteFolder, str]:
        """Writes settings, key pairs and the authority's certificate to a new folder.

        Args:
            path: The folder.
            authority: File with the certificate of the coordinator's authority.
            **given: The settings.

        Returns:
            The folder, and the fingerprint of its public key.

        Raises:
            UserError: If the folder holds a site, or a setting is invalid.
        """
        folder = cls(path.absolute(), **given)
        with folder.writing(new=True, policy=Policy.read(folder.policy).content):
            with forbidden_in_one_line(authority):
                if not authority.is_file():
                    raise UserError(
                        f"ca={authority}: no such file; the coordinator's operator gives it to you"
                    )
            compose([*folder.data])  # reports a misspelt key now, not only when the coordinator asks
            folder.make()
            (path / "ca.crt").write_bytes(given_bytes(authority))  # perhaps the same file: read first
            write_sum_key(path, folder.name)
            fingerprint = write_site_key(path)
        return folder, fingerprint

    def renew(self, sums: bool) -> str:
        """Replaces the key pair by a new one; the coordinator lets in the old key until its operator has the new one.

        Args:
            sums: Whether to renew the key pair for secure sums instead.

        Returns:
            The fingerprint of the public key; for secure sums, the site's line for the registry of keys.

        Raises:
            UserError: If it cannot be written.
        """
        with self.writing():
            if not sums:
                return write_site_key(self.path)
            write_sum_key(self.path, self.name)
            return (self.path / PUBLIC).read_text().strip()

    def check(self) -> None:
        """Checks the settings; see `SettingsFolder.check`."""
        if not NAME.fullmatch(self.name):
            raise UserError(f"name={self.name} must be letters, digits, '_' and '-'")
        match = re.fullmatch(r"[\w.-]+:(\d{1,5})", self.address)
        if match is None or not 0 < int(match[1]) < 65536:
            raise UserError(f"address={self.address} must be host:port of the coordinator")
        wrong = [word for word in self.data if section_of(word) != "data"]
        machine = [word for word in self.own if word.split("=")[0] not in OPERATORS]
        wrong += [word for word in machine if section_of(word) not in ("cache", "fabric")]
        if wrong:
            raise UserError(
                f"'{wrong[0]}' is no setting of a site: a site sets data, cache, fabric, {' and '.join(OPERATORS)}; all"
                " else the coordinator"
            )
        if not any(word.startswith("data=") for word in self.data):
            raise UserError("a site has images: give data=folders data.root=DIR")
        above("site", 0, epsilon=self.epsilon)
        Policy.read(self.policy)

    @property
    def settings(self) -> SiteSettings:
        """The settings of the site's process.

        Raises:
            UserError: If the folder has a registry of keys that cannot be used.
        """
        own = [f"cache.folder={self.path / 'cache'}", *self.own]
        return SiteSettings(
            self.name,
            self.path,
            self.data,
            own,
            self.apart,
            KeyRegistry.read(self.path, self.name),
            self.epsilon,
            [stage.split("+") for stage in self.stages],
            Policy.read(self.policy),
            f"{self.address} ({self.authority})",
        )

    @property
    def authority(self) -> str:
        """Fingerprint of the authority that vouches for the coordinator, shortened."""
        try:
            return "SHA256:" + hashlib.sha256((self.path / "ca.crt").read_bytes()).hexdigest()[:16]
        except OSError:
            return "no ca.crt"

    @property
    def log(self) -> ChainedLog:
        """Returns the site's log of requests and replies."""
        return ChainedLog(self.path / AUDIT)

    def offer(self, file: str | None) -> Offer:
        """Reads the offer of a federation from a file, by default that which the site has refused last."""
        return Offer.read(Path(file) if file else self.path / OFFERED)

    def clean(self, run: str) -> bool:
        """Removes the states of a run; returns whether there were any.

        Raises:
            UserError: If the site is running, since it could need the states that are removed.
        """
        folder = self.path / "states" / run
        with locked(self.path):
            if run not in self.runs() or folder.is_symlink():
                return False
            shutil.rmtree(folder)
            return True

    @property
    def ledger(self) -> Ledger:
        """Returns the ledger of the privacy that the site has spent."""
        return Ledger(self.path / LEDGER, self.epsilon)

    def reports(self) -> list[Path]:
        """Returns the reports on test images that runs have left here."""
        return sorted((self.path / "reports").glob("*/report.md"))

    def detectors(self) -> list[Path]:
        """Returns the folders of the site's detectors, which come from runs whose models stay at the sites."""
        return sorted(path.parent for path in (self.path / "detectors").glob("*/result.json"))

    def runs(self) -> dict[str, int]:
        """Returns the last step of every run that left a state here."""
        last_steps = {}
        for folder in sorted((self.path / "states").glob("*")):
            steps = [int(path.stem) for path in folder.glob(FILES)]
            last_steps[folder.name] = max(steps, default=0)
        return last_steps


def bound_memory() -> None:
    """Limits this process to the machine's memory, on Linux without a GPU.

    A coordinator chooses the sizes of images and networks. With the limit, too large an allocation fails, and with it
    one request; without it, the system would end the process. A GPU needs more address space than there is memory.
    """
    if sys.platform == "linux" and not torch.cuda.is_available():
        import resource

        hard_limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (psutil.virtual_memory().total, hard_limit))


def start(folder: SiteFolder, display: Display) -> None:
    """Answers the coordinator's requests until the process is ended.

    Raises:
        UserError: If the coordinator refuses the site or its certificate is not valid, or if another process answers.
    """

    def note_with_time(line: str) -> None:
        """Prints a line with the time, like the lines about requests."""
        display.note(f"{time.strftime(TIME, time.gmtime())} {line}")

    site = Site(folder.settings, display)
    bound_memory()
    with locked(folder.path, _ENDS_S):  # two processes would each spend the rest of the privacy budget
        site.tidy()
        answer_requests(folder.address, folder.path, site, note_with_time)
