"""The command line: ``lit-fedad COMMAND key=value ...``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from lit_fedad.errors import UserError
from lit_fedad.options import key_and_value
from lit_fedad.report.console import Display, plain_warnings

USAGE = """\
lit-fedad COMMAND key=value ...

  train      method=feddymem [data=textures] [experiment=small] [out=DIR] [any.key=value]
             run an experiment; the same command again continues or shows it
  evaluate   run=<MLflow run id or folder> [data.root=DIR] [backbone.weights=FILE]
             recompute a finished run's metrics from its last checkpoint
  predict    run=<MLflow run id or folder> images=FOLDER [client=N] [out=DIR] [backbone.weights=FILE]
             score new images: CSV of scores and decisions, one heatmap an image
  export     run=<MLflow run id or folder> [client=N] [format=onnx,pt2] [images=FOLDER] [out=DIR]
             write a trained detector with its threshold and model card, and check it against the live one
  report     [experiment=A,B] [out=DIR] [ui=http://127.0.0.1:5000]
             one HTML page, and Markdown, of all tracked runs; experiment= takes those of some MLflow experiments
  report     table=feddymem_1 [root.mpdd=DIR | experiment=A,B | data=A,B] [seeds=0,1,2] [rows=A,B] [jobs=2] [out=DIR]
             make a paper's table: runs what is missing, resumes what was begun; any.key=value goes to every run
  privacy    run=<MLflow run id or folder> attack=lira [mode=online|offline] [shadows=16] [seed=0] [out=DIR]
             membership inference: what clients upload last, against shadow runs; the same command continues
  privacy    run=<MLflow run id or folder> attack=inversion [client=0] [images=4] [steps=500] [seed=0]
             [knowledge=shared|own] [update=round|step]
             images out of what a client uploads: banks, weights of classifiers, condensed images
  privacy    run=<MLflow run id or folder> attack=dcor
             distance correlation of shared densities with the images behind them
  sweep      study=feddymem_th [n_trials=20] [storage=journal|URL] [out=DIR] [seed=0] [any.key=value]
             join a study as a worker, or begin it; n_trials=0 shows it; start as many workers as you like
  pretrain   [out=DIR] [steps=3000] [seed=0] [name=resnet10t]
             make a backbone from drawn scenes alone; the same command continues
  sync       run=<MLflow run id or folder>
             send tracking records that MLflow could not take in time
  options    [GROUP]
             list configuration groups, or the choices in one
  data       [list]
             list data configurations: what they show, their licences, where to get them
  data       check NAME root=DIR [any data key=value]
             read every file of a download: broken images, wrong masks, leaks, missing images

Every key and its default: lit-fedad train --cfg [key=value ...]"""

_HELP = {"-h", "--help"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script.

    Args:
        arguments: Command and key=value pairs; None for those of the process.

    Returns:
        Exit status: 0, 2 for bad input (one line on stderr), 130 when interrupted.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] == "help" or not _HELP.isdisjoint(words):
        print(USAGE)  # noqa: T201
        return 0
    command, *rest = words
    display = Display()
    with plain_warnings(display):
        try:
            if command not in _COMMANDS:
                raise UserError(f"no command '{command}'; one of {', '.join(_COMMANDS)}")
            _COMMANDS[command](rest)
        except UserError as error:
            display.error(str(error))
            return 2
        except KeyboardInterrupt:
            display.error(
                "interrupted"
                + (
                    "; the same command continues"
                    if command in ("train", "report", "privacy", "sweep", "pretrain")
                    else ""
                )
            )
            return 130
    return 0


def _train(words: list[str]) -> None:
    from lit_fedad.config import compose

    if "--cfg" in words:
        import yaml

        config = compose([word for word in words if word != "--cfg"])
        print(yaml.safe_dump(config, sort_keys=False), end="")  # noqa: T201
        return
    config = compose(words)
    from lit_fedad.experiment.train import train

    train(config)


def _evaluate(words: list[str]) -> None:
    given = _pairs(words, required=("run",))
    from lit_fedad.deployment.predict import evaluate

    evaluate(given.pop("run"), given)


def _predict(words: list[str]) -> None:
    given = _pairs(words, required=("run", "images"))
    from lit_fedad.deployment.predict import predict

    run, images = given.pop("run"), given.pop("images")
    predict(run, images, client=given.pop("client", None), out=given.pop("out", None), overrides=given)


def _export(words: list[str]) -> None:
    given = _pairs(words, required=("run",))
    from lit_fedad.deployment.export import export

    options = {key: given.pop(key, None) for key in ("client", "images", "out")}
    export(given.pop("run"), formats=given.pop("format", "onnx,pt2"), overrides=given, **options)


def _privacy(words: list[str]) -> None:
    given = _pairs(words, required=("run", "attack"))
    from lit_fedad.cli.privacy import audit

    audit(given.pop("attack"), given.pop("run"), given)


def _sync(words: list[str]) -> None:
    given = _pairs(words, required=("run",))
    run = given.pop("run")
    if given:
        raise UserError(f"sync has no key '{next(iter(given))}', only 'run'")
    from lit_fedad.experiment.run_folder import RunFolder
    from lit_fedad.tracking.tracker import deliver

    delivery = deliver(RunFolder.find(run).path)
    if delivery.pending:
        raise UserError(f"{delivery.pending} records still wait: {delivery.error}")
    if delivery.error:
        raise UserError(delivery.error)
    Display().note(f"everything is delivered: MLflow run {delivery.run_id}")


def _options(words: list[str]) -> None:
    from lit_fedad.config import conf_folder, options

    groups = sorted(path.name for path in conf_folder().iterdir() if path.is_dir() and options(path.name))
    for group in words or groups:
        if group not in groups:
            raise UserError(f"no group '{group}'; one of {', '.join(groups)}")
        print(f"{group:<12} {'  '.join(options(group))}")  # noqa: T201


def _data(words: list[str]) -> None:
    from lit_fedad.cli.data import check_data, list_data

    match words:
        case [] | ["list"]:
            list_data(Display())
        case ["check", name, *keys] if "=" not in name:
            given = {key.removeprefix("data."): value for key, value in _pairs(keys, required=()).items()}
            check_data(name, given, Display())
        case _:
            raise UserError("the data command is: data list, or data check NAME root=DIR")


def _report(words: list[str]) -> None:
    if any(word.startswith("table=") for word in words):
        from lit_fedad.comparison.table import report_table

        report_table(words, Display())
    else:
        from lit_fedad.comparison.page import report_runs

        report_runs(words, Display())


def _sweep(words: list[str]) -> None:
    from lit_fedad.sweep.command import sweep

    sweep(words, Display())


def _pretrain(words: list[str]) -> None:
    from lit_fedad.pretraining.pretrain import command

    command(words, Display())


def _pairs(words: list[str], required: tuple[str, ...]) -> dict[str, str]:
    pairs = dict(map(key_and_value, words))
    for key in required:
        if not pairs.get(key):
            raise UserError(f"'{key}' must be given: {key}=...")
    return pairs


_COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "train": _train,
    "evaluate": _evaluate,
    "predict": _predict,
    "sync": _sync,
    "options": _options,
    "data": _data,
    "report": _report,
    "privacy": _privacy,
    "sweep": _sweep,
    "export": _export,
    "pretrain": _pretrain,
}
