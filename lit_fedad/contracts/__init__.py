"""The contracts: messages, tasks, clients, servers, and the exchanges between them.

A task defines what a client learns and how it scores images. A method (a client, a server and their exchanges) defines
the messages between clients and the server. The federation runs rounds and depends on neither.
"""

from lit_fedad.contracts.client import Client, Predictors
from lit_fedad.contracts.context import Context
from lit_fedad.contracts.evidence import Evidence, nothing_to_attack
from lit_fedad.contracts.exchange import (
    Exchange,
    Exchanges,
    Idle,
    LeaveOut,
    Method,
    image_sums_of,
    merges_sums,
)
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
from lit_fedad.contracts.server import Server
from lit_fedad.contracts.sums import (
    BoundedSums,
    Cohort,
    ImageSums,
    MessageSums,
    NothingNew,
    Sums,
    SumSpec,
    WeightedMeans,
)
from lit_fedad.contracts.task import Prediction, StandardisedTask, Task, learned_state

__all__ = [
    "SUM",
    "BoundedSums",
    "Client",
    "Cohort",
    "Context",
    "Evidence",
    "Exchange",
    "Exchanges",
    "Free",
    "Idle",
    "ImageSums",
    "LeaveOut",
    "Message",
    "MessageSpec",
    "MessageSums",
    "Method",
    "NothingNew",
    "Prediction",
    "Predictors",
    "Server",
    "StandardisedTask",
    "SumSpec",
    "Sums",
    "Task",
    "TensorSpec",
    "Update",
    "WeightedMeans",
    "class_list",
    "image_sums_of",
    "learned_state",
    "merges_sums",
    "nothing_to_attack",
    "senders",
    "spec_of",
]
