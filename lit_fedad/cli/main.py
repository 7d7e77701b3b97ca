"""The command line: ``lit-fedad COMMAND key=value ...``."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import extra_of, install, require
from lit_fedad.core.options import run
from lit_fedad.experiment.disk_full import is_disk_full
from lit_fedad.report.console import Display, plain_warnings

_HELP = {"-h", "--help"}
_COLUMN, _WIDTH = 13, 118  # of the help


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the arguments name: entry point of the console script.

    Args:
        arguments: Command and options; None for those of the process.

    Returns:
        Exit status: 0, 2 for bad input (one line on stderr), 130 when interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] == "help" or not _HELP.isdisjoint(given):
        print(usage())  # noqa: T201
        return 0
    name, *rest = given
    display = Display()
    with plain_warnings(display):
        try:
            if name not in COMMANDS:
                raise UserError(f"no command '{name}'; one of {', '.join(COMMANDS)}")
            command = COMMANDS[name]
            if command.extra:
                require(command.extra, f"lit-fedad {name}")
            module, _, function = command.function.rpartition(".")
            run(getattr(import_module(f"lit_fedad.{module}"), function), rest, name, display=display)
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
            hint = "; the same command continues" if COMMANDS[name].continues else ""
            display.error(f"no space is left on the disk for {error.filename or 'a file'}: make room{hint}")
            return 2
        except KeyboardInterrupt:
            hint = "; the same command continues" if COMMANDS[name].continues else ""
            display.error(f"interrupted{hint}")
            return 130
    return 0


def usage() -> str:
    """Writes the help: each command's options, and what it does."""
    lines = ["lit-fedad COMMAND key=value ...", ""]
    for name, command in COMMANDS.items():
        for syntax, purpose in command.usage.items():
            lines += [*_wrapped(syntax, f"  {name}"), *_wrapped(purpose, "")]
    return "\n".join([*lines, "", "Every key and its default: lit-fedad train --cfg [key=value ...]"])


def _wrapped(text: str, head: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head.ljust(_COLUMN),
        subsequent_indent=" " * _COLUMN,
        break_long_words=False,
        break_on_hyphens=False,
    )


class Command(NamedTuple):
    """A command of the command line.

    Attributes:
        function: Path of its function in the package, called by `run`; imported when the command is called: the help
            must not wait for Lightning.
        usage: What the command does, by the syntax of its options.
        continues: Whether the same command continues what was interrupted.
        extra: Key of `EXTRAS`: what must be installed beside the package itself.
    """

    function: str
    usage: Mapping[str, str]
    continues: bool = False
    extra: str | None = None


_RUN = "run=<MLflow run id or folder>"

COMMANDS = {
    "train": Command(
        "cli.train.train",
        {
            "method=feddymem [data=textures] [experiment=small] [out=DIR] [any.key=value]": (
                "run an experiment; the same command again continues or shows it"
            )
        },
        continues=True,
    ),
    "evaluate": Command(
        "deployment.predict.evaluate",
        {
            f"{_RUN} [version=N] [data.root=DIR] [backbone.weights=FILE]": (
                "recompute a finished run's metrics from its last checkpoint"
            )
        },
    ),
    "predict": Command(
        "deployment.predict.predict",
        {
            f"{_RUN} images=FOLDER [client=N] [alpha=A] [product=NAME] [version=N] [out=DIR]"
            " [backbone.weights=FILE]": (
                "score new images: CSV of scores, p-values and decisions, one heatmap an image"
            )
        },
    ),
    "watch": Command(
        "deployment.watch.watch",
        {
            f"{_RUN} images=FOLDER [client=N] [product=NAME] [alpha=A] [run_length=10000] [window=200]"
            " [interval=10] [once=false] [version=N] [out=DIR] [backbone.weights=FILE]": (
                "score a folder as it grows, and raise an alarm when images drift, at most one in run_length images by"
                " chance; once=true looks once; the same command continues"
            )
        },
        continues=True,
    ),
    "update": Command(
        "deployment.update.update",
        {
            f"{_RUN} images=FOLDER [client=N] [product=NAME] [reviews=FILE] [data.root=DIR]"
            " [backbone.weights=FILE]": (
                "add new normal images, in a folder for each client, to a detector made of sums: one more exchange of"
                " the method, and a new version beside the old; reviews= takes its false alarms alone"
            )
        },
        extra="train",
    ),
    "export": Command(
        "deployment.export.export",
        {
            f"{_RUN} [client=N] [format=onnx,pt2] [product=NAME] [version=N] [images=FOLDER] [normal=FOLDER]"
            " [out=DIR]": (
                "write a trained detector with its decision rule and model card, and check it against the live one;"
                " also format=openvino and, by normal images, openvino_int8"
            )
        },
    ),
    "register": Command(
        "deployment.exported.register",
        {
            f"{_RUN} name=NAME [alias=NAME] [client=N] [version=N]": (
                "put an exported detector into MLflow's model registry: serve run=models:/NAME@ALIAS fetches it"
            )
        },
        extra="train",
    ),
    "serve": Command(
        "deployment.serving.serve",
        {
            "run=<MLflow run id, folder of a run or of an exported detector, or models:/NAME@ALIAS>"
            " [client=N] [version=N] [host=127.0.0.1] [port=8080] [workers=1] [queue=16] [threads=N]"
            " [max_bytes=20000000] [max_pixels=25000000] [patience=30]": (
                "answer HTTP requests with score, p-value, decision and heatmap of an image, by an exported ONNX file"
            )
        },
        extra="serve",
    ),
    "ui": Command(
        "deployment.ui.command.ui",
        {
            f"{_RUN} [out=reviews.csv] [host=127.0.0.1] [port=7860]": (
                "the operator's page: federation, thresholds and drift of a site, worst heatmaps, an image to try"
            )
        },
        extra="ui",
    ),
    "report": Command(
        "papers.table.report",
        {
            "[experiment=A,B] [out=DIR] [ui=http://127.0.0.1:5000] [tracking.uri=URI]": (
                "one HTML page, and Markdown, of all tracked runs; experiment= takes those of some MLflow experiments"
            ),
            "table=feddymem_1 [root.mpdd=DIR] [experiment=A,B] [data=A,B] [seeds=0,1,2] [rows=A,B] [metrics=A,B]"
            " [jobs=1] [out=DIR] [any.key=value]": (
                "make a paper's table: runs what is missing, resumes what was begun; other keys go to every run"
            ),
        },
        continues=True,
        extra="train",
    ),
    "privacy": Command(
        "cli.privacy.privacy",
        {
            f"{_RUN} attack=lira [mode=online|offline] [shadows=16] [non_members=train|test] [share=0.5] [seed=0]"
            " [out=DIR]": (
                "membership inference: all messages, against those of shadow runs; the same command continues"
            ),
            f"{_RUN} attack=inversion [client=N] [control=N] [images=4] [steps=500] [restarts=1] [seed=0]"
            " [knowledge=shared|own] [by=search|decoder] [public=DIR] [update=round|step]": (
                "images out of what a client uploads: banks, weights of classifiers, condensed images"
            ),
            f"{_RUN} attack=dcor": "distance correlation of shared densities with the images behind them",
            f"{_RUN} attack=report": "print the page: what leaves a site, what attacks found, which defences are on",
        },
        continues=True,
        extra="train",
    ),
    "sweep": Command(
        "sweep.command.sweep",
        {
            "study=feddymem_th [n_trials=N] [storage=journal|URL] [out=DIR] [seed=0] [patience=120] [any.key=value]": (
                "join a study as a worker, or begin it; n_trials=0 shows it; start as many workers as you like"
            )
        },
        continues=True,
        extra="train",
    ),
    "pretrain": Command(
        "pretraining.pretrain.command",
        {
            "[out=DIR] [name=resnet10t] [layers=1,2,3] [steps=3000] [seed=0] [size=96] [batch=48] [shift=8]"
            " [lighting=2.0] [places=16] [temperature=0.1] [learning_rate=0.002] [precision=bf16-mixed]"
            " [accelerator=auto] [save_every=200] [tracking=true] [tracking_uri=URI] [quiet=false]": (
                "make a backbone from drawn scenes alone; the same command continues"
            )
        },
        continues=True,
        extra="train",
    ),
    "federation": Command(
        "cli.sites.federation",
        {
            "init out=DIR host=NAME sites=A,B,C [port=9443] [link=9442] [timeout=3600] [method=M] [any.key=value]": (
                "real sites, at the coordinator: write settings, certificates and Flower's configuration"
            ),
            "start fed=DIR": "run it until its end; the same command continues",
            "status fed=DIR": "rounds, bytes, false alarms and troubles of every site",
        },
        continues=True,
    ),
    "site": Command(
        "cli.sites.site",
        {
            "init out=DIR name=NAME address=HOST:PORT ca=FILE data=folders data.root=DIR [apart=true] [epsilon=E]"
            " [stages=A,B+C]": ("real sites, at a site: write its settings and its key"),
            "start site=DIR": "answer the coordinator's orders until the process is ended",
            "status site=DIR": "its fingerprint, and the runs that it takes part in",
            "review site=DIR [offer=FILE]": "what the offered federation would take of it, exchange by exchange",
            "approve site=DIR hash=HASH": "let that federation take it, and no other",
            "log site=DIR [last=N]": "what was asked, and what was answered",
            "clean site=DIR [runs=ID|all]": "list or remove the states of old runs",
        },
        continues=True,
    ),
    "sync": Command("cli.train.sync", {_RUN: "send tracking records that MLflow could not take in time"}),
    "options": Command(
        "cli.train.list_choices", {"[GROUP]": "list configuration groups, or the choices in one"}
    ),
    "data": Command(
        "cli.data.data",
        {
            "[list]": "list data configurations: what they show, their licences, where to get them",
            "check NAME root=DIR [any data key=value]": (
                "read every file of a download: broken images, wrong masks, leaks, missing images"
            ),
            "init DIR": "recognise how your own images are laid out, and print the command that trains on them",
        },
    ),
}
