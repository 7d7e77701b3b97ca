"""Metrics in several processes."""

import json

import pytest


@pytest.fixture
def in_two_processes(forking, tmp_path):
    """Runs a program, which knows its ``rank``, in two gloo processes; returns what each printed last, from JSON."""

    def run(program: str) -> list:
        logs = [tmp_path / f"{rank}.log" for rank in range(2)]
        pair = [
            forking.call("helpers.at_once:in_group", [program, str(tmp_path), rank], log)
            for rank, log in enumerate(logs)
        ]
        assert [forking.wait(process) for process in pair] == [0, 0], [log.read_text() for log in logs]
        return [json.loads(log.read_text().splitlines()[-1]) for log in logs]

    return run
