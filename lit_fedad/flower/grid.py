"""The coordinator's end: orders are pushed to nodes that are online, replies pulled."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from flwr.app import Message
from flwr.serverapp import Grid

from lit_fedad.flower.held_polls import Bell
from lit_fedad.flower.letters import KIND, wrapped
from lit_fedad.flower.pull import pull
from lit_fedad.sites.remote import Lost

_POLL_S = 0.2


class GridCarrier:
    """A carrier of letters over Flower.

    A site is known by its registered public key, not by a name or a node's number, which anybody can choose. An order
    whose site goes away is sent again when it is back: orders can be sent twice.

    Args:
        grid: Flower's grid.
        keys: Public key of every client.
        timeout: Longest time until all replies are there, in seconds.
        bell: Is rung when orders were pushed, so that sites come for them.
    """

    def __init__(self, grid: Grid, keys: Mapping[int, bytes], timeout: float, bell: Bell) -> None:
        self.grid, self.keys, self.timeout, self.bell = grid, dict(keys), timeout, bell

    def carry(self, orders: Mapping[int, bytes], most: int) -> Iterator[tuple[int, bytes | Lost]]:
        """Brings every client its order; see `Carrier.carry`."""
        end = time.monotonic() + self.timeout
        waiting, sent = set(orders), dict[str, int]()
        while (waiting or sent) and time.monotonic() < end:
            self._push(orders, waiting, sent)
            for order, answer in pull(self.grid, list(sent), most) if sent else ():
                client = sent.pop(order)
                if answer is None:
                    waiting.add(client)
                else:
                    yield client, answer
            time.sleep(_POLL_S)
        away = f"did not connect within {self.timeout:g} seconds"
        late = f"did not answer within {self.timeout:g} seconds"
        yield from ((client, Lost(away)) for client in sorted(waiting))
        yield from ((client, Lost(late)) for client in sorted(sent.values()))

    def _push(self, orders: Mapping[int, bytes], waiting: set[int], sent: dict[str, int]) -> None:
        """Sends what waits to the clients that are online."""
        if not waiting:
            return
        before = len(sent)
        nodes = {bytes(node.public_key): node.node_id for node in self.grid.get_nodes()}
        for client in sorted(waiting):
            node = nodes.get(self.keys[client])
            if node is None:
                continue
            message = Message(wrapped(orders[client]), node, KIND, ttl=self.timeout)
            (pushed,) = self.grid.push_messages([message])
            if pushed:
                sent[pushed] = client
                waiting.discard(client)
        if len(sent) > before:
            self.bell.ring()
