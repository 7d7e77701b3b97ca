"""A worker that joins a study as the command does, with trials of a test's own."""

from unittest import mock

from lit_fedad.core.options import bind
from lit_fedad.sweep import command


def sweep(words, display, play):
    """Joins a study; each trial is played by ``play``."""
    with mock.patch.object(command, "play_trial", lambda *given, tracking: play(*given)):
        bind(command.sweep, words, "sweep", display=display)()
