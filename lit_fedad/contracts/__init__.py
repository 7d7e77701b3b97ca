"""The contracts: messages, tasks, clients, servers, and the exchanges between them.

A task defines what a client learns and how it scores images. A method (a client, a server and their exchanges) defines
the messages between clients and the server. The federation runs rounds and depends on neither.
"""

from lit_fedad.contracts.client import Client as Client
from lit_fedad.contracts.client import Predictors as Predictors
from lit_fedad.contracts.evidence import Evidence as Evidence
from lit_fedad.contracts.evidence import nothing_to_attack as nothing_to_attack
from lit_fedad.contracts.exchange import Exchange as Exchange
from lit_fedad.contracts.exchange import Exchanges as Exchanges
from lit_fedad.contracts.exchange import Idle as Idle
from lit_fedad.contracts.exchange import LeaveOut as LeaveOut
from lit_fedad.contracts.exchange import Method as Method
from lit_fedad.contracts.exchange import disclosed_by as disclosed_by
from lit_fedad.contracts.exchange import image_sums_of as image_sums_of
from lit_fedad.contracts.exchange import merges_sums as merges_sums
from lit_fedad.contracts.message import SUM as SUM
from lit_fedad.contracts.message import Free as Free
from lit_fedad.contracts.message import Message as Message
from lit_fedad.contracts.message import MessageSpec as MessageSpec
from lit_fedad.contracts.message import TensorSpec as TensorSpec
from lit_fedad.contracts.message import Update as Update
from lit_fedad.contracts.message import class_list as class_list
from lit_fedad.contracts.message import senders as senders
from lit_fedad.contracts.message import spec_of as spec_of
from lit_fedad.contracts.randomness import Context as Context
from lit_fedad.contracts.server import Server as Server
from lit_fedad.contracts.sums import BoundedSums as BoundedSums
from lit_fedad.contracts.sums import Cohort as Cohort
from lit_fedad.contracts.sums import ImageSums as ImageSums
from lit_fedad.contracts.sums import MessageSums as MessageSums
from lit_fedad.contracts.sums import NothingNew as NothingNew
from lit_fedad.contracts.sums import Sums as Sums
from lit_fedad.contracts.sums import SumSpec as SumSpec
from lit_fedad.contracts.sums import WeightedMeans as WeightedMeans
from lit_fedad.contracts.task import Prediction as Prediction
from lit_fedad.contracts.task import StandardisedTask as StandardisedTask
from lit_fedad.contracts.task import Task as Task
from lit_fedad.contracts.task import learned_state as learned_state
