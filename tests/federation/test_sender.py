"""The server's message is packed once until the server's state changes."""

import torch
from lightning.fabric import Fabric

from lit_fedad.contracts import Context, Exchange, TensorSpec
from lit_fedad.federation.channel import Link, Plain
from lit_fedad.federation.collecting import Sender


class Mean(Exchange):
    def broadcast(self, server, client):
        return {"mean": server["mean"]}

    def broadcast_spec(self, client):
        return {"mean": TensorSpec((2,), torch.float32)}


def test_a_message_is_packed_once_until_the_state_changes():
    packed = []

    class Counted(Link):
        def pack(self, *given):
            packed.append(given)
            return super().pack(*given)

    server = {"mean": torch.zeros(2)}
    sender = Sender(server, None, Counted(Plain()), Fabric(accelerator="cpu", devices=1))
    first = sender.messages(Mean(), [0], Context(0, 1)).blobs
    assert sender.messages(Mean(), [0], Context(0, 1)).blobs == first
    assert len(packed) == 1
    sender.messages(Mean(), [0], Context(0, 1, exchange=1))
    assert len(packed) == 2
    server["mean"] = torch.ones(2)
    sender.forget()
    assert sender.messages(Mean(), [0, 1], Context(0, 1)).blobs[0] != first[0]
    assert len(packed) == 3
