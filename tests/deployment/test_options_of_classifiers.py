"""Options of decisions are refused where a run learned classes."""

from types import SimpleNamespace

import pytest
from helpers.refusals import refusal

from lit_fedad.deployment import export as exporting
from lit_fedad.deployment import predict as predicting
from lit_fedad.deployment.live_detector import OpenedClient


@pytest.mark.parametrize(
    ("module", "command", "given"),
    [
        (predicting, "predict", {"images": "photos", "product": "screw"}),
        (predicting, "predict", {"images": "photos", "alpha": 0.05}),
        (exporting, "export", {"format": ("pt2",), "product": "screw"}),
    ],
)
def test_a_classifier_takes_no_product_and_no_rate(monkeypatch, module, command, given):
    classifier = SimpleNamespace(task=SimpleNamespace(kind="classification"))
    opened = OpenedClient(None, {}, {}, classifier, 0, None, None, None)
    monkeypatch.setattr(module, "open_client", lambda *_: opened)
    name = list(given)[-1]
    with refusal(f"^{name}={given[name]}: a classifier has no threshold; leave it out$"):
        getattr(module, command)("run", **given)
