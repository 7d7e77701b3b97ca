"""Keys and certificates."""

import base64
import ssl
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from helpers.refusals import refused

from lit_fedad.core.errors import UserError
from lit_fedad.flower.keys import (
    fingerprint,
    read_private_key,
    read_public_key,
    write_certificates,
    write_site_key,
)


def test_a_key_pair_belongs_together_and_stays_with_its_owner(tmp_path):
    found = write_site_key(tmp_path)
    assert found == fingerprint(tmp_path / "key.pub")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    public = read_private_key(tmp_path / "key").public_key()
    assert public.curve.name == "secp384r1"
    assert read_public_key(tmp_path / "key.pub").startswith(b"-----BEGIN PUBLIC KEY-----")
    assert write_site_key(tmp_path) != found  # renewed in place
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_the_fingerprint_is_that_of_ssh_keygen(tmp_path):
    found = write_site_key(tmp_path)
    try:
        command = ["ssh-keygen", "-l", "-f", tmp_path / "key.pub"]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("no ssh-keygen here")
    assert found in said.stdout


COMPRESSED = b"".join(
    len(part).to_bytes(4) + part for part in (b"ecdsa-sha2-nistp384", b"nistp384", b"\2" + bytes(48))
)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"ssh-rsa AAAA", b"\xff\xfe", b"ecdsa-sha9 AAAA",
        b"ecdsa-sha2-nistp384 " + base64.b64encode(COMPRESSED),
    ],
)  # fmt: skip
def test_what_is_no_key_is_refused(tmp_path, content):
    path = tmp_path / "key.pub"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"{path}: holds no public key"):
        read_public_key(path)
    with pytest.raises(UserError, match=f"{path}: holds no private key"):
        read_private_key(path)


def test_a_key_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "key.pub"
    parts = (b"ssh-ed25519", b"\1" * 32)
    text = base64.b64encode(b"".join(len(part).to_bytes(4) + part for part in parts))
    path.write_bytes(b"ssh-ed25519 " + text)
    refused(f"{path}: is of no elliptic curve, and no public key", read_public_key, path)


@pytest.mark.parametrize("host", ["fl.example.org", "10.1.2.3"])
def test_certificates_name_the_host_and_this_machine(tmp_path, host):
    write_certificates(tmp_path, host)
    server = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(name.value) for name in names} == {host, "localhost", "127.0.0.1"}
    ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    assert all((tmp_path / name).stat().st_mode & 0o777 == 0o600 for name in ("ca.key", "server.key"))


def test_a_key_of_another_account_is_not_called_missing(tmp_path, monkeypatch):
    write_site_key(tmp_path)

    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    refused(f"{tmp_path / 'key'}: this account may not read it", read_private_key, tmp_path / "key")
