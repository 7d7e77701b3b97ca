import io
import math
import re
import sys

import pytest

from lit_fedad.report import console
from lit_fedad.report.console import Display

NAN = math.nan
METRICS = {"I-AUROC": 0.849, "P-AUROC": 0.911, "PRO": 0.77}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*3[0-7]m")


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def terminal(monkeypatch):
    """Make standard output and error look like a terminal of so many columns."""

    def pretend(columns):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", str(columns))

    return pretend


@pytest.fixture
def out(capsys):
    """Lines on standard output since the last call, without escape codes."""
    return lambda: ESCAPE.sub("", capsys.readouterr().out).splitlines()


def one_round(display, number=3, rounds=6, loss=0.0123, metrics=METRICS, up=2_290_000, seconds=1.84, **rest):
    rest = {"eta_s": 12.2, "name": "train"} | rest
    display.round_line(number, rounds, loss, metrics, up, 2_290_000, seconds, **rest)


def test_a_round_is_one_line(out):
    one_round(Display())
    assert out() == [
        "round  3/6  loss 0.0123  I-AUROC 0.849  P-AUROC 0.911  PRO 0.770"
        "  up 2.29 MB  down 2.29 MB  1.8 s  left 0:12"
    ]


def test_rounds_are_aligned_whatever_their_values(out):
    display = Display()
    one_round(display, number=9, rounds=10, eta_s=754)
    one_round(display, number=10, rounds=10, loss=12.3456, eta_s=7)
    one_round(display, number=10, rounds=10, loss=1.2e-7, metrics=dict.fromkeys(METRICS, NAN))
    one_round(display, number=10, rounds=10, loss=None, metrics={})
    lines = out()
    for word in ("loss", "up", "down", "left"):
        assert len({line.index(word) for line in lines}) == 1, word
    assert len({line.index("PRO") for line in lines[:3]}) == 1
    assert len({len(line) for line in lines}) == 1


def test_undefined_values_are_a_dash(out):
    one_round(Display(), loss=NAN, metrics={"I-AUROC": 0.5, "PRO": NAN})
    (line,) = out()
    assert re.search(r"loss +-  I-AUROC 0\.500  PRO +-  up", line)
    assert "nan" not in line


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (0.0, "0.0000"),
        (-0.5, "-0.5000"),
        (9.87654, "9.8765"),
        (123.456, "123.5"),
        (1e-5, "1e-05"),
        (2e7, "2e+07"),
    ],
)
def test_a_loss_of_any_size_is_short(out, loss, text):
    one_round(Display(), loss=loss)
    assert out()[0].split("  I-AUROC")[0].endswith(f" {text}")


def test_set_up_exchanges_are_named(out):
    display = Display()
    one_round(display, number=-1, name="statistics")
    one_round(display, number=0, name="k-means")
    one_round(display, number=1, name="train")
    labels = [line.split("  loss")[0].rstrip() for line in out()]
    assert labels == ["set-up statistics", "set-up k-means", "round  1/6"]


def test_a_round_without_evaluation_keeps_the_place_of_the_metrics(out):
    display = Display()
    one_round(display)
    one_round(display, metrics={})
    full, blank = out()
    assert blank.index("up") == full.index("up")
    assert not any(name in blank for name in METRICS)


def test_without_an_estimate_nothing_is_said_of_the_time_left(out):
    one_round(Display(), eta_s=None)
    assert out()[0].endswith("1.8 s")


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        (108, ["I-AUROC", "P-AUROC", "PRO", "up", "down", "s", "left"]),
        (107, ["I-AUROC", "P-AUROC", "PRO", "up", "down", "left"]),
        (100, ["I-AUROC", "P-AUROC", "PRO", "up", "s", "left"]),
        (87, ["I-AUROC", "P-AUROC", "PRO", "up", "left"]),
        (81, ["I-AUROC", "P-AUROC", "PRO", "left"]),
        (70, ["I-AUROC", "P-AUROC", "PRO"]),
        (58, ["I-AUROC", "P-AUROC"]),
        (40, ["I-AUROC"]),
    ],
)
def test_what_does_not_fit_is_left_out_the_lesser_first(out, terminal, columns, kept):
    terminal(columns)
    one_round(Display())
    (line,) = out()
    assert re.findall(r"[A-Za-z][A-Za-z-]*", line.replace("MB", "")) == ["round", "loss", *kept]
    assert len(line) <= columns


def test_no_line_is_wider_than_120_columns(out, terminal):
    for columns in (None, 300):
        if columns:
            terminal(columns)
        metrics = METRICS | {f"metric {number}": 0.5 for number in range(9)}
        one_round(Display(), rounds=1000, metrics=metrics, up=22_480_000, seconds=3700, eta_s=90_000)
        assert all(60 < len(line) <= 120 for line in out())


def test_the_header_shows_each_pair_unchanged(out):
    path = "/a/" + "long/" * 40
    Display().header({"method": "FedDyMem", "backbone": f"[resnet18] :smile: {path}"})
    assert out() == ["method    FedDyMem", f"backbone  [resnet18] :smile: {path}", ""]


def result(**changes):
    def stage(number, shift):
        return {
            "round": number,
            "i_auroc": {
                "mean": 0.8 + shift,
                "worst": 0.6 + shift,
                "pooled": 0.75 + shift,
                "per_client": {0: 0.8},
            },
            "pro": {"mean": NAN, "worst": None, "per_client": {}},
        }

    base = {"first": stage(0, 0.0), "last": stage(6, 0.05), "best": stage(4, 0.1)}
    return (
        base
        | {"bytes_up": [13_000_000, 700_000], "bytes_down": [512], "seconds_per_round": [75, 0.2]}
        | changes
    )


def test_the_closing_table_shows_the_last_round_and_the_traffic(out):
    Display().closing_table(result())
    _, head, image, traffic = out()
    assert re.split(r" {2,}", head.strip()) == ["last round", "together", "worst client", "what it tells"]
    assert image.split()[:3] == ["I-AUROC", "0.850", "0.650"]
    assert traffic == "clients sent 13.70 MB and received 512 B in 1:15 without evaluation"
    Display().closing_table(result(bytes_down=[0]))
    assert out()[-1] == "clients sent 13.70 MB in 1:15 without evaluation"


def test_a_table_without_rows_is_nothing(out):
    Display().table([])
    assert out() == []


def test_the_mean_over_products_is_a_column_and_those_without_a_value_are_named_once(out, terminal):
    terminal(80)
    own = {"nut": 0.5, "bolt": NAN, "cap": None, "ring": 0.75}
    values = {"mean": 0.8, "worst": 0.6, "pooled": 0.7, "per_product": own, "product_mean": 0.625}
    Display().metrics_table({"i_auroc": values, "pro": values})
    lines = out()
    assert lines[1].split() == ["I-AUROC", "0.800", "0.600", "0.700", "0.625"]
    assert [line for line in lines if "bolt" in line] == [
        "Left out of I-AUROC's mean over products (it needs normal and anomalous test images of each): bolt, cap."
    ]


def test_a_loss_has_no_column_before_something_is_trained(out):
    display = Display()
    one_round(display, number=-1, loss=None, name="moments")
    one_round(display, number=1)
    first, second = out()
    assert first.startswith("set-up moments")
    assert "loss" not in first
    assert "loss 0.0123" in second


def test_commands_and_paths_can_be_copied(out, terminal):
    terminal(40)
    command = "mlflow ui --backend-store-uri sqlite:///" + "folder/" * 30 + "mlflow.db"
    Display().where_next([("curves", command), ("again", "lit-fedad train data.root=[x] :tada:")])
    assert out() == ["", f"curves  {command}", "again   lit-fedad train data.root=[x] :tada:"]


def test_a_note_is_one_line_of_plain_text(out):
    Display().note("3 of 5 images [new]\nare " + "very " * 40)
    assert out() == ["3 of 5 images [new] are " + "very " * 40]


def test_metrics_have_their_usual_names(out):
    one_round(Display(), metrics={"i_auroc": 0.5, "pro": 0.25, "other": 1.0})
    assert "  I-AUROC 0.500  PRO 0.250  other 1.000  " in out()[0]


def test_warnings_and_errors_are_one_line_each_on_standard_error(capsys):
    display = Display()
    display.warn("client 3 [bold]failed[/bold]\nand was " + "skipped " * 30)
    display.error("data.root: no such folder" + 5000 * "!")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "warning: client 3 [bold]failed[/bold] and was " + "skipped " * 30,
        "error: data.root: no such folder" + 1975 * "!" + "...",
    ]


@pytest.mark.parametrize(("tty", "no_color", "coloured"), [(1, "", 1), (1, "1", 0), (0, "", 0)])
def test_colours_are_for_terminals_that_want_them(capsys, monkeypatch, terminal, tty, no_color, coloured):
    if tty:
        terminal(100)
    monkeypatch.setenv("NO_COLOR", no_color)
    display = Display()
    display.warn("x")
    display.error("y")
    one_round(display)
    captured = capsys.readouterr()
    assert bool(COLOUR.search(captured.err)) == coloured
    assert bool(ESCAPE.search(captured.out)) == tty


@pytest.mark.parametrize("tty", [False, True])
def test_quiet_prints_warnings_and_errors_only(capsys, terminal, tty):
    if tty:
        terminal(100)
    display = Display(quiet=True)
    display.header({"method": "x"})
    display.note("n")
    with display.progress("reading") as show:
        show(1, 2)
        print("kept", file=sys.stderr)  # noqa: T201
    one_round(display)
    display.closing_table(result())
    display.where_next([("a", "b")])
    display.warn("w")
    display.error("e")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ESCAPE.sub("", captured.err).splitlines() == ["kept", "warning: w", "error: e"]


def test_outside_a_terminal_progress_is_a_line_every_15_seconds(out, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(console, "monotonic", lambda: clock[0])
    with Display().progress("features [train]") as show:
        for done in range(41):  # one second each
            show(done, 60)
            clock[0] += 1
    assert out() == [
        "features [train] ...",
        "features [train]  15/60  left 0:45",
        "features [train]  30/60  left 0:30",
    ]


def test_a_step_that_is_mostly_short_is_told_of_only_where_it_is_long(out, monkeypatch):
    now = iter([100.0, 101.0, 116.0])
    monkeypatch.setattr(console, "monotonic", lambda: next(now))
    with Display().progress("hashes", announced=False) as show:
        show(1, 16)
        assert out() == []
        show(8, 16)
    assert out() == ["hashes  8/16  left 0:16"]


def test_progress_that_stands_still_is_no_error(out, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(console, "monotonic", lambda: clock[0])
    with Display().progress("waiting") as show:
        clock[0] = 20.0
        show(0, 5)
    assert out() == ["waiting ...", "waiting  0/5"]


def test_on_a_terminal_progress_is_a_bar_with_times_that_vanishes(capsys, terminal):
    terminal(80)
    display = Display()
    with display.progress("features [train]") as show:
        for done in (5, 20):
            show(done, 20)
    text = capsys.readouterr().out
    assert "\x1b[2K" in text  # lines are erased
    shown = ESCAPE.sub("", text)
    assert re.search(r"features \[train\] .*20/20 \d+:\d\d:\d\d left", shown)
    assert shown.rstrip("\r\n").splitlines()[-1].startswith("features")


def test_an_error_passes_through_progress(terminal):
    for pretend in (lambda: None, lambda: terminal(80)):
        pretend()
        with pytest.raises(KeyError), Display().progress("reading"):
            raise KeyError


def test_a_warning_during_a_live_bar_gets_a_line_of_its_own(monkeypatch):
    """Whichever display it comes from: the tracker's warnings come from another one."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with Display().progress("Scoring") as progress:
        progress(1, 2)
        Display().warn("it broke")
    (line,) = [line for line in re.split(r"[\r\n]+", screen.getvalue()) if "it broke" in line]
    assert re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).strip() == "warning: it broke"


def test_neither_passwords_nor_control_characters_reach_the_terminal(capsys):
    display, text = Display(), "a\x1b]0;x\x07 http://me:word@host \udcff\nb"
    display.note(text)
    display.warn(text)
    display.error(text)
    display.header({"files": text})
    display.where_next([("files", text)])
    display.table([{"file": text}])
    with display.progress(text):
        pass
    captured = capsys.readouterr()
    shown = captured.out + captured.err
    assert shown.count(r"a\x1b]0;x\x07 http://***@host \udcff b") == 7
    assert "\x1b" not in shown
    assert "word" not in shown
