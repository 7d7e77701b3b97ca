"""The command line: ``lit-fedad COMMAND key=value ...``."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType

from lit_fedad import __version__
from lit_fedad.cli.help import Command, Form, command_help, one_form, overview
from lit_fedad.core.errors import UserError, is_out_of_memory
from lit_fedad.core.extras import extra_of, install, require
from lit_fedad.core.files import is_disk_full
from lit_fedad.core.options import bind
from lit_fedad.report.console import Display
from lit_fedad.report.plain_warnings import plain_warnings

_HELP = {"-h", "--help", "help"}

_MISPLACED = {
    *(errno.EACCES, errno.EROFS, errno.ENAMETOOLONG),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP),
}
"""Error numbers that concern a path which the user gave: it may not be used, is no folder, or is no file."""


class _Terminated(KeyboardInterrupt):
    """Raised when SIGTERM arrives: the command ends as by Ctrl-C."""


def run() -> int:
    """Runs the command of the process, and returns its exit status; this is the entry point of the console script."""
    # Imports make 800,000 objects, hardly any of which is garbage. The collector took a tenth of the time to start, and
    # more than a second at the end, when all memory is freed anyway.
    gc.set_threshold(10_000)
    _open_streams()
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader of the pipe, such as head, has stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    finally:
        gc.freeze()


def _open_streams() -> None:
    """Opens standard streams that the caller has closed on the null device, so that no file gets their numbers."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name.

    Args:
        arguments: Command and options; None for those of the process.

    Returns:
        Exit status: 0, 2 for bad input (one line on stderr), 130 when interrupted, 143 when terminated.
    """
    words = [_at_home(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    if words == ["--version"]:
        print(f"lit-fedad {__version__}")  # noqa: T201
        return 0
    name, *rest = [word for word in words if word not in _HELP] or [""]
    display = Display()
    with plain_warnings(display), _terminable():
        try:
            _call(name, rest, display, explain=not _HELP.isdisjoint(words))
        except (KeyboardInterrupt, Exception) as error:
            if stop := _interruption(error):
                terminated = isinstance(stop, _Terminated)
                display.error(f"{'terminated' if terminated else 'interrupted'}{_continues(name)}")
                return 143 if terminated else 130
            if (line := _line(error, name, rest)) is None:
                raise
            display.error(line)
            return 2
    return 0


def _at_home(word: str) -> str:
    """Expands the home folder after ``key=``, where some shells do not."""
    key, _, value = word.partition("=")
    return f"{key}={Path(value).expanduser()}" if value.startswith("~/") else word


def _call(name: str, words: Sequence[str], display: Display, explain: bool) -> None:
    """Calls a command, or prints its help if `explain`; without a name, prints the list of all commands."""
    if not name:
        print(overview(COMMANDS))  # noqa: T201
        return
    if name not in COMMANDS:
        raise UserError(f"no command '{name}'; one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    if explain:
        print(command_help(name, command, words[0] if words else None))  # noqa: T201
        return
    try:
        Path.cwd()
    except FileNotFoundError:  # torch cannot even be imported there
        raise UserError("the current folder does not exist any more: cd to another one") from None
    form, words, title = command.called(name, words)
    if command.extra:
        require(command.extra, f"lit-fedad {name}")
    module, _, function = form.function.rpartition(".")
    bind(getattr(import_module(f"lit_fedad.{module}"), function), words, title, display=display)()


def _interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """Finds the interruption behind an error: an interrupted library may raise an error of its own."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return error
        error = error.__context__
    return None


_LARGE = re.compile(r"\+*((?!seed=)[\w./]+)=\d{4,}")
"""A whole number of four digits or more in a command, which may decide a size."""


def _line(error: BaseException, name: str, words: Sequence[str]) -> str | None:
    """Returns the line that tells the user what to correct; None if the error is a defect of the library."""
    match error:
        case UserError() | MemoryError() | RuntimeError() if is_out_of_memory(error):
            short = "the memory of this machine or its GPU is not enough"
            cause = str(error) if isinstance(error, UserError) else short
            given = [match[1] for word in words if (match := _LARGE.fullmatch(word))]
            keys = ", ".join(dict.fromkeys([*given, "image.size", "grid", "batch_size"]))
            return f"{cause}; give a smaller {keys} or evaluation.batch_size{_continues(name)}"
        case UserError():
            return str(error)
        case ModuleNotFoundError() if extra := extra_of(error.name or ""):
            return f"this needs {error.name}: {install(extra)}"
        case OSError() if is_disk_full(error):
            target = error.filename2 or error.filename or "a file"  # in an error of copying, the second
            full = "no space is left on the disk, or no more is allowed (quota, ulimit -f)"
            return f"{full}, for {target}: make room{_continues(name)}"
        case OSError() if error.errno in _MISPLACED and error.filename:
            return f"{error.filename}: cannot be read or written ({error.strerror})"
    return None


def _continues(name: str) -> str:
    """Returns the end of a line about a command that was interrupted; there may be no command of this name."""
    return "; the same command continues" if name in COMMANDS and COMMANDS[name].continues else ""


@contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM end the block like Ctrl-C: records are closed, and one line is printed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    process, usual_hook = os.getpid(), sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # this is a forked worker, which ends at once
            os._exit(128 + number)
        raise _Terminated

    def send_again(unraisable: sys.UnraisableHookArgs) -> None:
        """Sends a signal once more: Python ignores the exception if it was raised in a callback of its own."""
        if isinstance(unraisable.exc_value, (KeyboardInterrupt, SystemExit)):
            number = signal.SIGINT if type(unraisable.exc_value) is KeyboardInterrupt else signal.SIGTERM
            threading.Timer(0.01, os.kill, (process, number)).start()
        else:
            usual_hook(unraisable)

    usual_handler, sys.unraisablehook = signal.signal(signal.SIGTERM, stop), send_again
    try:
        yield
    finally:
        sys.unraisablehook = usual_hook
        signal.signal(signal.SIGTERM, usual_handler)


_OVERRIDES = "[any.key=value ...]"

# Functions are imported when they are called: the list of commands must not wait for Lightning.
COMMANDS = {
    "train": one_form(
        "cli.train.train",
        "method=federated_bank data=mvtec_mixture data.root=/data/mvtec out=outputs/first",
        _OVERRIDES,
        continues=True,
    ),
    "evaluate": one_form("deployment.predict.evaluate", "run=outputs/first data.root=/data/mvtec"),
    "predict": one_form("deployment.predict.predict", "run=outputs/first images=photos"),
    "watch": one_form("deployment.watch.watch", "run=outputs/first images=camera", continues=True),
    "update": one_form(
        "deployment.update.update", "run=outputs/first images=normal client=0 product=bottle", extra="train"
    ),
    "export": one_form("deployment.export.export", "run=outputs/first format=onnx"),
    "register": one_form(
        "deployment.exported.register", "run=outputs/first name=bottles alias=line_1", extra="train"
    ),
    "serve": one_form("deployment.serving.serve", "run=outputs/first port=8080", extra="serve"),
    "ui": one_form("deployment.ui.command.ui", "run=outputs/first", extra="ui"),
    "report": Command(
        {
            "": Form("papers.page.report_runs", "experiment=textures out=reports/textures"),
            "table=NAME": Form(
                "papers.table.report_table",
                "table=feddymem_1 root.mpdd=/data/mpdd seeds=0,1,2",
                _OVERRIDES,
            ),
        },
        continues=True,
        extra="train",
    ),
    "privacy": Command(
        {
            "attack=lira": Form("cli.privacy.lira", "attack=lira run=outputs/first shadows=16"),
            "attack=inversion": Form("cli.privacy.inversion", "attack=inversion run=outputs/first client=0"),
            "attack=dcor": Form("cli.privacy.dcor", "attack=dcor run=outputs/first"),
            "attack=report": Form("cli.privacy.report", "attack=report run=outputs/first"),
        },
        continues=True,
        extra="train",
    ),
    "sweep": one_form(
        "sweep.command.sweep", "study=feddymem_th n_trials=20", _OVERRIDES, continues=True, extra="train"
    ),
    "federation": Command(
        {
            "init": Form(
                "cli.federation.init",
                "init out=fed host=fed.example.org sites=north,south method=federated_bank",
                _OVERRIDES,
            ),
            "start": Form("cli.federation.start", "start fed=fed"),
            "status": Form("cli.federation.status", "status fed=fed"),
            "renew": Form("cli.federation.renew", "renew fed=fed"),
        },
        continues=True,
        extra="flower",
    ),
    "site": Command(
        {
            "init": Form(
                "cli.sites.init",
                "init out=north name=north address=fed.example.org:9443 ca=ca.crt data=folders data.root=/data/own",
                "data=NAME data.root=DIR [data.key=value ...]",
            ),
            "start": Form("cli.sites.start", "start site=north"),
            "status": Form("cli.sites.status", "status site=north"),
            "review": Form("cli.sites.review", "review site=north offer=offer.json"),
            "approve": Form("cli.sites.approve", "approve site=north offer=offer.json hash=HASH"),
            "log": Form("cli.sites.log", "log site=north last=20"),
            "clean": Form("cli.sites.clean", "clean site=north runs=all"),
            "renew": Form("cli.sites.renew", "renew site=north"),
        },
        continues=True,
        extra="flower",
    ),
    "sync": one_form("cli.train.sync", "run=outputs/first"),
    "options": one_form("cli.train.list_choices", "method", "[GROUP ...]"),
    "data": Command(
        {
            "list": Form("cli.data.list_data", "list"),
            "check": Form(
                "cli.data.check_data",
                "check mvtec_mixture root=/data/mvtec",
                "NAME root=DIR [any data key=value ...]",
            ),
            "init": Form("cli.data.init_data", "init photos", "DIR"),
        },
    ),
    "completion": one_form("cli.completion.completion", "shell=bash"),
    "doctor": one_form("cli.doctor.doctor", ""),
}
