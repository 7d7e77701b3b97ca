"""The page of a report: all that the model says, nothing that is loaded, no markup out of names."""

from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from lit_fedad.report.html import (
    Cell,
    Gallery,
    Grid,
    Line,
    Page,
    Picture,
    Prose,
    Section,
    markdown_table,
    render_html,
    render_markdown,
)
from lit_fedad.report.run_figures import lines_figure, sheet

HOSTILE = '<script>alert("x")</script> | `rm` [a](b) & *b*'
RUN = "http://127.0.0.1:5000/#/experiments/1/runs/abc"
PAGE = Page(
    f"Runs of {HOSTILE}",
    "One line.",
    [
        Section(
            "Runs",
            [
                Grid(
                    HOSTILE,
                    ["method", "I-AUROC"],
                    [
                        Line([Cell(HOSTILE, RUN), Cell("0.7125 ± 0.0100", RUN)]),
                        Line([Cell("seed 0"), Cell("0.7225", RUN)], part=True),
                    ],
                    [HOSTILE],
                )
            ],
        ),
        Section(
            "Over the rounds",
            [
                Prose(["Some words."]),
                Gallery([Picture(b"<svg/>", "svg", 'a "curve"', "caption", RUN)], "textures"),
            ],
        ),
    ],
)


class Outline(HTMLParser):
    """What a document holds: its tags with their attributes, whether they close, and its text."""

    VOID = {"meta", "img", "link", "br"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def outline():
    return Outline(render_html(PAGE))


def test_nothing_is_loaded_from_anywhere(outline):
    assert outline.of("script") == outline.of("link") == outline.of("iframe") == []
    assert [image["src"].partition(",")[0] for image in outline.of("img")] == ["data:image/svg+xml;base64"]
    assert "url(" not in render_html(PAGE)
    assert "@import" not in render_html(PAGE)


def test_names_are_text_and_nothing_else(outline):
    assert "".join(outline.text).count(HOSTILE) == 2 + 3  # title twice, heading, cell, note
    assert outline.of("img")[0]["alt"] == 'a "curve"'


def test_every_number_is_there_and_linked(outline):
    assert [a["href"] for a in outline.of("a")].count(RUN) == 4
    text = "".join(outline.text)
    assert "0.7125 ± 0.0100" in text
    assert "0.7225" in text


def test_contents_lead_to_the_sections(outline):
    targets = [a["href"][1:] for a in outline.of("a") if a["href"].startswith("#")]
    assert set(targets) == {section["id"] for section in outline.of("section")} == {"runs", "over-the-rounds"}


def test_it_suits_a_phone_paper_and_dark_screens():
    text = render_html(PAGE)
    assert 'name="viewport" content="width=device-width' in text
    for query in ("max-width: 700px", "print", "prefers-color-scheme: dark"):
        assert f"@media ({query})" in text or f"@media {query}" in text


def luminance(colour):
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def test_text_stands_out_from_its_ground():
    """WCAG AA asks for 4.5."""
    import re

    schemes = re.findall(r":root \{([^}]*)\}", render_html(PAGE))
    assert len(schemes) == 3  # light, dark, print
    for scheme in schemes:
        colours = dict(re.findall(r"--(\w+): (#\w{6});", scheme))
        for ground in ("ground", "band"):
            for text in ("text", "faint", "link"):
                pair = sorted((luminance(colours[text]), luminance(colours[ground])))
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (text, ground, colours)


def test_markdown_says_the_same():
    text, files = render_markdown(PAGE, "pictures")
    assert files == {"over-the-rounds-1.svg": b"<svg/>"}
    lines = text.splitlines()
    at = lines.index("| method | I-AUROC | ")
    assert lines[at + 1] == "|---|---:|"
    assert lines[at + 2].endswith(f"[0.7125 ± 0.0100]({RUN}) | ")
    assert lines[at + 3] == f"| seed 0 | [0.7225]({RUN}) | "
    assert '![a "curve"](pictures/over-the-rounds-1.svg)' in lines
    assert "<script>" not in text.replace(r"\<script\>", "")


def test_a_link_in_markdown_survives_any_address():
    page = Page("a", "b", [Section("c", [Grid("", ["d"], [Line([Cell("e", 'x(y) "z"')])])])])
    assert "[e](x%28y%29%20%22z%22)" in render_markdown(page, "p")[0]


def test_long_names_of_runs_stand_within_the_picture():
    others = "federation.robust.banks=BankSupport, federation.robust.statistics=StatisticsCheck and 16 more)"
    names = [f"federated_bank (evaluation.alpha=0.{digit}, {others}" for digit in (1, 2)]
    figure = lines_figure({name: [[(1, 0.5), (2, 0.6)]] for name in names}, "x", "y", whole=True)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_window_extent().width > 0.3 * figure.bbox.width
    texts = [*axes.get_yticklabels(), *(text for legend in figure.legends for text in legend.get_texts())]
    assert all(0 <= box.x0 < box.x1 <= figure.bbox.x1 for box in (text.get_window_extent() for text in texts))


def test_a_sheet_is_no_wider_than_a_page(tmp_path):
    Image.fromarray(np.zeros((30, 2000, 3), np.uint8)).save(tmp_path / "wide.png")
    (tmp_path / "small.webp").write_bytes(sheet(tmp_path / "wide.png"))
    with Image.open(tmp_path / "small.webp") as image:
        assert (image.format, image.size) == ("WEBP", (1000, 15))


def test_lines_are_of_one_width():
    text = markdown_table(["a", "b"], [["±", ""], ["longer", "x"]])
    assert text.splitlines() == ["| a      | b |", "|--------|---|", "| ±      |   |", "| longer | x |"]


def test_a_row_has_a_cell_for_each_heading():
    with pytest.raises(ValueError, match="longer"):
        markdown_table(["a"], [["1", "2"]])
