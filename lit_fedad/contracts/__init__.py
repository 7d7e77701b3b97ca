"""The contracts: messages, tasks, clients, servers.

A task says what a client learns and how it scores. A method (a client class and a server class) says what clients
and the server exchange. The federation runs rounds and knows neither.
"""

from lit_fedad.contracts.client import Client
from lit_fedad.contracts.context import Context
from lit_fedad.contracts.message import Message, Payload, TensorSpec, Update
from lit_fedad.contracts.server import Server
from lit_fedad.contracts.task import Prediction, Task

__all__ = ["Client", "Context", "Message", "Payload", "Prediction", "Server", "Task", "TensorSpec", "Update"]
