"""Probes and proxies may ask with HEAD whether a page of the server is there."""

import http.client

import pytest
from helpers.tiny_detector import tiny_detector

pytest.importorskip("fastapi")
pytest.importorskip("onnxruntime")
from helpers.serving import served

from lit_fedad.deployment.served_detector import ServedDetector
from lit_fedad.deployment.serving import Desk
from lit_fedad.deployment.uploads import Limits


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    detector = ServedDetector(tiny_detector(tmp_path_factory.mktemp("tiny")), threads=1)
    with served(Desk(detector, Limits(), workers=1, queue=4)) as port:
        yield port


@pytest.mark.parametrize("page", ["/", "/docs", "/health"])
def test_head_answers_as_get_does_without_a_body(port, page):
    answers = []
    for method in ("GET", "HEAD"):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(method, page)
        answer = connection.getresponse()
        answers.append((answer.status, answer.headers["content-type"], answer.headers["content-length"]))
        assert bool(answer.read()) == (method == "GET")
    assert answers[0] == answers[1]
    assert answers[0][0] == 200
