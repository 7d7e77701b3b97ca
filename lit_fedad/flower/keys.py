"""Keys and certificates: the key pair that identifies a site, and the authority that vouches for the coordinator."""

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
from lit_fedad.core.files import atomic, given_bytes, write_secret

K = TypeVar("K")
_YEARS = datetime.timedelta(days=10 * 365)


def write_site_key(folder: Path) -> str:
    """Makes a site's key pair (P-384): ``key``, which only its owner can read, and ``key.pub``.

    Returns:
        The fingerprint of the public key.
    """
    private = ec.generate_private_key(ec.SECP384R1())
    public = private.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    # First the public key: if the private key is not replaced then, the site keeps the one that its coordinator knows.
    with atomic(folder / "key.pub") as partial:
        partial.write_bytes(public + b"\n")
    write_secret(
        folder / "key",
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    return fingerprint(folder / "key.pub")


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Reads a site's private key.

    Raises:
        UserError: If the file is missing, or holds no private key of an elliptic curve.
    """
    advice = "private key; make one: lit-fedad site init"
    return _read(
        path, partial(serialization.load_ssh_private_key, password=None), ec.EllipticCurvePrivateKey, advice
    )


def read_public_key(path: Path) -> bytes:
    """Reads a site's public key, and returns it in Flower's form (PEM).

    Raises:
        UserError: If the file is missing, or holds no public key of an elliptic curve.
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
"""Header with the coordinator's time, in the answer to a site that is refused because its clock is wrong."""


class Authenticator:
    """Checks that requests at the open port are signed with a key from a folder.

    Flower's SuperLink checks the same signature, but after it has read the whole request. This check needs the headers
    alone, so no body of a stranger is read.

    Args:
        folder: Folder of ``NAME.pub`` files. A key that is removed there is refused from then on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def known(self) -> set[bytes]:
        """Returns the keys that the folder holds now; files without a valid key are passed over."""
        keys = set()
        for path in self.folder.glob("*.pub"):
            with suppress(UserError):
                keys.add(read_public_key(path))
        return keys

    def check(self, headers: Mapping[str, str]) -> tuple[bytes, bool]:
        """Checks by its headers which site sends a request.

        Returns:
            The site's public key, empty if the request is not signed with a key of the folder; and whether the time of
            the signature is close enough to this machine's.
        """
        try:
            key = base64.b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = base64.b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            stamp = headers[TIMESTAMP_HEADER]
            age = (
                datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(stamp)
            ).total_seconds()
            # Two texts of the same key may differ in white space.
            pem = {b"".join(text.split()): text for text in self.known()}.get(b"".join(key.split()), b"")
            public = serialization.load_pem_public_key(pem)
            assert isinstance(public, ec.EllipticCurvePublicKey)  # like all keys that `known` returns
            public.verify(signature, stamp.encode("ascii"), ec.ECDSA(hashes.SHA256()))
        except (KeyError, ValueError, TypeError, UnicodeError, binascii.Error, InvalidSignature):
            return b"", True
        return pem, -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


def write_certificates(folder: Path, host: str) -> None:
    """Makes an authority (``ca.crt``, ``ca.key``) and the certificate of a host (``server.pem``, ``server.key``).

    If the folder has an authority, its key is kept: sites that trust its earlier certificate trust the new ones too.

    Args:
        folder: Folder to which the four files are written.
        host: Name or address by which sites reach the coordinator; 127.0.0.1 and localhost are added.

    Raises:
        UserError: If the authority's key cannot be read.
    """
    authority = _authority(folder / "ca.key")
    server = ec.generate_private_key(ec.SECP384R1())
    issuer = _name("lit_fedad federation")
    of_authority = _certificate(issuer, issuer, authority.public_key()).add_extension(
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
    of_authority = of_authority.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False
    )
    for name, key in (("ca.key", authority), ("server.key", server)):
        write_secret(
            folder / name,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
        )
    for name, builder in (("ca.crt", of_authority), ("server.pem", of_server)):
        signed = builder.sign(authority, hashes.SHA384())
        (folder / name).write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def _authority(path: Path) -> ec.EllipticCurvePrivateKey:
    if not path.exists():
        return ec.generate_private_key(ec.SECP384R1())
    load = partial(serialization.load_pem_private_key, password=None)
    return _read(path, load, ec.EllipticCurvePrivateKey, "private key; restore it from a copy")


def _read(path: Path, load: Callable[[bytes], Any], kind: type[K], advice: str) -> K:
    """Reads a key of an elliptic curve; `advice` ends the error message: which key it should be, and what to do."""
    try:
        key = load(given_bytes(path))
    except (OSError, ValueError, TypeError, NotImplementedError, UnsupportedAlgorithm) as error:
        raise UserError(f"{path}: holds no {advice}") from error
    if not isinstance(key, kind):
        raise UserError(f"{path}: is of no elliptic curve, and no {advice}")
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
