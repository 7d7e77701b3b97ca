"""The server side of a method."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.fabric import Fabric

from lit_fedad.contracts.message import Message, Update
from lit_fedad.contracts.randomness import Context
from lit_fedad.core.errors import not_there


class Server:
    """The server side of one method.

    Attributes:
        fabric: Device and precision of the server's computations; None where Fabric was not launched.
        context: Seed, round and exchange; set before each exchange.
        state_names: Names of all attributes that a later round depends on, in addition to those of base classes;
            checkpoints store them.
        merges_sums: Whether `aggregate` gets the same result from one message that stands for several clients as from
            their single messages. A class that overrides `aggregate` must declare it again.
        admits: Whether clients may join later; `register_clients` is then called again with more clients. A class that
            overrides `register_clients` must declare it again, or admits none.
    """

    fabric: Fabric | None = None
    context: Context = Context(seed=0, round=0)
    state_names: ClassVar[tuple[str, ...]] = ()
    merges_sums: bool = False
    admits: ClassVar[bool] = True

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuses a server class that overrides `aggregate` without declaring whether sums suffice for it."""
        super().__init_subclass__(**arguments)
        if "aggregate" in vars(cls) and "merges_sums" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} overrides aggregate: say merges_sums = True beside it, if the sum of the clients'"
                " messages is all that it needs, or merges_sums = False"
            )
        if "register_clients" in vars(cls) and "admits" not in vars(cls):
            cls.admits = False

    @property
    def device(self) -> torch.device:
        """The device that the server computes on; the CPU without Fabric. Messages and state stay on the CPU."""
        return self.fabric.device if self.fabric else torch.device("cpu")

    def register_clients(self, sizes: Mapping[int, int]) -> None:
        """Registers all clients that hold images, before round 1 and again when a run is continued.

        It is not called where a finished run only predicts.

        Args:
            sizes: Number of training images by client.

        Raises:
            UserError: If the server lacks what rounds need, such as public images.
        """

    def broadcast(self, client_id: int) -> Message:
        """Returns the message that a client trains with."""
        raise not_there(self, "broadcast")

    def validate(self, client_id: int, update: Update) -> None:
        """Checks properties of a client's message after training that its declared form cannot express.

        Args:
            client_id: The client that sent the message.
            update: The message, which has the declared form.

        Raises:
            UserError: If the message cannot be that of a client with so many images.
        """

    def aggregate(self, updates: Mapping[int, Update]) -> None:
        """Merges the messages that clients sent after training.

        Implementations replace tensors of the state and never change them in place: if merging fails, the server is
        restored to the tensors that it had.

        Args:
            updates: Updates by client, in client order; never empty.
        """
        raise not_there(self, "aggregate")

    def diagnostics(self) -> dict[str, float]:
        """Returns scalars to track after a round, by name."""
        return {}

    def warnings(self) -> list[str]:
        """Returns warnings for the user after a round, one line each."""
        return []


def numbers_of(server: Server) -> dict[str, float]:
    """Returns a server's diagnostics as plain numbers, which all records of a run can hold.

    Raises:
        TypeError: If it gives anything but a dictionary of numbers, or of tensors of one element.
    """
    given = server.diagnostics()
    try:
        return {name: float(value) for name, value in given.items()}
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"{type(server).__name__}: diagnostics gives {given!r:.100}; give a dictionary of numbers"
        ) from None


def warnings_of(server: Server) -> list[str]:
    """Returns a server's warnings.

    Raises:
        TypeError: If it gives anything but a list of texts; a single text would be taken for a list of letters.
    """
    given = server.warnings()
    if not isinstance(given, (list, tuple)) or not all(isinstance(line, str) for line in given):
        raise TypeError(f"{type(server).__name__}: warnings gives {given!r:.100}; give a list of texts")
    return list(given)
