"""A coordinator's folder: the operator's settings of a federation, certificates, and the public keys of the sites."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from lit_fedad.core.errors import ANEW, UserError
from lit_fedad.core.options import section_of
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.flower.keys import fingerprint, read_public_key, write_certificates
from lit_fedad.flower.settings_folder import NAME, SettingsFolder
from lit_fedad.sites.coordinator import ENROLLED, Plan
from lit_fedad.sites.offer import OFFERED, Offer
from lit_fedad.sites.overrides import check_overrides

SECTIONS = ("cache", "fabric", "public", "tracking")
"""Sections that a coordinator sets for itself; all others belong to the federation and are the same at all sites."""

LINK = "coordinator"
"""Name of this SuperLink in Flower's configuration."""

_OWN = ("keys", "app", "flower", "signed_off", "registered")
"""Names of files and folders in this folder that a run's folder must not have."""

_LONGEST_S = 30 * 24 * 3600
"""Longest timeout: Flower keeps a message for as long as its timeout says."""

# Flower's app bundle: it names parts of the installed package and holds no code.
_APP = """\
[project]
name = "lit-fedad"
version = "1.0.0"
description = "Names the installed package's ServerApp; holds no code."
license = "Apache-2.0"
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "lit-fedad"

[tool.flwr.app.components]
serverapp = "lit_fedad.flower.server_app:app"
clientapp = "lit_fedad.flower.server_app:nothing"

[tool.flwr.app.config]
folder = ""
"""


@dataclass(frozen=True)
class FederationFolder(SettingsFolder):
    """A coordinator's folder.

    Attributes:
        host: Name or address by which sites reach it.
        port: Its open port.
        link: Port of the SuperLink, which only this machine can reach.
        sites: Names of the sites, in the order of their client numbers.
        overrides: The federation's configuration; for this, ``own`` and ``classes`` see `Plan`.
        timeout: Longest exchange in seconds: a site that has not answered by then has failed.
        out: Name of the run's folder below this one: another name begins another run, with the same keys.
    """

    holds: ClassVar[str] = "federation"
    host: str
    port: int
    link: int
    sites: Sequence[str]
    overrides: Sequence[str]
    own: Sequence[str] = field(default_factory=list)
    timeout: float = 3600.0
    classes: Sequence[str] = field(default_factory=list)
    out: str = "run"

    @classmethod
    def create(cls, path: Path, **given: Any) -> FederationFolder:
        """Writes settings, certificates and Flower's configuration to a new folder.

        Raises:
            UserError: If the folder holds a federation, or a setting is invalid.
        """
        folder = cls(path.absolute(), **given)
        with folder.writing(new=True):
            folder.make()  # for this account alone: Flower's database holds what sites have sent
            for inner in ("keys", "app", "flower"):
                (path / inner).mkdir(exist_ok=True)
            write_certificates(path, folder.host)
            (path / "app" / "pyproject.toml").write_text(_APP)
            folder.write_offer()
        return folder

    def renew(self) -> None:
        """Issues the certificates again, for ten more years; the ``ca.crt`` that the sites have stays valid.

        Raises:
            UserError: If they cannot be written.
        """
        with self.writing():
            write_certificates(self.path, self.host)

    def check(self) -> None:
        """Checks the settings; see `SettingsFolder.check`."""
        if not self.sites or len(set(self.sites)) < len(self.sites):
            raise UserError("sites must name each site once: sites=north,south")
        for name in self.sites:
            if not NAME.fullmatch(str(name)):
                raise UserError(f"sites: '{name}' must be letters, digits, '_' and '-'")
        for port in (self.port, self.link):
            if not 0 < port < 65536:
                raise UserError(f"port {port} must be in [1, 65535]")
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,252}", self.host, re.ASCII):
            raise UserError(
                f"host={self.host} must be the name or address (no IPv6) by which sites reach this machine, without its"
                " port"
            )
        if not NAME.fullmatch(self.out) or self.out in _OWN:
            raise UserError(
                f"out={self.out} must be letters, digits, '_' and '-', and no other folder's name"
            )
        if self.port == self.link:
            raise UserError(
                f"port {self.port} is that of link, too: sites and Flower's SuperLink need one each"
            )
        if not 0 < self.timeout <= _LONGEST_S:
            raise UserError(f"timeout={self.timeout} must be above 0, and at most {_LONGEST_S} seconds")
        check_overrides(self.overrides)
        for word in self.own:
            if section_of(word) not in SECTIONS:
                raise UserError(
                    f"own: '{word}' is not of {', '.join(SECTIONS)}; sites take what stands under overrides"
                )

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return self.path / self.out

    @property
    def detector(self) -> str:
        """Where ``predict`` finds the trained detector: in the run's folder, or at each site if models stay there."""
        result = RunFolder(self.run).result() or {}
        return "SITE/detectors/RUN" if result.get("models_stay") else str(self.run)

    def advised(self, text: str) -> str:
        """Replaces the advice in a text to set keys that only `train` has by what a coordinator can do."""
        return text.replace(ANEW, f"give the new run another name, as out in {self.file}")

    def again(self) -> FederationFolder:
        """Returns these settings with the sites that the file has added at the end since it was read.

        If the file is invalid, or has changed other sites, returns these settings as they are.
        """
        try:
            sites = self.open(self.path).sites
        except UserError:
            return self
        return replace(self, sites=sites) if sites[: len(self.sites)] == self.sites else self

    @property
    def plan(self) -> Plan:
        """The plan of the run, which `coordinate` takes."""
        own = ["tracking=mlflow", *self.own]
        return Plan(self.overrides, self.sites, str(self.run), own, self.classes)

    def write_offer(self) -> None:
        """Writes the files that follow from the settings: the offer to sites, and Flower's own configuration.

        Raises:
            OSError: If it cannot be written.
        """
        Offer(self.overrides, self.classes).write(self.path / OFFERED)
        (self.path / "flower" / "config.toml").write_text(
            f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = "127.0.0.1:{self.link}"\n'
            f"root-certificates = {json.dumps(str(self.path / 'ca.crt'))}\n"
        )

    def public_keys(self) -> dict[int, bytes]:
        """Reads the sites' public keys, by client number.

        Once a run has begun, a site whose key is missing, invalid or another site's is left out.

        Raises:
            UserError: If there is such a site before the run has begun.
        """
        owners = dict[bytes, int]()
        begun = (self.run / ENROLLED).exists()
        for client, name in enumerate(self.sites):
            path = self.path / "keys" / f"{name}.pub"
            try:
                key = read_public_key(path)
                if (other := owners.setdefault(key, client)) != client:
                    raise UserError(f"{path}: is the key of site {self.sites[other]}; each site has its own")
            except UserError:
                if not begun:
                    raise
        return {client: key for key, client in owners.items()}

    def fingerprints(self) -> dict[str, str]:
        """Returns the fingerprints of the sites' keys by name, for those sites whose key is there."""
        paths = {name: self.path / "keys" / f"{name}.pub" for name in self.sites}
        return {name: fingerprint(path) for name, path in paths.items() if path.exists()}
