"""Libraries that wait are as if they had been imported."""

import subprocess
import sys

import pytest

_SCRIPTS = {
    "compiled modules are recognised, and left alone": """
import lit_fedad, sys, torch
from lightning.fabric.wrappers import OptimizedModule

@torch.compiler.disable
def kept_away(x):
    return x + 1 if torch.compiler.is_compiling() else x

@torch.compiler.disable(recursive=False)
def doubled(x):
    return 2 * x

model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
before = model(x)
optimizer = torch.optim.SGD(model.parameters(), 0.0)
before.sum().backward()
optimizer.step()
assert kept_away(x) is x and doubled(x).sum() == 4 and not isinstance(model, OptimizedModule)
assert "sympy" not in sys.modules

compiled = torch.compile(model, backend="eager")
assert isinstance(compiled, OptimizedModule) and not isinstance(model, OptimizedModule)
assert torch.equal(compiled(x), before)
whole = torch.compile(lambda x: kept_away(x) + 0, backend="eager")
assert torch.equal(whole(x), x)
optimizer.step()
assert "sympy" in sys.modules and torch._dynamo is sys.modules["torch._dynamo"]
""",
    "a module within one that waits is executed once": """
import lit_fedad, lightning, sys, torch
import torch._dynamo.exc as exc
from torch._dynamo.variables import functions
assert functions.ObservedUserStopIteration is exc.ObservedUserStopIteration
assert exc.__spec__.name == "torch._dynamo.exc" and exc.__spec__.origin.endswith("exc.py")
import torch._dynamo.config as config
import torch._dynamo.utils as utils
assert config is sys.modules["torch._dynamo.config"] is torch._dynamo.config
assert utils.is_compile_supported.__module__ == "torch._dynamo.utils"
""",
    "signal processing": """
import lit_fedad, torchmetrics, sys
assert "scipy.signal.windows" not in sys.modules
import scipy.signal
assert scipy.signal.hamming(3).tolist() == scipy.signal.windows.hamming(3).tolist()
from scipy.signal import butter, hamming
assert butter(1, 0.5)[0].shape == (2,) and hamming(3)[1] == 1
""",
    "plots of metrics": """
import lit_fedad, torch
import matplotlib
matplotlib.use("agg")
from torchmetrics.aggregation import MeanMetric
metric = MeanMetric()
metric.update(torch.ones(2))
figure, axes = metric.plot()
assert type(figure).__name__ == "Figure"
from torchmetrics.utilities.plot import trim_axs
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", _SCRIPTS.values(), ids=_SCRIPTS)
def test_what_waits_is_there_when_it_is_asked_for(script):
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
