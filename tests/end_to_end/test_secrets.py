"""A password in an address appears nowhere: not on the screen, not in a file."""

from __future__ import annotations

import pytest

from lit_fedad.cli.main import main
from lit_fedad.sweep.storage import open_storage

WORD = "pl4nted"
ADDRESS = f"http://me:{WORD}@127.0.0.1:9"


def files_with_the_word(folder):
    return [path for path in folder.rglob("*") if path.is_file() and WORD.encode() in path.read_bytes()]


@pytest.fixture
def screen(capsys):
    def shown():
        captured = capsys.readouterr()
        return captured.out + captured.err

    return shown


@pytest.mark.slow
@pytest.mark.parametrize("given", ["environment", "argument"])
def test_the_address_of_mlflow(lab, tmp_path, monkeypatch, screen, given):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    own = ["tracking=mlflow", f"cache.folder={tmp_path / 'cache'}"]
    if given == "environment":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", ADDRESS)
    else:
        own.append(f"tracking.uri={ADDRESS}")
    overrides = lab.overrides(f"out={tmp_path / 'run'}", *own, "method=nearest_neighbour", "rounds=1")
    shown = ""
    for command in (
        ["train", "--cfg", *overrides],
        ["train", *overrides],
        ["train", *overrides],
        ["sync", f"run={tmp_path / 'run'}"],
        ["predict", "run=0123456789abcdef", f"images={tmp_path}"],
        ["report", *([f"tracking.uri={ADDRESS}"] if given == "argument" else []), f"ui={ADDRESS}"],
        ["train", *overrides, f"tracking.uri={ADDRESS}{{"],
    ):
        main(command)
        shown += screen()
    assert "127.0.0.1:9" in shown
    assert WORD not in shown
    assert files_with_the_word(tmp_path) == []
    assert "http://127.0.0.1:9" in (tmp_path / "run/tracking/sent.json").read_text()


@pytest.mark.parametrize(
    "storage",
    [
        f"postgresql://me:{WORD}@127.0.0.1:9/db",
        f"postgresql:me:{WORD}@127.0.0.1/db",
        f"postgresql:/me:{WORD}@127.0.0.1/db",
        f"me:{WORD}@127.0.0.1",
        f"grpc://me:{WORD}@127.0.0.1:port",
    ],
)
def test_the_storage_of_a_sweep(tmp_path, screen, storage):
    with pytest.raises(Exception, match="storage=") as error:
        open_storage(storage, tmp_path)
    chain, cause = "", error.value
    while cause is not None:
        chain += f"{cause!r}"
        cause = cause.__cause__
    assert WORD not in chain
    main(["sweep", "study=feddymem_th", f"storage={storage}", f"out={tmp_path / 'study'}", "tracking=off"])
    assert WORD not in screen()
    assert files_with_the_word(tmp_path) == []
