"""Commands in processes of their own that need not import anything: forked from one that has.

Run as a program it reads one request a line: ``{"run": [...], "log": FILE}`` starts a command and answers its process
id, ``{"wait": PID}`` answers its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


class Forking:
    """Starts ``lit-fedad`` commands within milliseconds, on one thread each."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, arguments: list[str], log: Path) -> int:
        """Starts a command, and returns its process id."""
        return self._ask({"run": arguments, "log": str(log)})

    def wait(self, process: int) -> int:
        """Waits for a command's end, and returns its exit status; that of a signal is negative."""
        return self._ask({"wait": process})

    def close(self) -> None:
        self._server.communicate()

    def _ask(self, request: dict) -> int:
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())


def _play(arguments: list[str], log: str) -> None:
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # A shell starts what runs in its background deaf to it, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from lit_fedad.cli.main import main

    status = 1
    try:
        status = main(arguments)
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
            _play(request["run"], request["log"])
        print(answer, flush=True)  # noqa: T201


if __name__ == "__main__":
    _serve()
