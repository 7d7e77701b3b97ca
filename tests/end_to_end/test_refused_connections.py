"""Who is refused at the open port of a coordinator, and by which line: against a SuperLink behind it, on loopback."""

import shutil
import ssl
import subprocess
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import httpx
from cryptography import x509
from helpers.ports import free_ports

from lit_fedad.core.errors import UserError
from lit_fedad.flower import coordinator, fleet
from lit_fedad.flower.federation_folder import FederationFolder
from lit_fedad.flower.keys import write_certificates, write_site_key
from lit_fedad.report.console import Display

pytestmark = pytest.mark.slow
QUIET = Display(quiet=True)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A coordinator whose port is open, with two enrolled sites that do not run; and keys of two strangers."""
    folder = tmp_path_factory.mktemp("refused")
    port, link = free_ports()
    given = {"host": "127.0.0.1", "port": port, "link": link, "overrides": ["method=fedavg"]}
    fed = FederationFolder.create(folder / "fed", sites=["north", "east"], **given)
    for name in ("north", "east", "stranger", "second"):
        (folder / name).mkdir()
        write_site_key(folder / name)
    for name in fed.sites:
        (fed.path / "keys" / f"{name}.pub").write_bytes((folder / name / "key.pub").read_bytes())
    with coordinator._superlink(fed, QUIET), coordinator._open_port(fed) as port:
        coordinator._register(fed, QUIET)
        yield fed, folder, port


@pytest.fixture
def federation(opened):
    return opened[:2]


@pytest.fixture
def knock(federation, monkeypatch):
    """Presents a key at the open port, without patience."""
    monkeypatch.setattr(fleet, "_PATIENCE_S", 0)
    fed, folder = federation

    def enter(name, authority=fed.path / "ca.crt"):
        shutil.copyfile(authority, folder / name / "ca.crt")
        fleet._activate(f"127.0.0.1:{fed.port}", folder / name, print)

    return enter


REFUSED = (
    r"127\.0\.0\.1:\d+ refuses this site \(HTTP 403\): its key is not, or no longer, among those that the coordinator's"
    r" operator keeps; send key\.pub of this site"
)


def test_a_key_that_is_not_enrolled_is_refused(knock):
    knock("north")
    with pytest.raises(UserError, match=REFUSED):
        knock("stranger")


def test_a_second_key_replaces_the_first_of_its_name_and_that_is_revoked(federation, knock):
    """Names are not sent: a second key of a site comes in once the operator has put it in the place of the first."""
    fed, folder = federation
    knock("east")
    with pytest.raises(UserError, match=REFUSED):
        knock("second")
    (fed.path / "keys" / "east.pub").write_bytes((folder / "second" / "key.pub").read_bytes())
    coordinator._register(fed, QUIET)
    knock("second")
    with pytest.raises(UserError, match=REFUSED):
        knock("east")


def test_a_key_that_was_taken_away_and_put_back_is_let_in_again(federation, knock):
    fed, _ = federation
    key = fed.path / "keys" / "north.pub"
    content = key.read_bytes()
    key.unlink()
    with pytest.raises(UserError, match=REFUSED):
        knock("north")
    key.write_bytes(content)
    for known in (True, False):
        if not known:
            (fed.path / "registered").unlink()
        coordinator._register(fed, QUIET)
        knock("north")


def test_a_site_goes_on_with_its_certificate_where_the_coordinators_are_renewed(opened, knock, tmp_path):
    fed, _, port = opened
    shutil.copyfile(fed.path / "ca.crt", tmp_path / "old.crt")
    before = serial_of(fed)
    rounds = iter([None, 0])

    def renew_meanwhile():
        over = next(rounds)
        if over is None:
            fed.renew()
        return over

    coordinator._follow(fed, SimpleNamespace(poll=renew_meanwhile), port, QUIET)
    assert serial_of(fed) != before
    knock("north", tmp_path / "old.crt")
    knock("north")


def serial_of(fed):
    """Number of the certificate that the open port shows."""
    pem = ssl.get_server_certificate(("127.0.0.1", fed.port))
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def test_a_coordinator_with_another_certificate_is_not_talked_to(knock, tmp_path):
    write_certificates(tmp_path, "127.0.0.1")
    with pytest.raises(UserError, match=r"is not vouched for by .*: do not connect; ask its operator"):
        knock("north", tmp_path / "ca.crt")


def test_plain_text_has_no_answer(federation):
    fed, _ = federation
    with pytest.raises(httpx.RemoteProtocolError, match="Server disconnected without sending a response"):
        httpx.get(f"http://127.0.0.1:{fed.port}/v1/fleet/pull-messages")


@pytest.mark.parametrize("action", [["run", "APP", "x"], ["supernode", "list", "x"]])
def test_flowers_commands_do_not_work_from_outside(federation, tmp_path, action):
    """Nobody there can register a key or start a program: the Control API does not answer at the open port."""
    fed, _ = federation
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "x"\n[superlink.x]\naddress = "127.0.0.1:{fed.port}"\n'
        f'root-certificates = "{fed.path}/ca.crt"\n'
    )
    outside = {**coordinator._environment(fed), "FLWR_HOME": str(tmp_path)}
    command = ["flwr", *(str(fed.path / "app") if word == "APP" else word for word in action)]
    done = subprocess.run(command, env=outside, capture_output=True, text=True)
    assert done.returncode
    assert "403" in done.stdout + done.stderr
