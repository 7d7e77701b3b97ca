"""Methods and protected federations that tests build by hand, without a configuration."""

import sys

from lit_fedad.contracts import Exchanges, Method
from lit_fedad.federation.loop import Federation
from lit_fedad.privacy.protection import protect


def exchanges_of(client) -> Exchanges:
    """The exchanges that the file of a client's class, or of the nearest base that has some, builds for it."""
    for cls in type(client).__mro__:
        build = vars(sys.modules[cls.__module__]).get("exchanges")
        if build is not None:
            return build(client)
    raise AssertionError(f"{type(client).__name__} has no exchanges")


def method_of(client, server=None) -> Method:
    return Method(client, server, exchanges_of(client))


def federation_of(client, server, *, secure_sum=None, privacy=None, noise_key=b"", **parts) -> Federation:
    """A federation of a client and a server, with the protection that is asked for."""
    return protect(Federation(method_of(client, server), **parts), secure_sum, privacy, noise_key)
