"""A database to track into, servers that fail, and what a journal and the database hold."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import mlflow
import pytest


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    """A folder to work in, whose database is migrated once: that takes seconds."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(autouse=True)
def working_directory(database, monkeypatch):
    monkeypatch.chdir(database)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    # The sender sets what is unset; undone after each test.
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture
def client(database):
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{database}/mlflow.db")


@pytest.fixture
def hanging_server(monkeypatch):
    """Accepts every connection and never answers; requests to it end after ten minutes only."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    accepted.append(server.accept()[0])

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        for connection in accepted:
            connection.close()


@pytest.fixture
def failing_server():
    """Answers every request with 500."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(500)

        def do_POST(self):
            self.do_GET()

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def journal():
    """Reads the records of a run's journal."""

    def read(folder):
        return [json.loads(line) for line in (folder / "tracking/journal.jsonl").read_text().splitlines()]

    return read


@pytest.fixture
def history(client):
    """Reads the steps and values of one metric of a run."""

    def read(run_id, name):
        return [(point.step, point.value) for point in client.get_metric_history(run_id, name)]

    return read


@pytest.fixture
def start_python():
    """Starts code in a fresh interpreter."""

    def start(code, *arguments, **environment):
        return subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
