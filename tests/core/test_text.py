import pytest

from lit_fedad.core.text import csv_cell, printable, redact, redacted, without_user

WORD = "s3cr/t@x"


@pytest.mark.parametrize(
    "address",
    [
        f"http://me:{WORD}@host:5000/api",
        f"https://{'token' + WORD.replace('/', '')}@host/",
        f"postgresql+psycopg://me:{WORD}@host/db",
        f"postgresql:me:{WORD}@host/db",
        f"postgresql:/me:{WORD}@host/db",
        f"me:{WORD}@host",
        f"postgresql://host/db?user=me&password={WORD}",
        f"storage=mysql:me:{WORD}@host",
    ],
)
def test_user_and_password_of_an_address_are_hidden_however_it_is_written(address):
    hidden = redact(f"cannot open {address}: refused")
    assert "s3cr" not in hidden
    assert "t@x" not in hidden
    assert "host" in hidden
    assert hidden.startswith("cannot open ")
    assert hidden.endswith(": refused")
    assert redact(hidden) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////tmp/a@b/mlflow.db",
        "http://127.0.0.1:5000/#/experiments/1",
        "https://github.com/org/repo@v1",
        "/data/me@host/000.png: no such file",
        "round 3, client 1: 12 images",
        "MLFLOW_TRACKING_URI=databricks",
    ],
)
def test_text_without_a_password_is_left_alone(text):
    assert redact(text) == text


def test_a_password_is_hidden_where_a_library_took_its_address_apart():
    assert "word" not in redact("bad port 'word@host'", "postgresql:me:word@host")
    assert "a b!" not in redact("login a b! failed", "http://me:a%20b!@host")
    assert redact("a host", "http://me:a@host") == "a host"


def test_a_stored_address_can_be_used_without_its_user():
    assert without_user(f"postgresql://me:{WORD}@host/db") == "postgresql://host/db"


def test_every_text_of_a_configuration_is_redacted():
    config = {"tracking": {"uri": "http://me:word@host"}, "list": ["http://me:word@host", 1, None]}
    assert redacted(config) == {"tracking": {"uri": "http://***@host"}, "list": ["http://***@host", 1, None]}


def test_what_a_terminal_would_obey_is_written_as_an_escape():
    assert printable("a\x1b]0;title\x07\x9b2J\n\udcff\u202e.png") == (
        r"a\x1b]0;title\x07\x9b2J\n\udcff\u202e.png"
    )
    assert printable("Größe 1, naïve 画像.png") == "Größe 1, naïve 画像.png"


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"), ("+1.png", "'+1.png"), ("-a", "'-a"), ("@SUM(A1)", "'@SUM(A1)"), ("\r=1", "'\r=1"),
        ("\uff1d1", "'\uff1d1"), ("a;=1;b", "a;'=1;b"), ("a\t@b", "a\t'@b"), ("\t=1", "'\t'=1"),
    ],
)  # fmt: skip
def test_formulas_are_quoted_wherever_a_spreadsheet_begins_a_cell(text, cell):
    assert csv_cell(text) == cell


@pytest.mark.parametrize("value", ["-1.5", "+1", "a=b", "", -1.5, None])
def test_numbers_and_other_cells_stay(value):
    assert csv_cell(value) == value
