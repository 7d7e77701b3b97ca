"""The commands about training: ``train``, ``options`` (of its configuration) and ``sync`` (of its records)."""

from __future__ import annotations

from collections.abc import Sequence

from lit_fedad.core.config import Config, compose
from lit_fedad.core.config_groups import choices, config_groups
from lit_fedad.core.conflicts import check_conflicts, warn_of_unread
from lit_fedad.core.errors import UserError
from lit_fedad.core.extras import require
from lit_fedad.core.text import redacted, shell_word
from lit_fedad.core.typed_words import given_keys
from lit_fedad.experiment.claim import locked
from lit_fedad.report.console import Display

_TEXTURES = "lit_fedad.data.textures.textures"


def train(overrides: Sequence[str]) -> None:
    """Runs an experiment; the same command again continues or shows it, ``--cfg`` prints its configuration instead.

    Args:
        overrides: Overrides of the configuration; ``--cfg`` may be among them.
    """
    if "--cfg" in overrides:
        import yaml

        config = compose([override for override in overrides if override != "--cfg"])
        print(yaml.safe_dump(redacted(config), sort_keys=False), end="")  # noqa: T201
        return
    require("train", "lit-fedad train")
    config = compose(overrides)
    _refuse_unread_root(config, overrides)
    check_conflicts(config, overrides)
    warn_of_unread(overrides)
    # Imported only here: Lightning takes seconds, and a misspelt key must be refused before.
    from lit_fedad.experiment.run_folder import RunFolder
    from lit_fedad.experiment.train import train
    from lit_fedad.tracking.sender import where_compared

    train(config)
    run = RunFolder.of(config).path
    lines = [
        ("all numbers", str(run / "result.json")),
        ("new images", f"lit-fedad predict {shell_word(f'run={run}')} images=FOLDER"),
    ]
    if (heatmaps := run / "figures" / "heatmaps.png").exists():
        lines.insert(0, ("heatmaps", str(heatmaps)))
    if config["tracking"]["enabled"]:
        lines += where_compared([run])
    if config["data"]["_target_"] == _TEXTURES:
        lines.append(("own images", "lit-fedad data init DIR (prints the command that trains on them)"))
    Display().where_next(lines)


def _refuse_unread_root(config: Config, overrides: Sequence[str]) -> None:
    """Refuses a folder of images if no data were chosen and the default data would not read it.

    Raises:
        UserError: If ``data.root`` is given without ``data``, and the configuration's data are drawn by the library.
    """
    given = given_keys(overrides)
    if "data.root" in given and "data" not in given and config["data"]["_target_"] == _TEXTURES:
        raise UserError(
            "data.root is given without data=, and the default data=textures reads no images; give data=auto,"
            " which recognises how they are laid out, or another of lit-fedad data list"
        )


def list_choices(overrides: Sequence[str]) -> None:
    """Prints the choices of configuration groups.

    Args:
        overrides: Names of groups; none for all groups.

    Raises:
        UserError: If there is no such group.
    """
    groups = [group for group in config_groups() if choices(group)]
    for group in overrides or groups:
        if group not in groups:
            raise UserError(f"no group '{group}'; one of {', '.join(groups)}")
        print(f"{group:<{max(map(len, groups))}}  {'  '.join(choices(group))}")  # noqa: T201


def sync(run: str, display: Display) -> None:
    """Sends tracking records that MLflow could not take in time.

    Args:
        run: MLflow run id, or the run's folder.
        display: Prints that all records are sent.

    Raises:
        UserError: If there is no such run, or MLflow still takes no records.
    """
    from lit_fedad.experiment.run_folder import RunFolder
    from lit_fedad.tracking.sender import deliver

    folder = RunFolder.find(run)
    with locked(folder.path):
        delivery = deliver(folder.path)
    if delivery.pending:
        raise UserError(f"{delivery.pending} records still wait: {delivery.error}")
    if delivery.error:
        raise UserError(delivery.error)
    display.note(f"everything is delivered: MLflow run {delivery.run_id}")
