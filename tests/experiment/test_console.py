"""What a run prints beside its lines by round."""

from __future__ import annotations

from types import SimpleNamespace

from lit_fedad.contracts import Exchanges, Predictors
from lit_fedad.contracts.disclosure import TRAINED_WEIGHTS, summed
from lit_fedad.core.client_names import NUMBERS
from lit_fedad.experiment.console import Console, never_trained, sent_in_words
from lit_fedad.federation.round_report import RoundReport


class _Display:
    """A display that remembers warnings."""

    def __init__(self):
        self.warned = []

    def warn(self, line):
        self.warned.append(line)

    def round_line(self, **values):
        pass


def test_a_failure_after_the_last_round_is_printed_once_at_the_end():
    display, report = _Display(), RoundReport(round=2, exchange="train", participants=[0, 1])
    console = Console()
    console._display, console._last = display, 0.0
    report.failures[0] = "no memory"
    console.on_round_end(SimpleNamespace(rounds=2, names=NUMBERS), report)
    assert display.warned == ["round 2: client 0 left out: no memory"]
    report.unscored[1] = "broken image"
    console.on_run_end(SimpleNamespace(), {})
    assert display.warned[1:] == ["round 2: client 1 left out of the evaluation: broken image"]


def test_all_that_clients_send_in_a_round_is_said_whatever_the_number_of_exchanges():
    def exchange(name, disclosed):
        return SimpleNamespace(name=name, upload_spec=lambda client: {"a": None}, discloses=(disclosed,))

    densities = summed("mean of the features")
    steps = Exchanges(
        (exchange("densities", densities),),
        (exchange("train", TRAINED_WEIGHTS), exchange("densities", densities)),
    )
    client = SimpleNamespace(task=SimpleNamespace(images_behind=None))
    assert sent_in_words(steps, client) == {
        "set-up densities": "clients send mean of the features",
        "each round": f"clients send {TRAINED_WEIGHTS.what}; mean of the features",
    }


def test_where_nothing_trains_nobody_is_said_not_to_have():
    idle = SimpleNamespace(trains=False)
    report = RoundReport(round=1, exchange="nothing", participants=[0])
    client = SimpleNamespace(predictors=Predictors())
    federation = SimpleNamespace(
        client=client, clients=[0, 1], history=[report], names=NUMBERS, exchanges=Exchanges((), (idle,))
    )
    assert never_trained(federation) == ""
