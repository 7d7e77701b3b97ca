"""A federation of sites ends with the digits of the same federation in one process."""

import json
from dataclasses import asdict

import pytest
from helpers.sites import DEBUG, NAMES, Here, in_one_process, paint, three_sites

from lit_fedad.contracts.kept_state import read_kept
from lit_fedad.evaluation.calibration import calibrate
from lit_fedad.experiment.calibration import calibration_scores
from lit_fedad.report.console import Display
from lit_fedad.sites import coordinator
from lit_fedad.sites.coordinator import Plan, coordinate


@pytest.mark.parametrize(
    "method",
    ["feddymem", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fedavg", "federated_subspace"))],
)
def test_sites_and_one_process_end_alike(tmp_path, monkeypatch, differences, method):
    played = []
    build = coordinator.build_federation
    monkeypatch.setattr(
        coordinator, "build_federation", lambda *given: played.append(build(*given)) or played[-1]
    )
    words = [f"method={method}", *DEBUG]
    products = paint(tmp_path)
    plan = Plan(words, NAMES, str(tmp_path / "run"), ("fabric.accelerator=cpu",))
    result = coordinate(plan, Here(three_sites(tmp_path)), Display(quiet=True))
    (there,) = played

    run = in_one_process(tmp_path, words, products)
    one, data = run.federation, run.data
    assert differences(read_kept(there.server), read_kept(one.server)) == []
    assert told(there.history) == told(one.history)
    scores = calibration_scores(run.config, data.images, data.partition, data.module, run.fabric)
    here = json.loads(json.dumps(calibrate(one, one.rounds, scores).to_json()))
    assert json.loads((tmp_path / "run" / "calibration.json").read_text()) == here
    assert result["sites"] == {
        name: {"client": client, "products": {product: 8}}
        for client, (name, product) in enumerate(zip(NAMES, products, strict=True))
    }


def told(history):
    """What reports say apart from times; floats to the last bit, and NaN equal to itself."""
    return [json.dumps({**asdict(report), "seconds": 0}) for report in history]
