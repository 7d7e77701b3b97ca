"""Workers that join a study as the command does, with trials of a test's own."""

import os
import time
from unittest import mock

from lit_fedad.core.options import bind
from lit_fedad.report.console import Display
from lit_fedad.sweep import command
from lit_fedad.sweep.trial import GivenBackError


def sweep(words, display, play):
    """Joins a study; each trial is played by ``play``."""
    with mock.patch.object(command, "play_trial", lambda *given, tracking: play(*given)):
        bind(command.sweep, words, "sweep", display=display)()


def work(words, play):
    """Joins a study in a process of its own; each trial is played by the function of this file that ``play`` names."""
    sweep(words, Display(quiet=True), globals()[play])


def neighbours(trial, plan, folder, leaving):
    """A trial that is over at once."""
    folder.mkdir(parents=True, exist_ok=True)
    return [float(trial.params["task.loss.neighbours"])]


def steps(trial, plan, folder, leaving):
    """A trial that counts to five in its folder; a study's first one waits at two, to be killed or asked to leave."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "steps.txt"
    first = trial.number == 0
    for step in range(len(log.read_text().split()) if log.exists() else 0, 5):
        trial.set_user_attr("round", step)
        with log.open("a") as file:
            file.write(f"{step}\n")
        while first and step == 1 and not leaving():
            time.sleep(0.01)
        if leaving():
            raise GivenBackError(f"step {step}")
    return neighbours(trial, plan, folder, leaving)


def long_steps(trial, plan, folder, leaving):
    """A trial that counts to five in its folder, and goes on from where it finds itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "player.txt").write_text(str(os.getpid()))
    log = folder / "steps.txt"
    for step in range(len(log.read_text().split()) if log.exists() else 0, 5):
        trial.set_user_attr("round", step)
        trial.report(float(step), step)
        time.sleep(0.5)  # long enough to be stopped within
        with log.open("a") as file:
            file.write(f"{step}\n")
    return neighbours(trial, plan, folder, leaving)
