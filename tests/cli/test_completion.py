"""The shell script that completes commands, keys and choices, as bash runs it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from lit_fedad.cli import completion
from lit_fedad.cli.main import COMMANDS


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_keys_and_choices(tmp_path, capsys):
    completion.completion("bash")
    (tmp_path / "script.sh").write_text(capsys.readouterr().out)
    (tmp_path / "photo.png").touch()

    def completed(typed: str) -> list[str]:
        line = f'source script.sh; COMP_LINE="{typed}"; COMP_POINT={len(typed)}; _lit_fedad; echo "${{COMPREPLY[*]}}"'
        found = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
        return found.stdout.split()

    assert completed("lit-fedad ") == [*COMMANDS]
    assert completed("lit-fedad train method=feddymem") == ["feddymem", "feddymem_literal"]
    assert "port=" in completed("lit-fedad serve po")
    assert completed("lit-fedad site ini") == ["init"]
    assert completed("lit-fedad predict images=pho") == ["photo.png"]
