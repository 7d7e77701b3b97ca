"""A run's folder: where its files lie, and how a later command finds them."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_fedad.config import Config, identity
from lit_fedad.errors import UserError
from lit_fedad.tracking import find_run_folder


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    Attributes:
        path: The folder.
    """

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        """The folder that a configuration's run uses: the same command always gets the same one."""
        if config["out"]:
            return cls(Path(config["out"]))
        data = config["data"].get("name") or config["data"]["_target_"].rpartition(".")[2]
        return cls(Path("outputs") / f"{config['method']['name']}-{data}-s{config['seed']}-{identity(config)[:8]}")

    @classmethod
    def find(cls, run: str) -> RunFolder:
        """The folder of a finished or begun run.

        Args:
            run: Its path, or its MLflow run id.

        Raises:
            UserError: If there is no such run.
        """
        folder = Path(run) if Path(run).is_dir() else find_run_folder(run)
        if not (folder / "config.yaml").exists():
            raise UserError(f"{folder}: not a run's folder (it holds no config.yaml)")
        return cls(folder)

    def clear(self) -> None:
        """Removes what an earlier run left."""
        shutil.rmtree(self.path, ignore_errors=True)

    def config(self) -> Config:
        """The resolved configuration that the run was made with."""
        return yaml.safe_load((self.path / "config.yaml").read_text())

    def claim(self, config: Config) -> None:
        """Makes the folder this configuration's.

        Raises:
            UserError: If another configuration's run lies in it.
        """
        if (self.path / "config.yaml").exists() and identity(self.config()) != identity(config):
            raise UserError(f"{self.path}: holds a run of another configuration; give another out=DIR, or fresh=true")
        self._write("config.yaml", yaml.safe_dump(config, sort_keys=False))

    def result(self) -> dict[str, Any] | None:
        """What a complete run came to; None for a run that is not complete."""
        path = self.path / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def save_json(self, name: str, value: Any) -> Path:
        """Writes JSON; undefined numbers become null."""
        return self._write(name, json.dumps(_plain(value), indent=1))

    def _write(self, name: str, text: str) -> Path:
        """Writes a file that is either complete or absent."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f".{name}.partial"
        partial.write_text(text)
        os.replace(partial, self.path / name)
        return self.path / name


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
