"""Keys of clients in secure sums, and messages that they seal.

Keys are agreed on by X25519 (RFC 7748) and derived by HKDF (RFC 5869); messages are sealed by ChaCha20-Poly1305
(RFC 8439).
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lit_fedad.core.errors import UserError

KEY_BYTES = 32

_NONCE = bytes(12)  # may be constant, because a key seals only one message


class KeyPair:
    """A pair of X25519 keys.

    Args:
        private: The private key, 32 bytes; None for a new one.
    """

    def __init__(self, private: bytes | None = None) -> None:
        self._key = (
            X25519PrivateKey.generate() if private is None else X25519PrivateKey.from_private_bytes(private)
        )

    @property
    def private(self) -> bytes:
        """The private key, 32 bytes."""
        return self._key.private_bytes_raw()

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def agree(self, public: bytes, purpose: bytes) -> bytes:
        """Computes the 32 bytes that only the holders of both private keys know.

        Args:
            public: The other party's public key.
            purpose: What the bytes are for; other purposes give unrelated bytes.

        Raises:
            UserError: If `public` is no X25519 key.
        """
        try:
            secret = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise UserError("a public key of the secure sum is no X25519 key") from error
        return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"lit_fedad secure sum/" + purpose).derive(secret)


def seal(key: bytes, content: bytes) -> bytes:
    """Encrypts and authenticates a message; a key must never seal a second one."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, None)


def unseal(key: bytes, message: bytes, sender: str) -> bytes:
    """Opens a sealed message.

    Raises:
        UserError: If the message was not sealed with this key.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, message, None)
    except InvalidTag as error:
        raise UserError(
            f"the message of {sender} was not sealed with the key that it is registered with: compare the keys"
        ) from error
