"""What a site spends over all its runs."""

import json

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.privacy.ledger import Ledger


def test_runs_add_up_and_one_run_counts_once(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", 8.0)
    assert ledger.total == (0, 0)
    for epsilon in (1.0, 2.5):  # what the run has spent in all
        ledger.spend("first", epsilon, 1e-5)
    ledger.spend("second", 4.0, 2e-5)
    again = Ledger(tmp_path / "ledger.json", 8.0)  # the site was started anew
    assert again.total == (6.5, pytest.approx(3e-5))
    assert again.left("first") == 4.0
    assert again.left("third") == 1.5


def test_what_is_not_left_is_not_spent(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json", 8.0)
    ledger.spend("first", 6.0, 1e-5)
    ledger.spend("second", 2.0, 1e-5)  # to the last digit
    with pytest.raises(UserError, match="epsilon 2 left of 8 after 1 other runs .* this one asks for 2.5"):
        ledger.spend("second", 2.5, 1e-5)
    with pytest.raises(UserError, match="epsilon 0 left of 8 after 2 other runs"):
        ledger.check("third", 0.1)
    assert ledger.total[0] == 8.0


def test_without_a_limit_all_is_noted_and_nothing_refused(tmp_path):
    ledger = Ledger(tmp_path / "folder" / "ledger.json")
    for number in range(20):
        ledger.spend(str(number), 10.0, 1e-5)
    assert ledger.total[0] == 200.0


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"run": 1}', '{"run": [1]}', '{"run": [-5, 0]}', '{"run": [NaN, 0]}']
)
def test_a_damaged_file_is_no_empty_ledger(tmp_path, content):
    (tmp_path / "ledger.json").write_text(content)
    with pytest.raises(UserError, match=r"ledger.json: .*; restore it from a copy"):
        Ledger(tmp_path / "ledger.json", 8.0).spend("run", 1.0, 1e-5)


def test_the_file_says_what_each_run_spent(tmp_path):
    Ledger(tmp_path / "ledger.json").spend("run", 1.5, 1e-5)
    assert json.loads((tmp_path / "ledger.json").read_text()) == {"run": [1.5, 1e-5]}
