"""The command line: ``lit-fedad COMMAND key=value ...``."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from lit_fedad import __version__
from lit_fedad.cli.help import Command, Form, command_help, only, overview
from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import extra_of, install, require
from lit_fedad.core.options import bind
from lit_fedad.experiment.disk_full import is_disk_full
from lit_fedad.report.console import Display, plain_warnings

_HELP = {"-h", "--help", "help"}


class _Terminated(KeyboardInterrupt):
    """SIGTERM arrived: the command ends as by Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name: entry point of the console script.

    Args:
        arguments: Command and options; None for those of the process.

    Returns:
        Exit status: 0, 2 for bad input (one line on stderr), 130 when interrupted, 143 when terminated.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"lit-fedad {__version__}")  # noqa: T201
        return 0
    name, *rest = [word for word in given if word not in _HELP] or [""]
    display = Display()
    with plain_warnings(display), _terminable():
        try:
            if not name:
                print(overview(COMMANDS))  # noqa: T201
                return 0
            if name not in COMMANDS:
                raise UserError(f"no command '{name}'; one of {', '.join(COMMANDS)}")
            command = COMMANDS[name]
            if not _HELP.isdisjoint(given):
                print(command_help(name, command, rest[0] if rest else None))  # noqa: T201
                return 0
            if command.extra:
                require(command.extra, f"lit-fedad {name}")
            module, _, function = command.function.rpartition(".")
            bind(getattr(import_module(f"lit_fedad.{module}"), function), rest, name, display=display)()
        except UserError as error:
            display.error(str(error))
            return 2
        except ModuleNotFoundError as error:
            extra = extra_of(error.name or "")
            if extra is None:
                raise
            display.error(f"this needs {error.name}: {install(extra)}")
            return 2
        except OSError as error:
            if not is_disk_full(error):
                raise
            display.error(
                f"no space is left on the disk for {error.filename or 'a file'}: make room{_continues(name)}"
            )
            return 2
        except KeyboardInterrupt as stop:
            terminated = isinstance(stop, _Terminated)
            display.error(f"{'terminated' if terminated else 'interrupted'}{_continues(name)}")
            return 143 if terminated else 130
    return 0


def _continues(name: str) -> str:
    """Ends a line about a command that was ended early; the name may be of none."""
    return "; the same command continues" if name in COMMANDS and COMMANDS[name].continues else ""


@contextmanager
def _terminable() -> Iterator[None]:
    """Ends what the block does on SIGTERM as on Ctrl-C: records are closed, and one line is printed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return
    process = os.getpid()

    def stop(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a forked worker ends at once
            os._exit(128 + number)
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


_OVERRIDES = "[any.key=value ...]"

COMMANDS = {
    "train": Command(
        "cli.train.train",
        only(
            "run an experiment; the same command again continues or shows it",
            "method=feddymem data=mvtec_mixture data.root=/data/mvtec out=outputs/first",
            words=_OVERRIDES,
        ),
        continues=True,
    ),
    "evaluate": Command(
        "deployment.predict.evaluate",
        only(
            "recompute a finished run's metrics from its last checkpoint",
            "run=outputs/first data.root=/data/mvtec",
        ),
    ),
    "predict": Command(
        "deployment.predict.predict",
        only(
            "score new images: CSV of scores, p-values and decisions, one heatmap an image",
            "run=outputs/first images=photos",
        ),
    ),
    "watch": Command(
        "deployment.watch.watch",
        only(
            "score a folder as it grows, and raise an alarm when images drift, at most one in run_length images by"
            " chance; once=true looks once; the same command continues",
            "run=outputs/first images=camera",
        ),
        continues=True,
    ),
    "update": Command(
        "deployment.update.update",
        only(
            "add new normal images, in a folder for each client, to a detector made of sums: one more exchange of"
            " the method, and a new version beside the old; reviews= takes its false alarms alone, alpha="
            " changes the promised rate alone",
            "run=outputs/first images=normal client=0 product=bottle",
        ),
        extra="train",
    ),
    "export": Command(
        "deployment.export.export",
        only(
            "write a trained detector with its decision rule and model card, and check it against the live one;"
            " also format=openvino and, by normal images, openvino_int8",
            "run=outputs/first format=onnx",
        ),
    ),
    "register": Command(
        "deployment.exported.register",
        only(
            "put an exported detector into MLflow's model registry: serve run=models:/NAME@ALIAS fetches it",
            "run=outputs/first name=bottles alias=line_1",
        ),
        extra="train",
    ),
    "serve": Command(
        "deployment.serving.serve",
        only(
            "answer HTTP requests with score, p-value, decision and heatmap of an image, by an exported ONNX file",
            "run=outputs/first port=8080",
        ),
        extra="serve",
    ),
    "ui": Command(
        "deployment.ui.command.ui",
        only(
            "the operator's page: federation, thresholds and drift of a site, worst heatmaps, an image to try",
            "run=outputs/first",
        ),
        extra="ui",
    ),
    "report": Command(
        "papers.table.report",
        {
            "": Form(
                "one HTML page, and Markdown, of all tracked runs; experiment= takes those of some MLflow experiments",
                "experiment=textures out=reports/textures",
                ("papers.page.PageOptions",),
                "[tracking.uri=URI]",
            ),
            "table=NAME": Form(
                "make a paper's table: runs what is missing, resumes what was begun; other keys go to every run",
                "table=feddymem_1 root.mpdd=/data/mpdd seeds=0,1,2",
                ("papers.table.TableOptions",),
                _OVERRIDES,
            ),
        },
        continues=True,
        extra="train",
    ),
    "privacy": Command(
        "cli.privacy.privacy",
        {
            "attack=lira": Form(
                "membership inference: all messages, against those of shadow runs; the same command continues",
                "attack=lira run=outputs/first shadows=16",
                ("cli.privacy.PrivacyOptions", "audits.membership.LiraOptions"),
                "[data.root=DIR]",
            ),
            "attack=inversion": Form(
                "images out of what a client uploads: banks, weights of classifiers, condensed images",
                "attack=inversion run=outputs/first client=0",
                ("cli.privacy.PrivacyOptions", "audits.inversion_attack.InversionOptions"),
                "[data.root=DIR]",
            ),
            "attack=dcor": Form(
                "distance correlation of shared densities with the images behind them",
                "attack=dcor run=outputs/first",
                ("cli.privacy.PrivacyOptions",),
                "[data.root=DIR]",
            ),
            "attack=report": Form(
                "print the page: what leaves a site, what attacks found, which defences are on",
                "attack=report run=outputs/first",
                ("cli.privacy.PrivacyOptions",),
                "[data.root=DIR]",
            ),
        },
        continues=True,
        extra="train",
    ),
    "sweep": Command(
        "sweep.command.sweep",
        only(
            "join a study as a worker, or begin it; n_trials=0 shows it; start as many workers as you like",
            "study=feddymem_th n_trials=20",
            ("sweep.command.SweepOptions",),
            _OVERRIDES,
        ),
        continues=True,
        extra="train",
    ),
    "pretrain": Command(
        "pretraining.pretrain.command",
        only(
            "make a backbone from drawn scenes alone; the same command continues",
            "out=outputs/own steps=3000",
            ("pretraining.pretrain.PretrainOptions",),
        ),
        continues=True,
        extra="train",
    ),
    "federation": Command(
        "cli.federation.federation",
        {
            "init": Form(
                "real sites, at the coordinator: write settings, certificates and Flower's configuration",
                "init out=fed host=fed.example.org sites=north,south method=federated_bank",
                ("cli.federation.FederationInit",),
                _OVERRIDES,
            ),
            "start": Form(
                "run it until its end; the same command continues", "start fed=fed", ("cli.federation.start",)
            ),
            "status": Form(
                "rounds, bytes, false alarms and troubles of every site",
                "status fed=fed",
                ("cli.federation.status",),
            ),
            "renew": Form(
                "issue its certificates again, in place", "renew fed=fed", ("cli.federation.renew",)
            ),
        },
        continues=True,
    ),
    "site": Command(
        "cli.sites.site",
        {
            "init": Form(
                "real sites, at a site: write its settings and its key",
                "init out=north name=north address=fed.example.org:9443 ca=ca.crt data=folders data.root=/data/own",
                ("cli.sites.SiteInit",),
                "data=NAME data.root=DIR [data.key=value ...]",
            ),
            "start": Form(
                "answer the coordinator's requests until the process is ended",
                "start site=north",
                ("cli.sites.start",),
            ),
            "status": Form(
                "its fingerprint, and the runs that it takes part in",
                "status site=north",
                ("cli.sites.status",),
            ),
            "review": Form(
                "what the offered federation would take of it, exchange by exchange",
                "review site=north offer=offer.json",
                ("cli.sites.review",),
            ),
            "approve": Form(
                "let that federation take it, and no other",
                "approve site=north offer=offer.json hash=HASH",
                ("cli.sites.approve",),
            ),
            "log": Form(
                "what was asked, and what was answered", "log site=north last=20", ("cli.sites.log",)
            ),
            "clean": Form(
                "list or remove the states of old runs", "clean site=north runs=all", ("cli.sites.clean",)
            ),
            "renew": Form("make a new key, in place", "renew site=north", ("cli.sites.renew",)),
        },
        continues=True,
    ),
    "sync": Command(
        "cli.train.sync",
        only("send tracking records that MLflow could not take in time", "run=outputs/first"),
    ),
    "options": Command(
        "cli.train.list_choices",
        only("list configuration groups, or the choices in one", "method", words="[GROUP ...]"),
    ),
    "data": Command(
        "cli.data.data",
        {
            "list": Form(
                "list data configurations: what they show, their licences, where to get them", "list"
            ),
            "check": Form(
                "read every file of a download: broken images, wrong masks, leaks, missing images",
                "check mvtec_mixture root=/data/mvtec",
                words="NAME root=DIR [any data key=value ...]",
            ),
            "init": Form(
                "recognise how your own images are laid out, and print the command that trains on them",
                "init photos",
                words="DIR",
            ),
        },
    ),
    "completion": Command(
        "cli.completion.completion",
        only(
            'complete commands, keys and choices in a shell: eval "$(lit-fedad completion shell=bash)"; also zsh',
            "shell=bash",
        ),
    ),
    "doctor": Command(
        "cli.doctor.doctor",
        only("check this machine: versions, devices, weights, cache, disk, ports, extras", ""),
    ),
}
