"""The page of a run's privacy: what is listed of it, and that it follows the run's files."""

import json

import pytest
import torch

from lit_fedad.audits.page import BUDGET, form, privacy_page, write_page
from lit_fedad.cli import main as cli
from lit_fedad.contracts import Free, TensorSpec
from lit_fedad.experiment.finished_run import reopen
from lit_fedad.report.naming import human_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*RANDOM weights")


def cells(page, section, block=0):
    """Texts of a table, line by line."""
    return [[cell.text for cell in line.cells] for line in page.sections[section].blocks[block].lines]


def test_forms_are_type_and_sizes():
    assert form(TensorSpec((Free("images"), 3), torch.uint8)) == f"uint8 [{Free('images')}, 3]"
    assert form(TensorSpec(())) == "float32 []"


def test_every_exchange_is_listed_with_its_bytes(copied_run):
    run = reopen(str(copied_run))
    rows = cells(privacy_page(run), 0)
    exchanges = run.federation.exchanges
    assert [row[0] for row in rows] == [one.name for one in (*exchanges.setup, *exchanges.rounds)]
    assert "covariance float32" in rows[0][2]
    assert {row[3] for row in rows} == {"each message"}
    first = run.federation.history[0].bytes_up
    assert rows[0][4] == human_bytes(round(sum(first.values()) / len(first)))
    rounds = [one.bytes_up.values() for one in run.federation.history if one.round > 0]
    assert rows[-1][1] == "every round"
    assert rows[-1][4] == human_bytes(sum(sum(sent) / len(sent) for sent in rounds) / len(rounds))


def test_a_metric_without_a_value_is_left_out(copied_run):
    run = reopen(str(copied_run))
    run.result["last"]["i_auroc"]["mean"] = None  # no test image is anomalous
    assert "I-AUROC" not in privacy_page(run).summary


@pytest.mark.parametrize(
    ("metric", "title"), [("auroc", "AUROC"), ("selection_accuracy", "A_sel"), ("global_accuracy", "A_glo")]
)
def test_what_runs_of_other_data_reach_is_said(copied_run, metric, title):
    run = reopen(str(copied_run))
    run.result["last"] = {"round": 1, metric: {"mean": 0.75}}
    assert privacy_page(run).summary.endswith(f"; {title} 0.750")


def test_findings_and_defences_follow_the_files(copied_run):
    run = reopen(str(copied_run))
    before = privacy_page(run)
    assert f"I-AUROC {run.result['last']['i_auroc']['mean']:.3f}" in before.summary
    assert "attack=lira" in before.sections[1].blocks[0].lines[0]
    assert ["differential privacy", "none"] in [row[:2] for row in cells(before, 2)]
    assert ["secure sums", "off"] in [row[:2] for row in cells(before, 2)]
    assert ["method.client.min_images", "2"] in [row[:2] for row in cells(before, 2)]
    estimate = {"value": 0.7, "low": 0.6, "high": 0.8, "chance": 0.5, "chance_high": 0.55}
    tpr = dict.fromkeys(("tpr_at_0.1_percent", "tpr_at_1_percent"), estimate)
    report = {"auc": estimate, "tpr": tpr, "auc_of_models": [0.75, 0.125]}
    (copied_run / "privacy").mkdir(exist_ok=True)
    found = {
        "shadows": 8,
        "uploads": "each client's own",
        "pairs_left_out": 0,
    }
    found["findings"] = [{"side": "sent", "statistic": "all", "report": report}]
    (copied_run / "privacy" / "lira.json").write_text(json.dumps(found))
    run.result[BUDGET] = {"epsilon": 3.2, "delta": 1e-5}
    after = privacy_page(run)
    numbers = ["0.750 +- 0.125", *["0.700 [0.600, 0.800] (0.500, 0.550)"] * 3]
    assert cells(after, 1) == [["what clients send", "all", *numbers]]
    assert ["differential privacy", "epsilon 3.2, delta 1e-05"] in [row[:2] for row in cells(after, 2)]


@pytest.mark.parametrize(("secret", "said"), [(True, "a bound for any attack"), (False, "no protection")])
def test_noise_of_a_known_seed_is_no_defence(copied_run, secret, said):
    run = reopen(str(copied_run))
    run.result[BUDGET] = {"epsilon": 3.2, "delta": 1e-5, "secret": secret}
    assert cells(privacy_page(run), 2)[-1][2].endswith(said)


def test_what_an_attack_did_not_read_stands_below_its_table(copied_run):
    found = {
        "shadows": 8,
        "uploads": "each client's own",
        "pairs_left_out": 0,
        "findings": [],
    }
    (copied_run / "privacy").mkdir(exist_ok=True)
    (copied_run / "privacy" / "lira.json").write_text(
        json.dumps(found | {"not_read": ["averages: mean_images"]})
    )
    notes = privacy_page(reopen(str(copied_run))).sections[1].blocks[0].notes
    assert notes[-1] == "No statistic reads, so that even 'all' says nothing of it: averages: mean_images"


def test_correlations_stand_beside_those_of_noise(copied_run):
    kinds = {"shared": (0.5, 0.25, -0.125), "noise": (0.75, 0.375, 0.0)}
    names = ("r_squared", "r", "corrected")
    found = {
        f"{key}_raw_{name}": value
        for key, values in kinds.items()
        for name, value in zip(names, values, strict=True)
    }
    (copied_run / "privacy").mkdir(exist_ok=True)
    (copied_run / "privacy" / "dcor.json").write_text(json.dumps(found))
    grid = privacy_page(reopen(str(copied_run))).sections[1].blocks[0]
    assert grid.heads == ["of", "R^2", "R", "R^2, bias-corrected"]
    assert [[cell.text for cell in line.cells] for line in grid.lines] == [
        ["shared densities", "0.500", "0.250", "-0.125"],
        ["Gaussian noise", "0.750", "0.375", "0.000"],
    ]


def test_an_inversion_is_told_with_its_controls_and_chance(copied_run):
    """The median rank is one among all candidates, beside how many reconstructions it is of."""
    quality = {"psnr": None, "best_psnr": None, "ssim": 1.0, "best_ssim": 1.0, "psnr_to_mean_image": 12.34}
    found = {"top1": 0.5, "low": 0.25, "high": 0.75, "chance": 0.125, "ranks": [1, 40]}
    result = {
        "attacked": "images",
        "exchange": 3,
        "client": 0,
        "control": 1,
        "judge": "a",
        "candidates": "b",
        "identified": {"client 0": found},
        "judged": {"client 0": quality},
        "positive_controls": [{"control": "bank of 1 image", **quality, **found, "ranks": [69]}],
    }
    (copied_run / "privacy").mkdir(exist_ok=True)
    (copied_run / "privacy" / "inversion.json").write_text(json.dumps(result))
    share, rest = "0.500 [0.250, 0.750] (0.125)", ["infinite, infinite", "1.00, 1.00", "12.3"]
    assert cells(privacy_page(reopen(str(copied_run))), 1) == [
        ["client 0", share, "20.5, 2", *rest],
        ["positive control: bank of 1 image", share, "69, 1", *rest],
    ]


@pytest.mark.parametrize("attack", ["lira", "inversion", "dcor"])
@pytest.mark.parametrize(
    "content", ["{", "[]", '{"auc": 0.5}'], ids=["cut", "no object", "of an earlier version"]
)
def test_results_of_another_form_are_named_in_one_line_and_the_rest_is_drawn(
    copied_run, attack, content, capsys
):
    (copied_run / "privacy").mkdir(exist_ok=True)
    (copied_run / "privacy" / f"{attack}.json").write_text(content)
    assert cli.main(["privacy", f"run={copied_run}", "attack=report"]) == 0
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert f"privacy/{attack}.json: " in said
    assert "remove it, and attack the run again" in said
    text = (copied_run / "privacy" / "privacy.md").read_text()
    assert f"{attack}.json: " in text
    assert "No attack was run" not in text
    assert "Defences" in text


def test_page_is_written_in_both_forms(copied_run):
    write_page(reopen(str(copied_run)))
    html, text = ((copied_run / "privacy" / f"privacy.{end}").read_text() for end in ("html", "md"))
    for part in ("What leaves a site", "Defences", "different images behind a slot"):
        assert part in html
        assert part in text


def test_command_prints_the_page(copied_run, capsys):
    assert cli.main(["privacy", f"run={copied_run}", "attack=report"]) == 0
    out = capsys.readouterr().out
    assert "What leaves a site" in out
    assert "No attack was run" in out
    assert str(copied_run / "privacy" / "privacy.html") in out
