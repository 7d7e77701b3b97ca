"""Keys and certificates: the pair that a site is known by, and the authority that vouches for the coordinator."""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import ipaddress
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import given_bytes, write_secret

K = TypeVar("K")
_YEARS = datetime.timedelta(days=10 * 365)


def write_site_key(folder: Path) -> str:
    """Makes a site's key pair (P-384): ``key``, which only its owner can read, and ``key.pub``.

    Returns:
        The fingerprint of the public key.
    """
    private = ec.generate_private_key(ec.SECP384R1())
    write_secret(
        folder / "key",
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    (folder / "key.pub").write_bytes(public + b"\n")
    return fingerprint(folder / "key.pub")


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Reads a site's private key.

    Raises:
        UserError: If the file is missing, or holds no such key.
    """
    advice = "private key; make one: lit-fedad site init"
    return _read(
        path, partial(serialization.load_ssh_private_key, password=None), ec.EllipticCurvePrivateKey, advice
    )


def read_public_key(path: Path) -> bytes:
    """Reads a site's public key as Flower knows it.

    Raises:
        UserError: If the file is missing, or holds no such key.
    """
    advice = "public key; put there the key.pub of that site"
    key = _read(path, serialization.load_ssh_public_key, ec.EllipticCurvePublicKey, advice)
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint(path: Path) -> str:
    """Returns the fingerprint of a public key as ``ssh-keygen -l`` prints it.

    Raises:
        UserError: If the file holds no public key.
    """
    read_public_key(path)
    body = base64.b64decode(path.read_bytes().split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")


CLOCK = "X-Lit-Fedad-Clock"
"""Header in which a site that is refused for its clock is told the coordinator's."""


class Authenticator:
    """The keys of a folder, whose sites may come in at the open port, and nobody else.

    Flower's SuperLink checks the same signature, after it has read the whole request. This is before any of it is read.

    Args:
        folder: Folder of ``NAME.pub`` files; what is removed there is refused from then on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def known(self) -> set[bytes]:
        """Returns the keys that are there now; a file that holds none is none."""
        found = set()
        for path in self.folder.glob("*.pub"):
            with suppress(UserError):
                found.add(read_public_key(path))
        return found

    def check(self, headers: Mapping[str, str]) -> tuple[bytes, bool]:
        """Checks who sends a request.

        Returns:
            The key, empty for nobody's; and whether the site's clock is right.
        """
        try:
            key = base64.b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = base64.b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            stamp = headers[TIMESTAMP_HEADER]
            age = (
                datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(stamp)
            ).total_seconds()
            # Texts of one key may differ in spaces.
            own = {b"".join(one.split()): one for one in self.known()}.get(b"".join(key.split()), b"")
            public = serialization.load_pem_public_key(own)
            assert isinstance(public, ec.EllipticCurvePublicKey)  # as all that `known` returns
            public.verify(signature, stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        except (KeyError, ValueError, TypeError, UnicodeError, binascii.Error, InvalidSignature):
            return b"", True
        return own, -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


def write_certificates(folder: Path, host: str) -> None:
    """Makes an authority (``ca.crt``, ``ca.key``) and the certificate of a host (``server.pem``, ``server.key``).

    An authority that is there keeps its key, so that who trusts its earlier certificate trusts the new ones.

    Args:
        folder: Where they are written.
        host: Name or address by which sites reach the coordinator; 127.0.0.1 and localhost are added.

    Raises:
        UserError: If the authority's key cannot be read.
    """
    authority = _authority(folder / "ca.key")
    server = ec.generate_private_key(ec.SECP384R1())
    issuer = _name("lit_fedad federation")
    own = _certificate(issuer, issuer, authority.public_key()).add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    names = list(dict.fromkeys([host, "localhost", "127.0.0.1"]))
    of_server = (
        _certificate(issuer, _name(host), server.public_key())
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
        )
    )
    own = own.add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
    for name, key in (("ca.key", authority), ("server.key", server)):
        write_secret(
            folder / name,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
    for name, builder in (("ca.crt", own), ("server.pem", of_server)):
        signed = builder.sign(authority, hashes.SHA384())
        (folder / name).write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def _authority(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        return ec.generate_private_key(ec.SECP384R1())
    load = partial(serialization.load_pem_private_key, password=None)
    return _read(path, load, ec.EllipticCurvePrivateKey, "private key; restore it from a copy")


def _read(path: Path, load: Callable[[bytes], Any], kind: type[K], what: str) -> K:
    """Reads a key of an elliptic curve; `what` tells what it should be, and what to do where it is not."""
    try:
        key = load(given_bytes(path))
    except (OSError, ValueError, TypeError, NotImplementedError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path}: holds no {what}") from error
    if not isinstance(key, kind):
        raise UserError(f"{path}: is of no elliptic curve, and no {what}")
    return key


def _certificate(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _YEARS)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common[:64])])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
