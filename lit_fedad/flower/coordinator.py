"""What a coordinator starts: Flower's SuperLink, the open port and one run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import install
from lit_fedad.core.files import stored_bytes
from lit_fedad.experiment.claim import locked
from lit_fedad.flower.federation_folder import LINK, FederationFolder
from lit_fedad.flower.leftover import MARK, end_leftover, remember
from lit_fedad.flower.proxy import server
from lit_fedad.flower.signals import Signals
from lit_fedad.report.console import Display
from lit_fedad.sites.enrolment import check_crosses

ERROR = "error.txt"  # file with the cause why a run ended early
_REGISTERED = "registered"  # file with the fingerprints of the keys that are registered at the SuperLink
_READY_S = 120  # longest time that the SuperLink may take to start
_FOLLOW_S = 2.0  # time between two looks for new keys and certificates


def start(folder: FederationFolder, display: Display) -> None:
    """Runs a federation: the SuperLink, the open port, and the run until its end.

    Raises:
        UserError: If a key is missing, Flower does not start, or the run fails.
    """
    folder.public_keys()  # refuses missing and equal keys before anything starts
    with folder.writing():
        folder.write_offer()
    check_crosses(folder.plan.config(), folder.plan.classes)
    error_file = folder.path / ERROR
    with locked(folder.path), _superlink(folder, display), _open_port(folder) as proxy:
        error_file.unlink(missing_ok=True)  # left by an earlier start; the lock says that none is running
        _register(folder, display)
        command = ["flwr", "run", str(folder.path / "app"), LINK, "--stream"]
        command += ["--run-config", f"folder={json.dumps(str(folder.path))}"]
        display.note(" ".join(command))
        with subprocess.Popen(command, env=_environment(folder)) as process:  # noqa: S603
            try:
                _follow(folder, process, proxy, display)
            except BaseException:
                process.kill()
                raise
    if error_file.exists() and (cause := stored_bytes(error_file).strip()):  # no file on a full disk
        raise UserError(cause.decode(errors="replace"))
    if not (folder.run / "result.json").exists():
        raise UserError(
            f"the run ended early; what Flower says: {folder.path / 'superlink.log'}; the same command continues"
        )


@contextmanager
def _superlink(folder: FederationFolder, display: Display) -> Iterator[None]:
    """Runs Flower's SuperLink for a block; only this machine can reach it."""
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
        raise UserError(f"port {folder.link} is in use; change link in {folder.file}")
    with (folder.path / "superlink.log").open("wb") as log:  # written anew at each start: it may get long
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
        except BaseException:  # a signal; the SuperLink may have begun
            end_leftover(folder.path)
            raise
        try:
            remember(folder.path, process.pid)
            deadline = time.monotonic() + _READY_S
            while not _listening(folder.link):
                if process.poll() is not None or time.monotonic() > deadline:
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
    """Runs the open port, through which sites come in, for a block; yields its server."""
    if _listening(folder.port):
        raise UserError(f"port {folder.port} is in use; change port in {folder.file}")
    Signals(folder.path).clear()
    proxy = server(folder.path, folder.link, folder.port)
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    try:
        while not proxy.started:
            if not thread.is_alive():
                raise UserError(f"port {folder.port} cannot be opened; change it in {folder.file}")
            time.sleep(0.1)
        yield proxy
    finally:
        proxy.should_exit = True
        thread.join(20)


def _follow(
    folder: FederationFolder, process: subprocess.Popen[bytes], proxy: uvicorn.Server, display: Display
) -> None:
    """Waits for the run's end; meanwhile registers new keys, and gives the open port a renewed certificate."""
    certificate_time, last_warning = (folder.path / "server.pem").stat().st_mtime, ""
    while process.poll() is None:
        time.sleep(_FOLLOW_S)
        try:
            if (renewed := (folder.path / "server.pem").stat().st_mtime) != certificate_time:
                proxy.config.ssl.load_cert_chain(folder.path / "server.pem", folder.path / "server.key")
                certificate_time = renewed
                display.note("the open port has the renewed certificate")
            _register(folder.again(), display)
        except (UserError, OSError) as error:
            if str(error) != last_warning:
                display.warn(last_warning := str(error))


def _register(folder: FederationFolder, display: Display) -> None:
    """Registers new keys at the SuperLink.

    Keys that were removed stay registered there, but the open port refuses them.
    """
    registered = folder.path / _REGISTERED
    fingerprints = stored_bytes(registered).split(b"\n") if registered.exists() else []
    for name, fingerprint in folder.fingerprints().items():
        if fingerprint.encode() in fingerprints:
            continue
        command = ["flwr", "supernode", "register", str(folder.path / "keys" / f"{name}.pub"), LINK]
        command += ["--name", name]
        done = subprocess.run(command, env=_environment(folder), capture_output=True, text=True, check=False)  # noqa: S603
        output = " ".join((done.stdout + done.stderr).split())
        if done.returncode and "already in use" not in output:
            raise UserError(f"'{' '.join(command[:4])}' failed: {output[-300:]}")
        with registered.open("a") as file:
            file.write(f"{fingerprint}\n")
        display.note(f"site {name} is let in: {fingerprint}")


def _environment(folder: FederationFolder) -> Mapping[str, str]:
    """Returns the environment of Flower's commands: files in the folder, no telemetry, this Python first."""
    added = {
        MARK: str(folder.path),
        "FLWR_HOME": str(folder.path / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_LOG_LEVEL": "WARNING",  # at a lower level the log grows by a line for each request of a site
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    return {**os.environ, **added}


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
