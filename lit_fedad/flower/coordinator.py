"""A coordinator's folder, and the processes that it starts: Flower's SuperLink, the open port, one run."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import uvicorn
import yaml

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import install
from lit_fedad.experiment.lock import locked
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.flower.keys import fingerprint, read_public_key, write_certificates
from lit_fedad.flower.leftover import end_leftover, remember
from lit_fedad.flower.proxy import server
from lit_fedad.flower.signals import RequestSignal, SignOffs
from lit_fedad.report.console import Display
from lit_fedad.sites.coordinator import ENROLLED, Plan
from lit_fedad.sites.enrolment import check_crosses
from lit_fedad.sites.offer import OFFERED, Offer
from lit_fedad.sites.overrides import check_overrides

SETTINGS = "federation.yaml"
ERROR = "error.txt"  # why a run ended early
_REGISTERED = "registered"  # fingerprints of the keys that Flower knows
_LINK = "coordinator"  # Flower's name of this SuperLink
_READY_S = 120
_FOLLOW_S = 2.0

# Flower's app bundle: the names of this package's parts, and no code.
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
class FederationFolder:
    """A coordinator's folder.

    Attributes:
        path: The folder.
        host: Name or address by which sites reach it.
        port: Its open port.
        link: Port of the SuperLink, on this machine alone.
        sites: Names of the sites, in the order of their client numbers.
        overrides: The federation's configuration.
        own: Words of ``cache``, ``fabric``, ``public`` and ``tracking``, for the coordinator.
        timeout: Longest exchange in seconds: who has not answered then has failed.
        classes: Names of the classes that the federation learns; of none where it looks for anomalies.
        out: Name of the run's folder below this one: another name begins another run, with the same keys.
    """

    path: Path
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
    def open(cls, path: Path) -> FederationFolder:
        """Reads a folder that `create` wrote.

        Raises:
            UserError: If it holds no such settings.
        """
        try:
            content = yaml.safe_load((path / SETTINGS).read_text())
            known = {f.name for f in fields(cls)} - {"path"}
            if not isinstance(content, dict) or not set(content) <= known:
                raise ValueError("other keys")
            folder = cls(path.absolute(), **content)
        except (OSError, TypeError, ValueError, yaml.YAMLError) as error:
            raise UserError(
                f"{path / SETTINGS}: cannot be read ({' '.join(str(error).split())}); make it:"
                " lit-fedad federation init"
            ) from error
        folder.check()
        return folder

    @classmethod
    def create(cls, path: Path, **given: Any) -> FederationFolder:
        """Writes settings, certificates and Flower's configuration to a new folder.

        Raises:
            UserError: If the folder holds a federation, or a setting is invalid.
        """
        folder = cls(path.absolute(), **given)
        folder.check()
        if (path / SETTINGS).exists():
            raise UserError(f"{path}: holds a federation already; give another out=DIR")
        try:
            for inner in (path, path / "keys", path / "app", path / "flower"):
                inner.mkdir(parents=True, exist_ok=True)
            write_certificates(path, folder.host)
            (path / "app" / "pyproject.toml").write_text(_APP)
            content = {name: value for name, value in asdict(folder).items() if name != "path"}
            content |= {name: list(content[name]) for name in ("sites", "overrides", "own", "classes")}
            (path / SETTINGS).write_text(yaml.safe_dump(content, sort_keys=False))
            Offer(content["overrides"], content["classes"]).write(path / OFFERED)
            folder.write_flower()
        except OSError as error:
            raise UserError(f"{error.filename or path}: cannot be written ({error.strerror})") from error
        return folder

    def renew(self) -> None:
        """Issues the certificates again, for ten more years; sites go on with the ``ca.crt`` that they have.

        Raises:
            UserError: If they cannot be written.
        """
        try:
            write_certificates(self.path, self.host)
        except OSError as error:
            raise UserError(f"{error.filename or self.path}: cannot be written ({error.strerror})") from error

    def check(self) -> None:
        """Checks the settings.

        Raises:
            UserError: If one is invalid.
        """
        if not self.sites or len(set(self.sites)) < len(self.sites):
            raise UserError("sites must name each site once: sites=north,south")
        for name in self.sites:
            if not re.fullmatch(r"\w[\w-]{0,63}", str(name)):
                raise UserError(f"sites: '{name}' must be letters, digits, '_' and '-'")
        for port in (self.port, self.link):
            if not 0 < port < 65536:
                raise UserError(f"port {port} must be in [1, 65535]")
        if not re.fullmatch(r"[\w.:-]{1,253}", self.host):
            raise UserError(f"host={self.host} must be the name or address by which sites reach this machine")
        if not re.fullmatch(r"\w[\w-]{0,63}", self.out) or self.out in ("keys", "app", "flower"):
            raise UserError(
                f"out={self.out} must be letters, digits, '_' and '-', and no other folder's name"
            )
        if self.timeout <= 0:
            raise UserError(f"timeout={self.timeout} must be above 0")
        check_overrides(self.overrides)

    @property
    def run(self) -> Path:
        """Folder of the run."""
        return self.path / self.out

    @property
    def detector(self) -> str:
        """Where the trained detector lies, as ``predict`` takes it: here, or with each site where models stay there."""
        result = RunFolder(self.run).result() or {}
        return "SITE/detectors/RUN" if result.get("models_stay") else str(self.run)

    @property
    def signal(self) -> RequestSignal:
        """What the run tells the open port by that there are requests."""
        return RequestSignal(self.path / "requests.sent")

    @property
    def sign_offs(self) -> SignOffs:
        """What the open port tells the run of sites that were ended."""
        return SignOffs(self.path / "signed_off")

    def again(self) -> FederationFolder:
        """Reads the settings again, which may name more sites now, after the others; these where they do not."""
        try:
            sites = self.open(self.path).sites
        except UserError:
            return self
        return replace(self, sites=sites) if sites[: len(self.sites)] == self.sites else self

    @property
    def plan(self) -> Plan:
        """What the run is."""
        own = ["tracking=mlflow", *self.own]
        return Plan(self.overrides, self.sites, str(self.run), own, [str(name) for name in self.classes])

    def write_flower(self) -> None:
        """Writes Flower's own settings, which follow from these.

        Raises:
            OSError: If they cannot be written.
        """
        (self.path / "flower" / "config.toml").write_text(
            f'[superlink]\ndefault = "{_LINK}"\n\n[superlink.{_LINK}]\naddress = "127.0.0.1:{self.link}"\n'
            f"root-certificates = {json.dumps(str(self.path / 'ca.crt'))}\n"
        )

    def public_keys(self) -> dict[int, bytes]:
        """Reads the sites' public keys by client; once a run has begun, a site without its own is left out.

        Raises:
            UserError: If one is missing before the run has begun, or two sites have the same.
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
        """Returns the fingerprint of every site's key; of those that are there."""
        paths = {name: self.path / "keys" / f"{name}.pub" for name in self.sites}
        return {name: fingerprint(path) for name, path in paths.items() if path.exists()}


def start(folder: FederationFolder, display: Display) -> None:
    """Runs a federation: the SuperLink, the open port, and the run until its end.

    Args:
        folder: The coordinator's folder.
        display: Output.

    Raises:
        UserError: If a key is missing, Flower does not start, or the run fails.
    """
    folder.public_keys()  # what is wrong is refused before anything starts
    try:
        folder.write_flower()
        Offer(folder.overrides, [str(name) for name in folder.classes]).write(folder.path / OFFERED)
    except OSError as error:
        raise UserError(f"{folder.path / 'flower'}: cannot be written ({error.strerror})") from error
    check_crosses(folder.plan.config(), folder.plan.classes)
    told = folder.path / ERROR
    told.unlink(missing_ok=True)
    with locked(folder.path), _superlink(folder, display), _open_port(folder) as proxy:
        _register(folder, display)
        command = ["flwr", "run", str(folder.path / "app"), _LINK, "--stream"]
        command += ["--run-config", f"folder={json.dumps(str(folder.path))}"]
        display.note(" ".join(command))
        with subprocess.Popen(command, env=_environment(folder)) as process:  # noqa: S603
            try:
                _follow(folder, process, proxy, display)
            except BaseException:
                process.kill()
                raise
    if told.exists():
        raise UserError(told.read_text().strip())
    if not (folder.run / "result.json").exists():
        raise UserError(
            f"the run ended early; what Flower says: {folder.path / 'superlink.log'}; the same command continues"
        )


@contextmanager
def _superlink(folder: FederationFolder, display: Display) -> Iterator[None]:
    """Runs Flower's SuperLink for a block, on this machine alone."""
    command = [
        "flower-superlink", "--host", "127.0.0.1", "--port", str(folder.link),
        "--database", str(folder.path / "superlink.db"), "--ssl-ca-certfile", str(folder.path / "ca.crt"),
        "--ssl-certfile", str(folder.path / "server.pem"), "--ssl-keyfile", str(folder.path / "server.key"),
        "--enable-supernode-auth", "--disable-runtime-dependency-installation",
    ]  # fmt: skip
    display.note(" ".join(command))
    if end_leftover(folder.path):
        display.note("the SuperLink of a coordinator that was killed was still running, and has been ended")
    if _listening(folder.link):
        raise UserError(f"port {folder.link} is in use; change link in {folder.path / SETTINGS}")
    with (folder.path / "superlink.log").open("ab") as log:
        try:
            process = subprocess.Popen(  # noqa: S603
                command,
                env=_environment(folder),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except FileNotFoundError:
            raise UserError(
                f"{command[0]} is neither beside this Python nor on PATH: {install('flower')}"
            ) from None
        remember(folder.path, process.pid)
        try:
            end = time.monotonic() + _READY_S
            while not _listening(folder.link):
                if process.poll() is not None or time.monotonic() > end:
                    raise UserError(
                        f"Flower's SuperLink did not start; it says why in {folder.path / 'superlink.log'}"
                    )
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            end_leftover(folder.path)


@contextmanager
def _open_port(folder: FederationFolder) -> Iterator[uvicorn.Server]:
    """Lets sites in for a block."""
    if _listening(folder.port):
        raise UserError(f"port {folder.port} is in use; change port in {folder.path / SETTINGS}")
    folder.sign_offs.clear()
    upstream, everywhere = f"127.0.0.1:{folder.link}", "0.0.0.0"  # noqa: S104
    proxy = server(upstream, folder.path, everywhere, folder.port, folder.signal, folder.sign_offs)
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    try:
        while not proxy.started:
            if not thread.is_alive():
                raise UserError(f"port {folder.port} cannot be opened; change it in {folder.path / SETTINGS}")
            time.sleep(0.1)
        yield proxy
    finally:
        proxy.should_exit = True
        thread.join(20)


def _follow(
    folder: FederationFolder, process: subprocess.Popen[bytes], proxy: uvicorn.Server, display: Display
) -> None:
    """Waits for the run's end; registers keys and takes certificates that come meanwhile."""
    certificate, told = (folder.path / "server.pem").stat().st_mtime, ""
    while process.poll() is None:
        time.sleep(_FOLLOW_S)
        try:
            _register(folder.again(), display)
            if (renewed := (folder.path / "server.pem").stat().st_mtime) != certificate:
                certificate = renewed
                proxy.config.ssl.load_cert_chain(folder.path / "server.pem", folder.path / "server.key")
                display.note("the open port has the renewed certificate")
        except (UserError, OSError) as error:
            if str(error) != told:
                display.warn(told := str(error))


def _register(folder: FederationFolder, display: Display) -> None:
    """Registers new keys at the SuperLink. It keeps those of others, which the open port does not let in any more."""
    known = folder.path / _REGISTERED
    marks = known.read_text().split("\n") if known.exists() else []
    for name, mark in folder.fingerprints().items():
        if mark in marks:
            continue
        command = ["flwr", "supernode", "register", str(folder.path / "keys" / f"{name}.pub"), _LINK]
        command += ["--name", name]
        done = subprocess.run(command, env=_environment(folder), capture_output=True, text=True, check=False)  # noqa: S603
        said = " ".join((done.stdout + done.stderr).split())
        if done.returncode and "already in use" not in said:
            raise UserError(f"'{' '.join(command[:4])}' failed: {said[-300:]}")
        marks.append(mark)
        with known.open("a") as file:
            file.write(f"{mark}\n")
        display.note(f"site {name} is let in: {mark}")


def _environment(folder: FederationFolder) -> Mapping[str, str]:
    """Returns the environment of Flower's commands: its files in the folder, no telemetry, this Python first."""
    own = {
        "FLWR_HOME": str(folder.path / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    return {**os.environ, **own}


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
