"""The folder of a run's files, and its lookup by later commands."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_fedad.config import Config, identity
from lit_fedad.errors import UserError
from lit_fedad.tracking.reading import find_run_folder

_FOLDERS = ("checkpoints", "personal", "figures", "tracking", "predictions", "privacy", "export")
_FILES = ("config.yaml", "partition.json", "thresholds.json", "result.json", "evaluation.json")

# Written to config.yaml. Raise it when a version cannot open the files of the one before; 0.1 wrote none.
_FORMAT = 2


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    Attributes:
        path: The folder.
    """

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        """Returns the folder of a configuration's run, the same for equal configurations."""
        if config["out"]:
            return cls(Path(config["out"]))
        data = config["data"].get("name") or config["data"]["_target_"].rpartition(".")[2]
        name = f"{config['method']['name']}-{data}-s{config['seed']}-{identity(config)[:8]}"
        return cls(Path("outputs") / name)

    @classmethod
    def find(cls, run: str) -> RunFolder:
        """Finds the folder of a finished or begun run.

        Args:
            run: Its path, or its MLflow run id.

        Raises:
            UserError: If there is no such run, or another version wrote it.
        """
        if Path(run).is_dir():
            folder = Path(run)
        else:
            try:
                folder = find_run_folder(run)
            except UserError as error:
                raise UserError(f"run={run}: no such folder, and no tracked run: {error}") from error
        if not (folder / "config.yaml").exists():
            raise UserError(f"{folder}: not a run's folder (it holds no config.yaml)")
        found = cls(folder)
        found.config()
        return found

    def clear(self) -> None:
        """Removes the files of an earlier run, and no other files in the folder."""
        for name in _FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                (self.path / name).unlink()

    def config(self) -> Config:
        """Reads the resolved configuration of the run.

        Raises:
            UserError: If the file is not such a configuration, or another version wrote it.
        """
        path = self.path / "config.yaml"
        try:
            config = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error
        if not isinstance(config, dict) or "method" not in config:
            raise UserError(f"{path}: not the configuration of a run; name another folder")
        version = config.pop("format", None)
        if version != _FORMAT:
            maker = "lit_fedad 0.1" if version is None else f"another version of lit_fedad (format {version})"
            raise UserError(
                f"{self.path}: a run of {maker}, which this version cannot open; use that version, or train again"
                " (another out=DIR, or fresh=true)"
            )
        return config

    def claim(self, config: Config) -> None:
        """Reserves the folder for a configuration, and writes the configuration to it.

        Raises:
            UserError: If it holds a run of another configuration or version, or cannot be written.
        """
        if (self.path / "config.yaml").exists() and identity(self.config()) != identity(config):
            if self.result() or any((self.path / "checkpoints").glob("round_*")):
                raise UserError(
                    f"{self.path}: holds a run of another configuration; give another out=DIR, or fresh=true"
                )
            self.clear()  # left by a command that failed before its first round
        self._write("config.yaml", yaml.safe_dump({"format": _FORMAT, **config}, sort_keys=False))

    def result(self) -> dict[str, Any] | None:
        """Reads the result of a complete run; None for a run that is not complete."""
        path = self.path / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def thresholds(self) -> dict[int, float]:
        """Reads each client's decision threshold of image scores in a complete run."""
        return {
            int(client): value
            for client, value in json.loads((self.path / "thresholds.json").read_text()).items()
        }

    def save_json(self, name: str, value: Any) -> Path:
        """Writes a JSON file, in which undefined numbers become null, and returns its path."""
        return self._write(name, json.dumps(_plain(value), indent=1))

    def _write(self, name: str, text: str) -> Path:
        """Writes a file that is either complete or absent."""
        partial = self.path / f".{name}.partial"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            partial.write_text(text)
            partial.replace(self.path / name)
        except OSError as error:
            raise UserError(f"{self.path / name}: cannot be written ({error.strerror})") from error
        return self.path / name


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
