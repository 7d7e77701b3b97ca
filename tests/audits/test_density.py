"""Distance correlation of a finished run."""

import json
import re

import pytest
from helpers.refusals import refusal

from lit_fedad.audits.distance_correlation import correlate, report_privacy
from lit_fedad.audits.page import write_page
from lit_fedad.core.config import compose
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.experiment.train import train

SMALL = [
    *(
        "method=fadngs",
        "experiment=semantic_small",
        "features=train",
        "rounds=1",
        "task.warmup=0",
        "distillation.queue=32",
    ),
    "encoder.channels=4",
    *("data.train_per_class=16", "data.test_per_class=2", "data.train_per_set=2", "data.test_per_set=2"),
    *(
        "partition.clients=2",
        "partition.size=12",
        "partition.contamination=0",
        "batch_size=8",
        "tracking=off",
    ),
    *("public.count=10", "method.server.distillation.epochs=1", "fabric.accelerator=cpu"),
]


@pytest.mark.slow
def test_a_finished_run_gives_the_report_of_its_end(tmp_path, capsys, monkeypatch):
    result = train(compose([*SMALL, f"out={tmp_path}"]), quiet=True)
    capsys.readouterr()
    run = reopen(str(tmp_path))
    write_page(run, correlate(run))
    found = json.loads((tmp_path / "privacy" / "dcor.json").read_text())
    assert found == pytest.approx(result["privacy"], abs=1e-9)
    printed = [re.split(r" {2,}", line) for line in capsys.readouterr().out.splitlines()]
    shared = next(line for line in printed if line[0] == "shared densities")
    assert shared[1:] == [
        f"{result['privacy'][f'shared_raw_{name}']:.3f}" for name in ("r_squared", "r", "corrected")
    ]
    # Client 0 fails.
    ask = run.federation.ask
    monkeypatch.setattr(
        run.federation, "ask", lambda *given: {c: found for c, found in ask(*given).items() if c != 0}
    )
    of_others = report_privacy(run.federation, run.data, run.fabric, tmp_path)
    assert of_others.keys() == result["privacy"].keys()
    assert of_others != result["privacy"]


@pytest.mark.filterwarnings("ignore:.*RANDOM weights")
def test_a_run_without_densities_is_one_line(tiny_run):
    with refusal(
        r"method federated_bank shares no densities.*attack=lira looks at other messages, and attack=inversion at banks"
    ):
        correlate(reopen(str(tiny_run)))
