"""Folders of a coordinator and of a site, as the commands write and read them."""

import json
import re
import shlex
import signal
import ssl
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import psutil
import torch
import yaml

import lit_fedad
from lit_fedad.cli.main import main
from lit_fedad.core.errors import ANEW, RESTORE, UserError
from lit_fedad.experiment.claim import locked
from lit_fedad.flower import coordinator
from lit_fedad.flower.federation_folder import FederationFolder
from lit_fedad.flower.site_folder import SiteFolder, bound_memory


def init(folder, *more):
    """Makes a federation of two sites by the commands; returns the exit status of the last."""
    words = ["host=127.0.0.1", "sites=north,east", "method=fedavg", "debug=seconds", "fabric.accelerator=cpu"]
    status = main(["federation", "init", f"out={folder / 'fed'}", *words, *more])
    for name in ("north", "east") if status == 0 else ():
        status = main([
            "site", "init", f"out={folder / name}", f"name={name}", "address=127.0.0.1:9443",
            f"ca={folder / 'fed' / 'ca.crt'}", "data=folders", f"data.root={folder}", "fabric.accelerator=cpu",
        ])  # fmt: skip
    return status


def test_what_init_writes_is_read(tmp_path, capsys):
    assert init(tmp_path) == 0
    for name in ("north", "fed"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0  # for nobody else
    federation = FederationFolder.open(tmp_path / "fed")
    assert (federation.sites, federation.overrides) == (["north", "east"], ["method=fedavg", "debug=seconds"])
    assert federation.own == ["fabric.accelerator=cpu"]
    assert federation.plan.config()["data"] == {"name": "sites"}
    site = SiteFolder.open(tmp_path / "north")
    assert site.settings.data == ["data=folders", f"data.root={tmp_path}"]
    assert site.settings.own == [f"cache.folder={site.path / 'cache'}", "fabric.accelerator=cpu"]
    left = [tmp_path / "north" / name for name in ("reports/ab/report.md", "detectors/ab/result.json")]
    for path in left:
        path.parent.mkdir(parents=True)
        path.touch()
    assert main(["site", "status", f"site={tmp_path / 'north'}"]) == 0
    told = "".join(capsys.readouterr().out.split())
    assert all(part in told for part in ("SHA256:", "north/reports/ab/report.md", "north/detectors/ab"))


@pytest.mark.parametrize("name", ["federation.yaml", "ca.key", "keys/north.pub"])
def test_an_endless_file_ends_a_coordinators_command_in_one_line(tmp_path, capsys, name):
    init(tmp_path)
    path = tmp_path / "fed" / name
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")
    command = "renew" if name == "ca.key" else "start"
    assert main(["federation", command, f"fed={tmp_path / 'fed'}"]) == 2
    assert f"{name}: is no regular file" in "".join(capsys.readouterr().err.splitlines())


def test_keys_and_certificates_are_renewed_in_place(tmp_path, capsys):
    init(tmp_path)
    files = [tmp_path / "north" / "key.pub", tmp_path / "fed" / "ca.crt", tmp_path / "north" / "sum.pub"]
    before = [file.read_bytes() for file in files]
    assert main(["site", "renew", f"site={tmp_path / 'north'}"]) == 0
    assert main(["federation", "renew", f"fed={tmp_path / 'fed'}"]) == 0
    assert files[2].read_bytes() == before[2]
    assert main(["site", "renew", f"site={tmp_path / 'north'}", "sums=true"]) == 0
    assert not {*before} & {file.read_bytes() for file in files}
    assert files[2].read_text().strip() in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("public", "private", "words"), [("key.pub", "key", []), ("sum.pub", "sum.key", ["sums=true"])]
)
def test_a_key_that_cannot_be_renewed_whole_stays_the_one_that_others_know(tmp_path, public, private, words):
    init(tmp_path)
    site = tmp_path / "north"
    known = (site / private).read_bytes()
    (site / public).unlink()
    (site / public).mkdir()  # cannot be replaced by a file
    assert main(["site", "renew", f"site={site}", *words]) == 2
    assert (site / private).read_bytes() == known


def test_sites_that_are_added_meanwhile_are_read_and_others_keep_their_places(tmp_path):
    init(tmp_path)
    federation, file = FederationFolder.open(tmp_path / "fed"), tmp_path / "fed" / "federation.yaml"
    content = file.read_text()
    file.write_text(content.replace("- east\n", "- east\n- west\n").replace("out: run", "out: other"))
    assert federation.again() == replace(federation, sites=["north", "east", "west"])
    for other in (content.replace("- north\n", ""), "no settings"):
        file.write_text(other)
        assert federation.again() == federation


def test_stages_are_lists_of_products_and_folders_hold_wherever_the_site_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ca.crt").touch()
    words = ["out=site", "name=north", "address=127.0.0.1:9443", "ca=ca.crt", "data=folders"]
    assert main(["site", "init", *words, "data.root=my images", "stages=screw,nut+bolt"]) == 0
    settings = SiteFolder.open(tmp_path / "site").settings
    assert settings.stages == [["screw"], ["nut", "bolt"]]
    assert list(settings.data) == ["data=folders", f"data.root={tmp_path}/my images"]


def test_a_key_belongs_to_one_site(tmp_path):
    init(tmp_path)
    federation = FederationFolder.open(tmp_path / "fed")
    with pytest.raises(UserError, match=r"keys/north\.pub: holds no public key; put there the key\.pub"):
        federation.public_keys()
    for name in federation.sites:
        (federation.path / "keys" / f"{name}.pub").write_bytes((tmp_path / "north" / "key.pub").read_bytes())
    with pytest.raises(UserError, match=r"keys/east\.pub: is the key of site north; each site has its own"):
        federation.public_keys()
    (federation.path / "keys" / "east.pub").write_bytes((tmp_path / "east" / "key.pub").read_bytes())
    assert len(set(federation.public_keys().values())) == 2


FEDERATION = "federation init out=x host=h sites=a"
SITE = f"site init out=x name=n address=h:1 ca={__file__}"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("federation", "the federation command is: federation init, federation start, federation status"),
        ("site stop", "the site command is: site init, site start, site status, site review"),
        ("federation start fed=NOWHERE", "NOWHERE/federation.yaml: cannot be read"),
        ("federation status fed=NOWHERE", "NOWHERE/federation.yaml: cannot be read"),
        ("site start site=NOWHERE", "NOWHERE/site.yaml: cannot be read"),
        (f"{FEDERATION},a", "sites must name each site once"),
        ("federation init out=x host=h sites=../a", "sites: '../a' must be letters"),
        ("federation init out=x host=::1 sites=a", "host=::1 must be the name or address (no IPv6)"),
        ("federation init out=x 'host=a b' sites=a", "host=a b must be the name or address"),
        ("federation init out=x host=münchen.de sites=a", "host=münchen.de must be the name or"),
        ("federation init out=x host=fl.example.org:9443 sites=a", "host=fl.example.org:9443 must"),
        (f"{FEDERATION} data.root=x", "'data.root=x' is not taken"),
        (f"{FEDERATION} link=9443", "port 9443 is that of link, too"),
        (f"{FEDERATION} timeout=1e300", "timeout=1e+300 must be above 0"),
        ("site init out=x name=n address=h ca=c data=folders", "address=h must be host:port"),
        ("site init out=x name=n address=h:99999 ca=c data=folders", "address=h:99999 must be host:port"),
        ("site init out=x name=n address=h:1 ca=c data=folders", "ca=c: no such file"),
        (SITE, "a site has images: give data=folders"),
        (f"{SITE} data=nowhere", "data has no option 'nowhere'"),
        (f"{SITE} data=folders data.rot=x", "unknown key 'data.rot'; did you mean 'data.root'?"),
        (f"{SITE} data=folders epsilon=-1", "site.epsilon=-1.0 must be above 0"),
        (f"{SITE} rounds=3", "'rounds=3' is no setting of a site"),
    ],
)
def test_bad_input_ends_in_one_line(tmp_path, monkeypatch, capsys, command, line):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"error: {line}")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("name", "key", "line"),
    [
        (
            "north/site.yaml",
            "own",
            "'image.size=64' is no setting of a site: a site sets data, cache, fabric",
        ),
        (
            "north/site.yaml",
            "data",
            "'image.size=64' is no setting of a site: a site sets data, cache, fabric",
        ),
        ("fed/federation.yaml", "own", "own: 'image.size=64' is not of cache, fabric, public, tracking"),
    ],
)
def test_a_folder_refuses_settings_of_sections_that_others_set(tmp_path, name, key, line):
    init(tmp_path)
    file = tmp_path / name
    content = yaml.safe_load(file.read_text())
    content[key].append("image.size=64")
    file.write_text(yaml.safe_dump(content))
    opened = SiteFolder if file.name == "site.yaml" else FederationFolder
    with pytest.raises(UserError, match=f"^{file}: {line}"):
        opened.open(file.parent)


def test_a_site_leaves_out_what_a_set_has(tmp_path):
    """Semantic sites without one of the packaged sets of anomalies."""
    init(tmp_path)
    words = ["data=semantic_cifar10_packed", "data.root=x", "~data.anomalies.imagenet"]
    given = [f"out={tmp_path / 'other'}", "name=other", "address=h:1", f"ca={tmp_path / 'fed' / 'ca.crt'}"]
    assert main(["site", "init", *given, *words]) == 0
    assert "~data.anomalies.imagenet" in SiteFolder.open(tmp_path / "other").data


def test_a_second_start_leaves_the_error_file_of_the_first(tmp_path, capsys):
    init(tmp_path)
    fed = tmp_path / "fed"
    for name in ("north", "east"):
        (fed / "keys" / f"{name}.pub").write_bytes((tmp_path / name / "key.pub").read_bytes())
    (fed / "error.txt").write_text("round 3, site north: late")
    with locked(fed):
        assert main(["federation", "start", f"fed={fed}"]) == 2
    assert "another lit-fedad command is at work" in "".join(capsys.readouterr().err.splitlines())
    assert (fed / "error.txt").exists()


def test_a_coordinator_that_is_terminated_says_so(tmp_path, capsys, monkeypatch):
    init(tmp_path)
    monkeypatch.setattr(coordinator, "start", lambda *_: signal.raise_signal(signal.SIGTERM))
    capsys.readouterr()
    assert main(["federation", "start", f"fed={tmp_path / 'fed'}"]) == 143
    assert capsys.readouterr().err == "error: terminated; the same command continues\n"


def test_advice_about_a_run_is_what_a_coordinator_can_do(tmp_path):
    """Nothing that ends a run may advise keys of ``train``."""
    init(tmp_path)
    federation = FederationFolder.open(tmp_path / "fed")
    package = Path(lit_fedad.__file__).parent
    own = {"fresh=true runs it anew", "fresh=true deletes only"}  # of `train` alone
    for room in ("experiment", "federation", "privacy"):
        for file in package.glob(f"{room}/*.py"):
            text = file.read_text()
            assert text.count("fresh=true") == sum(text.count(words) for words in own), file
    assert "fresh=true" not in federation.advised(f"x; {RESTORE}")
    assert "give the new run another name" in federation.advised(f"x; {ANEW}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("", "cannot be read (data is missing); correct it"),
        ("data: [[data=folders]]", "cannot be read (data: give a list of words)"),
        ("data: [data=folders]\nepsilon: much", "cannot be read (epsilon: give a number)"),
        ("data: [data=folders]\nstages: 5", "cannot be read (stages: give a list of words)"),
        ("data: [data=folders]\nown: [{a: 1}]", "cannot be read (own: give a list of words)"),
        ("data: [data=folders]\napart: 'no'", "cannot be read (apart: give true or false)"),
        ("data: [data=folders]\npolicy: {images: 0}", "policy.images=0 must be a whole number"),
    ],
)
def test_a_setting_of_a_site_that_is_wrong_is_named_with_its_file(tmp_path, capsys, settings, said):
    file = tmp_path / "site.yaml"
    file.write_text(f"name: n\naddress: h:1\n{settings}\n")
    assert main(["site", "start", f"site={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: {file}: {said}")


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"port": "9443"}, "port: give a whole number"), ({"port": True}, "port: give a whole number"),
        ({"timeout": "1h"}, "timeout: give a number"), ({"host": None}, "host: give a text"),
        ({"sites": "north"}, "sites: give a list of words"), ({"hots": "h"}, "there is no hots; choose among host"),
        ({"out": 2}, None),  # which YAML takes for a number
    ],
)  # fmt: skip
def test_a_setting_of_another_type_is_named(tmp_path, changed, cause):
    init(tmp_path)
    file = tmp_path / "fed" / "federation.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changed))
    if cause is None:
        assert FederationFolder.open(tmp_path / "fed").run == tmp_path / "fed" / "2"
        return
    with pytest.raises(UserError, match=rf"federation\.yaml: cannot be read \({cause}.*\); correct it"):
        FederationFolder.open(tmp_path / "fed")


def test_the_coordinators_certificate_may_lie_in_the_new_folder_already(tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "ca.crt").write_bytes(b"certificate")
    words = [f"out={site}", "name=north", "address=127.0.0.1:9443", f"ca={site / 'ca.crt'}"]
    assert main(["site", "init", *words, "data=folders", "data.root=x"]) == 0
    assert (site / "ca.crt").read_bytes() == b"certificate"
    assert site.stat().st_mode & 0o077 == 0  # its folder is its account's alone from then on


def test_a_file_that_is_no_certificate_ends_a_site_in_one_line(tmp_path, capsys):
    init(tmp_path)
    (tmp_path / "north" / "ca.crt").write_text("<html>")
    assert main(["site", "start", f"site={tmp_path / 'north'}"]) == 2
    assert "ca.crt: holds no certificate" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "command",
    ["start site=north", "init out=new name=new address=a:1 ca=north/ca.crt data=folders data.root=x"],
)
def test_a_certificate_of_another_account_is_not_called_missing_or_none(
    tmp_path, monkeypatch, capsys, command
):
    init(tmp_path)
    monkeypatch.chdir(tmp_path)

    def forbidden(path=None, cafile=None):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", forbidden)
    monkeypatch.setattr(ssl, "create_default_context", forbidden)
    assert main(["site", *command.split()]) == 2
    assert "ca.crt: this account may not read it" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("out", ["signed_off", "registered", "keys", "../run", "a\n"])
def test_a_run_cannot_have_the_name_of_another_file_of_the_folder(tmp_path, capsys, out):
    init(tmp_path)
    file = tmp_path / "fed" / "federation.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"out": out}))
    assert main(["federation", "start", f"fed={tmp_path / 'fed'}"]) == 2
    assert "and no other folder's name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "broken", ['{"sites": {}}', '{"round": 1, "rounds": 2, "sites": {"a": 5}}', "[]", "{"]
)
def test_a_broken_status_ends_in_one_line(tmp_path, capsys, broken):
    init(tmp_path)
    (tmp_path / "fed" / "run").mkdir()
    north = {"rounds": 1, "last_round": 1, "bytes_up": 1, "bytes_down": 1, "troubles": []}
    sites = {"north": {**north, "false_alarm_rate": float("nan")}}  # of no normal image
    (tmp_path / "fed" / "run" / "status.json").write_text(
        json.dumps({"round": 1, "rounds": 2, "sites": sites})
    )
    assert main(["federation", "status", f"fed={tmp_path / 'fed'}"]) == 0
    (tmp_path / "fed" / "run" / "status.json").write_text(broken)
    assert main(["federation", "status", f"fed={tmp_path / 'fed'}"]) == 2
    said = capsys.readouterr().err.strip()
    assert "status.json: " in said
    assert said.endswith("; the next round writes it anew")


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of Linux")
def test_more_than_the_memory_fails_and_ends_no_process(monkeypatch):
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=used + (1 << 30)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        bound_memory()
        with pytest.raises(RuntimeError):
            torch.empty(1 << 32, dtype=torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_folders_are_not_overwritten(tmp_path, capsys):
    assert init(tmp_path) == 0
    before = (tmp_path / "fed" / "ca.crt").read_bytes()
    assert init(tmp_path) == 2
    assert "holds a federation already" in capsys.readouterr().err
    assert (tmp_path / "fed" / "ca.crt").read_bytes() == before


def test_settings_of_another_form_are_refused(tmp_path):
    init(tmp_path)
    path = tmp_path / "fed" / "federation.yaml"
    content = yaml.safe_load(path.read_text())
    for changed in ({**content, "more": 1}, {**content, "overrides": ["+x=1"]}, {**content, "port": 0}, []):
        path.write_text(yaml.safe_dump(changed))
        with pytest.raises(UserError):
            FederationFolder.open(tmp_path / "fed")
