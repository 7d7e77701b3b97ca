"""What a site spends over all its runs: every release at the price of its time, and nothing ever cheaper."""

import pytest

from lit_fedad.core.errors import UserError
from lit_fedad.privacy.ledger import BudgetError, Ledger


def test_releases_of_one_noise_are_composed_and_all_else_adds_up(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", 8.0)
    assert ledger.total == (0, 0)
    for epsilon in (1.0, 2.5):  # what the run has spent with this noise in all
        ledger.spend("first", "strong", epsilon, 1e-5)
    ledger.spend("first", "weak", 0.5, 1e-5)
    ledger.spend("second", "strong", 3.5, 2e-5)
    again = Ledger(tmp_path / "ledger.jsonl", 8.0)  # the site was started anew
    assert again.total == (6.5, pytest.approx(4e-5))
    for run, left in (("first", 4.0), ("third", 1.5)):
        again.check(run, "strong", left)
        with pytest.raises(BudgetError) as found:
            again.check(run, "strong", left + 0.1)
        assert found.value.left == left


def test_nothing_that_is_asked_later_makes_it_cheaper(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", 8.0)
    ledger.spend("run", "strong", 7.9, 1e-5)
    ledger.spend("run", "strong", 0.2, 1e-5)  # a plan of less noise a release, under the same number
    assert ledger.total[0] == 7.9
    with pytest.raises(UserError, match="left of 8"):
        ledger.spend("run", "other", 0.2, 1e-5)


def test_more_than_the_budget_has_left_is_not_spent(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", 8.0)
    ledger.spend("first", "noise", 6.0, 1e-5)
    ledger.spend("second", "noise", 2.0, 1e-5)  # to the last digit
    with pytest.raises(UserError, match="epsilon 2 left of 8 after 1 other runs .* this one asks for 2.5"):
        ledger.spend("second", "noise", 2.5, 1e-5)
    assert ledger.total[0] == 8.0


@pytest.mark.parametrize("content", ["[]\n", "{\n", '{"run": 1}\n', '{"entry": 1, "before": "0"}\n'])
def test_a_damaged_file_is_no_empty_ledger(tmp_path, content):
    (tmp_path / "ledger.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"ledger.jsonl, line 1: .* restore it from a copy"):
        Ledger(tmp_path / "ledger.jsonl", 8.0).spend("run", "noise", 1.0, 1e-5)


@pytest.mark.parametrize("epsilon", [-1.0, "1", None, 1e400])
def test_what_a_whole_file_says_was_spent_is_a_number(tmp_path, epsilon):
    Ledger(tmp_path / "ledger.jsonl").log.append(run="run", noise="noise", epsilon=epsilon, delta=1e-5)
    with pytest.raises(UserError, match="ledger.jsonl: holds an epsilon or delta that is none"):
        Ledger(tmp_path / "ledger.jsonl", 8.0).spend("run", "noise", 1.0, 1e-5)
