"""Study files: all that ship compose, and what is wrong with one is said in a line."""

from dataclasses import replace

import pytest
from helpers.refusals import refusal
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.pruners import MedianPruner, NopPruner

from lit_fedad.core.errors import UserError
from lit_fedad.sweep.plan import Dimension, read_plan, sweeps_folder

STUDIES = sorted(path.stem for path in sweeps_folder().glob("*.yaml"))


def test_the_issue_s_studies_are_there():
    assert {
        "feddymem_th",
        "federated_bank_accuracy_bytes",
        "gldp_lambda_beta",
        "fadngs_queue",
        "fedvck_knowledge",
    } <= {*STUDIES}


@pytest.mark.parametrize("study", STUDIES)
def test_study_searches_keys_of_its_base_around_the_default(study):
    plan = read_plan(study)
    defaults = plan.defaults()
    assert defaults is not None
    assert list(defaults) == list(plan.space)
    # What is drawn arrives: the key holds it, or the group's option does.
    varied = {
        key: dimension.choices[-1] if dimension.choices else dimension.low
        for key, dimension in plan.space.items()
    }
    config = plan.config(varied)
    for key, value in varied.items():
        node = config
        for part in key.split("."):
            node = node[part]
        if isinstance(node, dict):
            assert node != plan.base_config[key]
        else:
            assert node == value


@pytest.mark.parametrize(
    ("dimension", "distribution"),
    [
        (Dimension("int", 1, 8, log=True), IntDistribution(1, 8, log=True)),
        (Dimension("int", 1, 9, step=2), IntDistribution(1, 9, step=2)),
        (Dimension("float", 1, 8, log=True), FloatDistribution(1, 8, log=True)),
        (Dimension("float", 0, 1, step=0.25), FloatDistribution(0, 1, step=0.25)),
    ],
)
def test_numbers_are_drawn_as_the_file_says(dimension, distribution):
    assert dimension.distribution() == distribution


def test_a_study_has_the_pruner_of_its_file_or_none(study_file):
    plan = read_plan(str(study_file))
    assert isinstance(plan.make_pruner(), MedianPruner)
    assert isinstance(replace(plan, pruner=None).make_pruner(), NopPruner)


def test_default_outside_the_search_space_is_none(study_file):
    study_file.write_text(study_file.read_text().replace("low: 1, high: 8", "low: 4, high: 8"))
    assert read_plan(str(study_file)).defaults() is None


def test_groups_within_groups_have_a_default_and_keys_that_are_added_none(study_file):
    dimension = "task.loss.neighbours: {type: int, low: 1, high: 8}"
    group, text = "federation/robust: {type: categorical, choices: [median, default]}", study_file.read_text()
    study_file.write_text(text.replace(dimension, group))
    assert read_plan(str(study_file)).defaults()["federation/robust"] == "default"
    study_file.write_text(text.replace(dimension, "+data.more: {type: int, low: 1, high: 8}"))
    assert read_plan(str(study_file)).defaults() is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("task.loss.neighbours", "task.loss.neighbors", "'task.loss.neighbors'; did you mean 'task.loss.neighbours'?"),
        ("low: 1,", "lo: 1,", "small.yaml: space: task.loss.neighbours has no key 'lo'; did you mean 'low'?"),
        ("pruner:", "prunner:", "small.yaml has no key 'prunner'; did you mean 'pruner'?"),
        ("maximize", "up", "small.yaml: objectives={'pro': 'up'} must be metric: maximize or minimize"),
        ("n_startup_trials: 3", "n_startup: 3", "sampler has no key 'n_startup'; did you mean"),
        ("high: 8", "high: 0", "space: task.loss.neighbours: "),
        ("high: 8", "high: 8, step: 0", "space: task.loss.neighbours: `step > 0` must hold"),
        ("high: 8", "high: 8.5", "neighbours: low, high and step of an int must be whole numbers"),
        ("{pro: maximize}", "{pro: maximize, bytes: minimize}", "cannot prune"),
        ("{pro: maximize}", "{extras/mine: maximize}", "of bytes or of extras/KEY cannot prune"),
        ("{pro: maximize}", "{pro/best: maximize}", "'pro/best' must end in one of /mean /worst /pooled /product_mean"),
        ("debug=seconds", "fabric.devices=2", "start more workers"),
        ("method=federated_bank", "method=feddymem, task=memory_bank_sums", "feddymem sets task.head"),
        ("debug=seconds", "'hydra.searchpath=[file:///x]'", "no study file sets hydra"),
        ("tracking=off", "'++tracking.uri=http://x'", "no study file sets tracking"),
        ("debug=seconds", "'task._target_=os.system'", "it sets a _target_; a study names Optuna's samplers"),
        ("base: [", "base: [[", "small.yaml: cannot be read ("),
        ("space:", "space:\n  federation: {type: categorical, choices: [default, hlaf]}", "no option 'hlaf'"),
        ("debug=seconds", "'debug=${oc.env:HOME}'", "of ${...} a study takes names of keys alone"),
        ("[method=federated_bank,", "[[method=federated_bank],", "small.yaml: base must be a list of overrides"),
        ("{pro: maximize}", "[pro]", "small.yaml: objectives=['pro'] must be metric: maximize or minimize"),
        ("{pro: maximize}", "{pro: [maximize]}", "objectives={'pro': ['maximize']} must be metric: maximize"),
        ("{type: int, low: 1, high: 8}", "[1, 8]", "space: task.loss.neighbours must be a section, such as {type: int"),
        ("{type: int, low: 1, high: 8}", "", "space: task.loss.neighbours must be a section, such as {type: int"),
        ("debug=seconds", "task.learning_rate=1", "'task.learning_rate=1' fixes what the study searches"),
        ("_target_: optuna.samplers.TPESampler, n_startup_trials: 3,", "", "sampler needs a _target_, such as optuna."),
        ("TPESampler, n_startup_trials: 3, constant_liar: true", "GridSampler", "cannot share a GridSampler"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(study_file, old, new, message):
    study_file.write_text(study_file.read_text().replace(old, new))
    with refusal() as error:
        read_plan(str(study_file))
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["größe", r"a\b", r"a\"b\\", "a b", "half,byte", "3", "", ["größe", "b"]])
def test_a_trial_has_the_words_that_were_drawn(study_file, name):
    plan = read_plan(str(study_file))
    assert plan.config({"+data.more": name})["data"]["more"] == name


def test_unknown_study_names_the_nearest():
    with pytest.raises(UserError, match="study=feddymem_t: give feddymem_th, or the path"):
        read_plan("feddymem_t")


def test_fingerprint_tells_studies_apart_but_not_circumstances(study_file):
    plan = read_plan(str(study_file))
    plain = plan.fingerprint()
    assert replace(plan, base=[*plan.base, "cache.folder=/elsewhere"]).fingerprint() == plain
    assert replace(plan, base=[*plan.base, "rounds=3"]).fingerprint() != plain
    wider = {**plan.space, "task.loss.neighbours": Dimension("int", 1, 9)}
    assert replace(plan, space=wider).fingerprint() != plain
