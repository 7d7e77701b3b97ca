import pytest

from lit_fedad.cli import main as cli


@pytest.fixture
def say(capsys):
    """Runs a command; returns its exit status, output lines and error lines."""

    def run(*arguments):
        capsys.readouterr()
        status = cli.main(arguments)
        printed = capsys.readouterr()
        return status, printed.out.splitlines(), printed.err.splitlines()

    return run
