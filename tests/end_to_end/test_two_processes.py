"""Two commands on one folder at once: one of them runs, the other is refused in one line, nothing is mixed."""

from __future__ import annotations

import json
import os

import pytest
import yaml

from lit_fedad.core.errors import UserError
from lit_fedad.core.identity import identity
from lit_fedad.federation.callback import FederationCallback

PAIRS = int(os.environ.get("LIT_FEDAD_PAIRS", "4"))


class Meanwhile(FederationCallback):
    """Calls a function after round 1."""

    def __init__(self, call):
        self.call = call

    def on_round_end(self, federation, report):
        if report.round == 1:
            self.call()


@pytest.mark.parametrize(
    "own",
    [
        pytest.param([], id="same", marks=pytest.mark.slow),
        pytest.param(["seed=1"], id="other", marks=pytest.mark.slow),
        pytest.param(["fresh=true"], id="fresh", marks=pytest.mark.slow),
    ],
)
def test_a_second_command_on_a_folder_is_refused(lab, tmp_path, outcome, differences, own):
    refusals = []

    def second():
        with pytest.raises(UserError, match=f"^{tmp_path / 'run'}: another lit-fedad command") as caught:
            lab.train(tmp_path / "run", *own)
        refusals.append(str(caught.value))

    given = lab.train_with([Meanwhile(second)], tmp_path / "run")
    assert len(refusals) == 1
    assert differences(outcome(given), outcome(lab.finished("method=feddymem")[1])) == []
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 0


@pytest.mark.slow
def test_a_result_of_another_configuration_is_never_shown(lab, tmp_path):
    lab.train(tmp_path / "run")
    lab.train(tmp_path / "other", "seed=1")
    for name in ("config.yaml", "manifest.json"):  # as two commands at once once left them
        (tmp_path / "run" / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(UserError, match=f"^{tmp_path / 'run'}"):
        lab.train(tmp_path / "run", "seed=1")


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)], ids=["same", "other"])
def test_of_two_commands_at_once_one_runs(lab, forking, tmp_path, outcome, differences, seeds):
    """LIT_FEDAD_PAIRS sets how often."""
    expected = {seed: json.loads(json.dumps(lab.finished(f"seed={seed}")[1])) for seed in seeds}
    for pair in range(PAIRS):
        out, logs = tmp_path / str(pair), [tmp_path / f"{pair}_{number}.log" for number in range(2)]
        processes = [
            forking.start(["train", *lab.overrides(f"out={out}", f"seed={seed}")], log)
            for seed, log in zip(seeds, logs, strict=True)
        ]
        ends = [forking.wait(process) for process in processes]
        said = [log.read_text() for log in logs]
        assert "Traceback" not in "".join(said), said
        assert 0 in ends, said
        for end, text in zip(ends, said, strict=True):
            assert end in (0, 2)
            if end == 2:
                errors = [line for line in text.splitlines() if line.startswith("error: ")]
                assert len(errors) == 1, text
                assert str(out) in " ".join(text.split())
        result = json.loads((out / "result.json").read_text())
        config = yaml.safe_load((out / "config.yaml").read_text())
        config.pop("format")
        assert identity(config) == identity(result["config"])
        assert differences(outcome(result), outcome(expected[result["seed"]])) == []
