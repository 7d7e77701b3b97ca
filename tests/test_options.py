"""Options of commands: read into dataclasses, refused in one line."""

from dataclasses import dataclass
from typing import Literal

import pytest

from lit_fedad.errors import UserError
from lit_fedad.options import join, read


@dataclass(frozen=True)
class Options:
    run: str
    steps: int = 500
    mode: Literal["online", "offline"] = "online"
    out: str | None = None
    rate: float = 0.1
    tracking: bool = True
    client: int | None = None
    names: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)


def test_types_defaults_and_the_keys_of_the_configuration():
    given = ["run=a=b", "steps=3", "rate=2e-3", "out=null", "names=x, y,", "seeds=0,1", "data.root=/x"]
    options, overrides = read(Options, [*given, "tracking=off", "client=7"], "attack")
    assert options == Options("a=b", 3, "online", None, 0.002, False, 7, ("x", "y"), (0, 1))
    assert overrides == {"data.root": "/x"}


def test_a_key_without_a_value_counts_as_not_given():
    options, overrides = read(Options, ["run=a", "out=", "steps=", "seeds=", "data.root="], "attack")
    assert options == Options("a")
    assert overrides == {"data.root": ""}


def test_of_equal_keys_the_last_one_counts():
    assert read(Options, ["run=a", "a.b=1", "a.c=2", "run=b", "a.b=3"], "attack") == (
        Options("b"),
        {"a.b": "3", "a.c": "2"},
    )


def test_all_other_keys_as_overrides_keep_their_order_and_form():
    given = ["rounds=3", "run=a", "~cache", "+image.gamma=2", "data.name=a=b", "~data=c"]
    options, overrides = read(Options, given, "sweep", overrides="all")
    assert options == Options("a")
    assert join(overrides) == [option for option in given if option != "run=a"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["run"], "'run' is not of the form key=value"),
        ([], "attack needs 'run'"),
        (["run="], "attack needs 'run'"),
        (["run=a", "step=3"], "attack has no key 'step'; did you mean 'steps'?"),
        (["run=a", "steps=many"], "attack.steps='many' must be int"),
        (["run=a", "steps=1.5"], "attack.steps='1.5' must be int"),
        (["run=a", "steps=null"], "attack.steps='null' must be int"),
        (["run=a", "client=x"], "attack.client='x' must be int or null"),
        (["run=a", "rate=fast"], "attack.rate='fast' must be float"),
        (["run=a", "tracking=2"], "attack.tracking='2' must be bool"),
        (["run=a", "mode=off"], "attack.mode='off' must be one of"),
        (["run=a", "seeds=0,x"], "attack.seeds=0,x: give whole numbers, separated by commas"),
        (["run=a", "~data.root"], "'~data.root' is not of the form key=value"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(options, message):
    with pytest.raises(UserError) as error:
        read(Options, options, "attack")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "option", "message"),
    [
        ("none", "data.root=/x", "sync has no key 'data.root'"),
        ("dotted", "rounds=3", "sync has no key 'rounds'"),
        ("all", "step=3", "sync has no key 'step'; did you mean 'steps'?"),
    ],
)
def test_other_keys_are_refused_where_they_change_nothing(overrides, option, message):
    with pytest.raises(UserError) as error:
        read(Options, ["run=a", option], "sync", overrides)
    assert str(error.value).startswith(message)
