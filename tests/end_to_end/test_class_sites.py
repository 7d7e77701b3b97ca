"""Sites that learn classes, or look for semantic anomalies, end with the digits of the same clients in one process."""

import pytest
import torch
from helpers.class_sites import (
    CLASSES,
    CROSS,
    LEARN_CLASSES,
    NEED_ALL_IMAGES,
    NEEDS_LABELLED_IMAGES,
    PLACES,
    SEMANTIC,
    class_data,
    in_one_process,
    pack,
    semantic_data,
    sites,
    words_of,
)
from helpers.nightly import by_method
from helpers.sites import DEBUG, HERE, NAMES, OF_FILES, Here, coordinated, kept_states, told

from lit_fedad.contracts.state import state_of
from lit_fedad.core.errors import UserError
from lit_fedad.evaluation.predict import predict_batch
from lit_fedad.experiment.finished_run import load_client
from lit_fedad.experiment.run_folder import RunFolder
from lit_fedad.federation.evaluator import LocalQuery
from lit_fedad.report.console import Display
from lit_fedad.sites.coordinator import Plan
from lit_fedad.sites.enrolment import check_crosses


def check_alike(folder, differences, words, data, classes, public):
    """Plays both ways, and compares server, personal states, bytes and metrics."""
    pack(folder, own_numbers=bool(classes))
    form = [] if classes else ["data.mean=0", "data.std=1"]  # as sets of semantic anomalies have it
    plan = Plan([*words, *form], NAMES, str(folder / "run"), (*HERE, *public), classes)
    result, there = coordinated(plan, Here(sites(folder, data)))
    run = in_one_process(folder, words, data, *public)
    one = run.federation
    assert told(there.history) == told(one.history)
    assert differences(state_of(there.server), state_of(one.server)) == []
    for client, kept in enumerate(kept_states(folder, there)):
        found = differences(kept, one.pool.get(client))
        assert [line for line in found if not line.split(":")[0].endswith(PLACES)] == []
    check_own_detectors(folder, run)
    return result


def check_own_detectors(folder, run):
    """Models that stay at sites predict as the clients of the run in one process."""
    if run.model.client.predictors.shared:
        assert not list(folder.glob("*/detectors"))
        return
    batch = next(iter(run.local.module.test_dataloader()))

    def predicted(client, number):
        prediction = predict_batch(client, batch, run.fabric)
        return prediction.image_score if prediction.logits is None else prediction.logits

    known = run.federation.ask(run.federation.rounds, LocalQuery("predictions", predicted))
    for number, name in enumerate(NAMES):
        (own,) = (folder / name / "detectors").iterdir()
        mark = RunFolder(own).result()["own_client"]
        load_client(run.model, own, RunFolder(own).config(), number, run.fabric, mark)
        torch.testing.assert_close(predicted(run.model.client, number), known[number])


@pytest.mark.slow
@pytest.mark.parametrize("method", by_method(LEARN_CLASSES))
def test_classifiers(tmp_path, differences, capsys, method):
    words, public = words_of(method, "classifier", tmp_path)
    result = check_alike(tmp_path, differences, words, class_data, CLASSES, public)
    # Two sites hold two of three classes in equal parts, one all: of those that it tests, too.
    assert result["constants"]["client_largest"]["2"]["accuracy"] == pytest.approx(
        (1 / 2 + 1 / 3 + 1 / 2) / 3
    )
    assert result["partition"]["counts"] == [[6, 6, 0], [6, 6, 6], [0, 6, 6]]
    Display().closing_table(result)  # what `federation start` ends with
    assert "Without a look at images" in capsys.readouterr().out
    assert set(result["last"]) == {
        "round",
        "accuracy",
        "own_accuracy",
        "balanced_accuracy",
        "predicted_classes",
    }


@pytest.mark.slow
@pytest.mark.parametrize(("method", "task"), by_method(SEMANTIC))
def test_semantic_anomalies(tmp_path, differences, method, task):
    words, public = words_of(method, task, tmp_path)
    result = check_alike(tmp_path, differences, words, semantic_data, (), public)
    assert {"auroc", "fe_calibrated", "false_alarm_rate", "miss_rate"} <= set(result["last"])


@pytest.mark.slow
def test_every_method_crosses_or_says_why():
    """What is played here and in the tests of files, and one line of each other."""
    played = {*LEARN_CLASSES, *(method for method, _ in SEMANTIC), *OF_FILES, "federated_patchcore"}
    assert played >= {*CROSS}
    for method in NEEDS_LABELLED_IMAGES:
        with pytest.raises(UserError, match="its server needs labelled images of its own"):
            check_crosses(Plan([f"method={method}", *DEBUG], NAMES, "x").config(), CLASSES)
    for method in NEED_ALL_IMAGES:
        with pytest.raises(
            UserError, match=f"method={method}: is meant for one client that holds all images"
        ):
            Plan([f"method={method}", *DEBUG], NAMES, "x").config()
        assert Plan([f"method={method}", *DEBUG], NAMES[:1], "x").config()["method"]["name"] == method


@pytest.mark.parametrize(
    ("words", "classes", "cause"),
    [
        (["method=fedavg", "task=classifier_convnet"], (), "name all that sites hold: classes=cat,dog"),
        (["method=fedavg", "task=classifier_convnet"], ("cat", "cat"), "name all that sites hold"),
        (
            ["method=fedavg", "task=classifier_convnet"],
            ("cat", "dog", "cat"),
            "give at most 200 different names",
        ),
        (["method=fedavg", "task=classifier_convnet"], ("cat", "dog\n"), "give at most 200 different names"),
        (["method=fedavg", "task=subspace"], CLASSES, "learns none; leave them out"),
    ],
)
def test_classes_are_named_where_they_are_learnt(words, classes, cause):
    with pytest.raises(UserError, match=cause):
        check_crosses(Plan([*words, *DEBUG], NAMES, "x").config(), classes)


def test_public_images_are_drawn():
    plan = Plan(["method=fadngs", *DEBUG], NAMES, "x", ("public=folder", "public.root=x"))
    with pytest.raises(UserError, match="nobody can see whether images of the coordinator are also a site's"):
        check_crosses(plan.config())
