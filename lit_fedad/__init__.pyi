from lit_fedad.api import Federation as Federation
from lit_fedad.api import TrainedRun as TrainedRun
from lit_fedad.api import train as train
from lit_fedad.deployment.live_detector import LiveDetector as LiveDetector
from lit_fedad.deployment.live_detector import Scored as Scored
from lit_fedad.deployment.live_detector import load_detector as load

__all__ = ["Federation", "LiveDetector", "Scored", "TrainedRun", "load", "train"]
__version__: str
