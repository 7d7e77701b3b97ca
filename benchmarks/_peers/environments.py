"""Virtual environments of other libraries, each in a folder of its own."""

import subprocess
import venv
from pathlib import Path


def python_of(cache: Path, name: str, packages: list[str]) -> Path | None:
    """Installs packages into ``cache/name``, unless they are there.

    Args:
        cache: Folder of the environments.
        name: Name of the environment.
        packages: What pip installs.

    Returns:
        The environment's Python; None where the packages cannot be installed, of which one line is printed.
    """
    folder = cache / name
    python, installed = folder / "bin" / "python", folder / "installed"
    if not installed.exists():
        venv.create(folder, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *packages]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode:
            last = (outcome.stderr.strip() or "pip failed").splitlines()[-1]
            print(f"{name} is left out, as it cannot be installed: {last}")
            return None
        installed.touch()
    return python


def versions(python: Path | str, packages: list[str]) -> str:
    """Names the versions of packages in an environment."""
    code = "import sys; from importlib.metadata import version; print(*(f'{n} {version(n)}' for n in sys.argv[1:]))"
    command = [str(python), "-c", code, *packages]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
