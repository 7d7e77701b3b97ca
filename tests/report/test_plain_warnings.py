"""Warnings and log records, each printed as one line."""

import importlib
import logging
import warnings

import pytest

from lit_fedad.report.console import Display
from lit_fedad.report.plain_warnings import plain_warnings


def test_only_the_librarys_own_warnings_are_shown_each_as_one_line(capsys):
    backbones = importlib.import_module("lit_fedad.models.backbones")
    with plain_warnings(Display()):
        warnings.warn("from a test, outside the package", stacklevel=1)
        backbones.create_backbone("test_resnet", layers=(1,), weights="random")  # attributed to this file
        warnings.warn_explicit("two\nlines", UserWarning, backbones.__file__, 1)
        logging.getLogger("lit_fedad.tracking.sender").warning("kept for %s", "later")
        logging.getLogger("lit_fedad.tracking.sender").info("chatter")
        logging.getLogger("timm.models").warning("chatter")
        logging.getLogger("some.library").error("disk is full")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "warning: two lines",
        "warning: kept for later",
        "warning: disk is full",
    ]


def test_a_logged_warning_of_a_run_within_a_command_is_one_line(capsys):
    with plain_warnings(Display()):
        for _ in range(2):  # the command's own block is whole again after each run
            with plain_warnings(Display()):
                logging.getLogger("lit_fedad.tracking.sender").warning("kept")
        logging.getLogger("lit_fedad.tracking.sender").warning("sent")
    assert capsys.readouterr().err.splitlines() == ["warning: kept", "warning: kept", "warning: sent"]


def test_hooks_are_taken_back():
    before = warnings.showwarning, list(logging.root.handlers), logging.root.manager.disable
    with pytest.raises(KeyError), plain_warnings(Display(quiet=True)):
        raise KeyError
    assert (warnings.showwarning, logging.root.handlers, logging.root.manager.disable) == before
