"""Secure sums against plain messages: CPU seconds and bytes, of a client and the server, by size and clients."""

import time

import numpy as np
import torch
from safetensors.torch import save

from lit_fedad.contracts import SumSpec
from lit_fedad.privacy.fixed_point import decode, encode
from lit_fedad.privacy.keys import KeyPair
from lit_fedad.privacy.protocol import Gathering, Party

CASES = {
    "moments, 448 channels": SumSpec((448 * 449 // 2,), 2.0**24),
    "slots, 1,024 x 448": SumSpec((1024, 448), 2.0**36),
    "ResNet-18, 11.7 M weights": SumSpec((11_700_000,), 1e9),
    "the same in 32 bits": SumSpec((11_700_000,), 1.0),
}


def main() -> None:
    """Prints, for several numbers of clients and drop-outs, CPU seconds and bytes beside those of a plain message."""
    columns = (
        f"{'clients':>8}{'gone':>6}{'plain s':>9}{'client s':>10}{'server s':>10}{'plain MB':>10}{'MB up':>8}"
    )
    print(f"{'':<28}{columns}")
    for name, form in CASES.items():
        for clients, gone in ((3, 0), (5, 0), (5, 2), (10, 0)):
            row = _measure(form, clients, gone)
            print(f"{name:<28}{clients:>8}{gone:>6}" + row, flush=True)


def _measure(form: SumSpec, clients: int, gone: int) -> str:
    """Plays one sum; clients take their turns one after the other."""
    values = torch.rand(form.shape, dtype=torch.float64) / clients
    began = time.process_time()
    plain = len(save({"x": values.float()}))
    plain_seconds = time.process_time() - began
    forms = {"x": form}
    keys = {client: KeyPair() for client in range(clients)}
    registry = {client: pair.public for client, pair in keys.items()}
    parties = {client: Party(client, pair, registry) for client, pair in keys.items()}
    server = Gathering("benchmark", dict.fromkeys(parties, 100), clients // 2 + 1)
    invitation = server.invitation.to_bytes()
    client_seconds = server_seconds = 0.0
    up = 0

    began = time.process_time()
    offers = {client: party.offer(invitation) for client, party in parties.items()}
    client_seconds += time.process_time() - began
    up += len(offers[0])
    began = time.process_time()
    envelopes, _ = server.take_offers(offers)
    server_seconds += time.process_time() - began
    left = clients - gone
    for client in range(left):
        began = time.process_time()
        words = encode({"x": values}, forms)
        parties[client].mask(words, envelopes[client])
        client_seconds += (time.process_time() - began) * clients / left
        began = time.process_time()
        server.add(client, words)
        server_seconds += time.process_time() - began
    up += words["x"].nbytes
    asked = server.name_survivors()
    began = time.process_time()
    shares = {client: parties[client].reveal(asked) for client in range(left)}
    client_seconds += time.process_time() - began
    up += len(shares[0])
    began = time.process_time()
    total = decode(server.unmask(shares), forms)["x"]
    server_seconds += time.process_time() - began
    assert np.allclose(total, left * values, atol=1e-3)
    return (
        f"{plain_seconds:>9.3f}{client_seconds / clients:>10.3f}{server_seconds:>10.3f}"
        f"{plain / 1e6:>10.2f}{up / 1e6:>8.2f}"
    )


if __name__ == "__main__":
    main()
