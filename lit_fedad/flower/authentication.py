"""Who may come in at the open port: sites whose keys lie in the coordinator's folder now, and nobody else.

Flower's SuperLink checks the same signature, after it has read the whole request. This is before any of it is read.
"""

from __future__ import annotations

import base64
import binascii
import datetime
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER

from lit_fedad.core.errors import UserError
from lit_fedad.flower.keys import read_public_key

CLOCK = "X-Lit-Fedad-Clock"
"""Header in which a site that is refused for its clock is told the coordinator's."""


class Authenticator:
    """The keys of a folder.

    Args:
        folder: Folder of ``NAME.pub`` files; what is removed there is refused from then on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def known(self) -> set[bytes]:
        """Returns the keys that are there now; a file that holds none is none."""
        found = set()
        for path in self.folder.glob("*.pub"):
            try:
                found.add(read_public_key(path))
            except UserError:
                continue
        return found

    def check(self, headers: Mapping[str, str]) -> tuple[bytes, bool]:
        """Checks who sends a request.

        Args:
            headers: Its headers.

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
