"""Keys and certificates: the pair that a site is known by, and the authority that vouches for the coordinator."""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lit_fedad.core.errors import UserError
from lit_fedad.core.files import write_secret

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
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: holds no private key ({type(error).__name__}); make one: lit-fedad site init"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: is no key of an elliptic curve; make one: lit-fedad site init")
    return key


def read_public_key(path: Path) -> bytes:
    """Reads a site's public key as Flower knows it.

    Raises:
        UserError: If the file is missing, or holds no such key.
    """
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: holds no public key; put there the key.pub of that site") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{path}: is no key of an elliptic curve; put there the key.pub of that site")
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def fingerprint(path: Path) -> str:
    """Returns the fingerprint of a public key as ``ssh-keygen -l`` prints it.

    Raises:
        UserError: If the file holds no public key.
    """
    read_public_key(path)
    body = base64.b64decode(path.read_bytes().split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")


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
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: holds no private key; restore it from a copy") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path}: is no key of an elliptic curve; restore it from a copy")
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
