"""A federation of sites ends with the digits of the same federation in one process."""

import json
import shutil
from dataclasses import asdict

import pytest
import torch
from helpers.sites import DEBUG, NAMES, Here, in_one_process, paint, three_sites

from lit_fedad.contracts.kept_state import read_kept
from lit_fedad.evaluation.calibration import calibrate
from lit_fedad.experiment.calibration import calibration_scores
from lit_fedad.federation.loop import Federation
from lit_fedad.report.console import Display
from lit_fedad.sites import coordinator
from lit_fedad.sites.coordinator import Plan, coordinate
from lit_fedad.sites.letters import Order
from lit_fedad.sites.remote import Lost
from lit_fedad.sites.status import read_status

OTHERS = (
    "fedavg", "fedprox", "fedbn", "fedphp", "scaffold", "moon", "dbe", "apfl", "apple", "local",
    "feddymem", "federated_subspace", "feddymem_trained", "feddymem_close", "feddymem_literal",
)  # fmt: skip


@pytest.mark.parametrize(
    "method",
    ["federated_patchcore", *(pytest.param(m, marks=pytest.mark.slow) for m in OTHERS)],
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


@pytest.mark.slow
def test_a_killed_coordinator_goes_on_where_its_checkpoint_is(tmp_path, monkeypatch, differences):
    """In a round that the sites have played already: their newer states are not taken for those of the checkpoint."""
    words = ["method=fedavg", *DEBUG, "rounds=3"]
    paint(tmp_path)
    runs = {}
    for name in ("straight", "killed"):
        folder = tmp_path / name
        for site in NAMES:
            shutil.copytree(tmp_path / site / "images", folder / site / "images")
        plan = Plan(words, NAMES, str(folder / "run"), ("fabric.accelerator=cpu",))
        if name == "killed":
            save = Federation.save

            def dies(federation, round, save=save):
                if round == 2:
                    raise KeyboardInterrupt
                save(federation, round)

            with monkeypatch.context() as patch:
                patch.setattr(Federation, "save", dies)
                with pytest.raises(KeyboardInterrupt):
                    coordinate(plan, Here(three_sites(folder)), Display(quiet=True))
        carrier = Here(three_sites(folder))  # sites that were restarted, too
        runs[name] = coordinate(plan, carrier, Display(quiet=True)), carrier, folder
    (straight, _, one), (killed, carrier, other) = runs.values()
    assert told_result(killed) == told_result(straight)
    first = Order.from_bytes(carrier.orders[1][0])
    assert (first.kind, first.round) == ("play", 2)
    assert 0 < first.base < first.step
    states = [
        torch.load(max((folder / site / "states").glob("*/*.pt")))
        for folder in (one, other)
        for site in NAMES
    ]
    assert differences(states[:3], states[3:]) == []


def told_result(result):
    """What a result says apart from times and places."""
    return json.dumps({k: v for k, v in result.items() if k not in ("seconds_per_round", "config")})


@pytest.mark.slow
def test_a_site_that_is_away_costs_itself_the_round(tmp_path):
    """The others' round is the one that they would have had alone, and it is back in the next."""
    words = ["method=fedavg", *DEBUG, "federation.sampler.on_failure=skip"]
    paint(tmp_path)

    class Away(Here):
        def carry(self, orders):
            found = super().carry(orders)
            for client, blob in orders.items():
                order = Order.from_bytes(blob)
                if client == 1 and order.kind == "play" and order.round == 1:
                    found[client] = Lost("did not answer within 5 seconds")
            return found

    carrier = Away(three_sites(tmp_path))
    plan = Plan(words, NAMES, str(tmp_path / "run"), ("fabric.accelerator=cpu",))
    result = coordinate(plan, carrier, Display(quiet=True))
    assert result["failures"] == {1: {1: "did not answer within 5 seconds"}}
    status = read_status(tmp_path / "run")
    assert status["sites"]["east"]["troubles"] == ["round 1: did not answer within 5 seconds"]
    assert [own["last_round"] for own in status["sites"].values()] == [2, 2, 2]
    # What it did in the round that was lost is forgotten: round 2 starts from the state before.
    plays = [Order.from_bytes(found[1]) for found in carrier.orders if 1 in found]
    lost, after = (next(o for o in plays if o.kind == "play" and o.round == r) for r in (1, 2))
    assert after.base == lost.base
