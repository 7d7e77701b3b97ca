"""Commands in processes of their own that need not import anything: forked from one that has, and has no threads.

Run as a program it reads one request a line: ``{"call": "module:function", "arguments": [...], "log": FILE}`` starts a
process and answers its id, ``{"wait": PID}`` answers its exit status.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class Forking:
    """Starts ``lit-fedad`` commands within milliseconds, on one thread each."""

    running: set[int]
    """Processes that were started and not waited for."""

    def __init__(self) -> None:
        self.running = set()
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, arguments: list[str], log: Path) -> int:
        """Starts a command, and returns its process id."""
        return self.call("lit_fedad.cli.main:main", [arguments], log)

    def call(self, function: str, arguments: list, log: Path) -> int:
        """Calls ``module:function`` in a process, whose exit status is what it returns, and returns its id."""
        process = self._ask({"call": function, "arguments": arguments, "log": str(log)})
        self.running.add(process)
        return process

    def wait(self, process: int) -> int:
        """Waits for a command's end, and returns its exit status; that of a signal is negative."""
        status = self._ask({"wait": process})
        self.running.discard(process)
        return status

    def close(self) -> None:
        self._server.communicate()

    def _ask(self, request: dict) -> int:
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def _play(function: str, arguments: list, log: str) -> None:
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # A shell starts what runs in its background deaf to it, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 1
    try:
        module, _, name = function.partition(":")
        status = getattr(importlib.import_module(module), name)(*arguments) or 0
    except KeyboardInterrupt:  # before the command began, or after it ended
        status = 130
    except Exception:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve() -> None:
    import lit_fedad.cli.main
    import lit_fedad.experiment.train  # noqa: F401  (imported once, for all commands)

    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])
        elif not (answer := os.fork()):
            _play(request["call"], request["arguments"], request["log"])
        print(answer, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # for functions of the tests
    _serve()
