"""Who wins over whom: root, groups, method, preset, variant, debug, command line."""

from __future__ import annotations

import pytest
from helpers.refusals import refusal

from lit_fedad.core.config import compose
from lit_fedad.core.errors import UserError
from lit_fedad.core.identity import identity


@pytest.fixture
def write(own_conf):
    """Writes YAML files into a copy of the configuration, which is composed from then on."""

    def put(**files):
        for name, text in files.items():
            (own_conf / f"{name.replace('__', '/')}.yaml").write_text(f"# @package _global_\n{text}")

    return put


@pytest.mark.parametrize(
    "method", ["fedavg", *(pytest.param(m, marks=pytest.mark.slow) for m in ("gldp", "feddymem_literal"))]
)
def test_a_presets_keys_win_over_a_methods_own_and_lose_to_debug_and_the_command_line(write, method):
    kept = "base_epochs" if method == "gldp" else "local_epochs"
    write(
        experiment__mine=f"method: {{client: {{{kept}: 7}}}}",
        debug__mine=f"method: {{client: {{{kept}: 8}}}}",
    )

    def composed(*overrides):
        return compose([f"method={method}", *overrides])["method"]["client"][kept]

    assert composed() not in (7, 8, 9)
    assert composed("experiment=mine") == 7
    assert composed("experiment=mine", "debug=mine") == 8
    assert composed("experiment=mine", "debug=mine", f"method.client.{kept}=9") == 9


def test_what_a_variant_changes_holds_under_every_preset(write):
    write(
        method__mine="defaults: [fedprox]\nmethod: {name: mine, client: {mu: 3.0}}",
        experiment__mine="method: {client: {mu: 2.0, local_epochs: 7}}",
    )
    client = compose(["method=mine", "experiment=mine"])["method"]["client"]
    assert (client["mu"], client["local_epochs"]) == (3.0, 7)
    assert compose(["method=fedprox", "experiment=mine"])["method"]["client"]["mu"] == 2.0


@pytest.mark.parametrize(
    ("overrides", "partition"),
    [
        (["method=fedavg"], "Dirichlet"),  # the root's
        (["method=fedavg", "experiment=mine"], "ByProduct"),
        (["method=centralised", "experiment=mine"], "Pooled"),
        (["method=mine", "experiment=mine"], "FromFile"),
        (["method=mine"], "FromFile"),
        (["method=mine", "experiment=mine", "debug=seconds"], "IID"),
        (
            ["method=mine", "experiment=mine", "debug=seconds", "partition=pooled", "~partition.clients"],
            "Pooled",
        ),
    ],
)
def test_a_groups_choice_by_debug_beats_the_methods_and_this_the_presets(write, overrides, partition):
    write(
        experiment__mine="defaults:\n  - override /partition: by_product",
        method__mine="defaults:\n  - centralised\n  - override /partition: file\npartition: {path: p}",
    )
    assert compose(overrides)["partition"]["_target_"].rpartition(".")[2] == partition


@pytest.mark.parametrize("experiment", [[], ["experiment=small"]])
def test_a_method_that_brings_no_preset_is_refused(write, experiment):
    write(method__mine="method: {name: mine}")
    with pytest.raises(UserError, match=r"'- _self_' and '- /experiment: default'"):
        compose(["method=mine", *experiment])


@pytest.mark.slow
def test_a_method_and_a_preset_may_add_callbacks(write):
    write(
        method__mine="defaults: [fedavg]\ncallbacks: {one: {_target_: a.One}}",
        experiment__mine="callbacks: {two: {_target_: b.Two, every: 3}}",
    )
    both = compose(["method=mine", "experiment=mine"])
    assert both["callbacks"] == {"one": {"_target_": "a.One"}, "two": {"_target_": "b.Two", "every": 3}}
    assert identity(both) == identity({**both, "callbacks": {}})
    assert compose(["method=mine", "~callbacks.one"])["callbacks"] == {}


def test_what_is_asked_for_wins_over_the_preset_of_a_method():
    task = compose(["method=fadngs", "features=train", "encoder=resnet34", "task.warmup=3", "rounds=9"])[
        "task"
    ]
    assert (task["encoder"]["network"]["depth"], task["warmup"], task["rounds"]) == (34, 3, 9)


def test_what_a_method_brings_for_noise_wins_over_its_task_and_loses_to_the_command_line():
    noise = ["federation/privacy=central", "federation.privacy.epsilon=4"]
    found = [
        compose(["method=federated_subspace", *words])["task"]["scales"]
        for words in (["federation=secure"], noise, [*noise, "task.scales=2"])
    ]
    assert found == [None, 1, 2]


@pytest.mark.parametrize("text", ["method: [1", "method: {}\nmethod: {}", "defaults: fedprox"])
def test_a_file_of_ones_own_that_is_no_configuration_is_refused_in_one_line(write, text):
    """Where it is no YAML, with its line; it ended in a traceback."""
    write(method__mine=text)
    with refusal(r"method/mine.*; correct it"):
        compose(["method=mine"])


@pytest.mark.parametrize("more", ["", ", {override /task: autoencoder}"])
def test_a_method_without_its_first_line_is_told_of_it(own_conf, more):
    (own_conf / "method" / "mine.yaml").write_text(
        f"defaults: [_self_, {{/experiment: default}}{more}]\nmethod: {{name: mine}}\n"
    )
    with refusal("first line must be '# @package _global_'"):
        compose(["method=mine"])
