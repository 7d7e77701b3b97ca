"""The contracts: messages, tasks, clients, servers, and the exchanges between them.

A task defines what a client learns and how it scores images. A method (a client, a server and their exchanges) defines
the messages between clients and the server. The federation runs rounds and depends on neither.
"""

from lit_fedad.contracts.additive import Additive, Crowd, SumSpec
from lit_fedad.contracts.client import AdditiveClient, Client, Predictors
from lit_fedad.contracts.context import Context
from lit_fedad.contracts.exchange import Exchange, Exchanges, SumsExchange
from lit_fedad.contracts.image_sums import ImageSums, NothingNew
from lit_fedad.contracts.message import (
    SUM,
    Free,
    Message,
    MessageSpec,
    TensorSpec,
    Update,
    class_list,
    senders,
    spec_of,
)
from lit_fedad.contracts.server import AdditiveServer, AttackableServer, Server, nothing_to_attack
from lit_fedad.contracts.task import Prediction, StandardisedTask, Task

__all__ = [
    "SUM",
    "Additive",
    "AdditiveClient",
    "AdditiveServer",
    "AttackableServer",
    "Client",
    "Context",
    "Crowd",
    "Exchange",
    "Exchanges",
    "Free",
    "ImageSums",
    "Message",
    "MessageSpec",
    "NothingNew",
    "Prediction",
    "Predictors",
    "Server",
    "StandardisedTask",
    "SumSpec",
    "SumsExchange",
    "Task",
    "TensorSpec",
    "Update",
    "class_list",
    "nothing_to_attack",
    "senders",
    "spec_of",
]
