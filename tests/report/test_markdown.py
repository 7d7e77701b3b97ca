import pytest

from lit_fedad.report.html import markdown_table


def test_lines_are_of_one_width():
    text = markdown_table(["a", "b"], [["±", ""], ["longer", "x"]])
    assert text.splitlines() == ["| a      | b |", "|--------|---|", "| ±      |   |", "| longer | x |"]


def test_a_row_has_a_cell_for_each_heading():
    with pytest.raises(ValueError, match="longer"):
        markdown_table(["a"], [["1", "2"]])
