"""A detector behind HTTP on loopback: what it answers, and what it refuses."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import socket
import struct
import threading
import time
import zlib
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.images import pillow
from helpers.tiny_detector import SIDE, THRESHOLD, tiny_detector
from PIL import Image

from lit_fedad.cli import main as cli
from lit_fedad.core.errors import UserError

pytest.importorskip("fastapi")
pytest.importorskip("onnxruntime")
from helpers.serving import served

from lit_fedad.deployment.served_detector import ServedDetector
from lit_fedad.deployment.serving import Desk, Logged, application
from lit_fedad.deployment.ui.command import trial
from lit_fedad.deployment.uploads import Limits, RefusedError, read_upload
from lit_fedad.report.overlay import overlay

LIMITS = Limits(max_bytes=20_000, max_pixels=10_000, patience=1.0)
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def png(pixels=PIXELS, form="PNG"):
    return pillow(pixels, form)


def claiming(width, height):
    """A PNG whose header claims a size, whatever it holds."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    whole = png()
    return whole[:12] + chunk + struct.pack(">I", zlib.crc32(chunk)) + whole[33:]


@pytest.fixture(scope="module")
def detector(tmp_path_factory):
    return ServedDetector(tiny_detector(tmp_path_factory.mktemp("tiny")), threads=1)


@pytest.fixture(scope="module")
def ask(detector):
    """Sends one request; returns status, headers and body."""
    with served(Desk(detector, LIMITS, workers=1, queue=4)) as port:

        def send(method, path, body=None, **headers):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

        yield send


def refusal(answer):
    """Status and the one line of a refused request."""
    status, headers, body = answer
    words = json.loads(body)
    assert headers["content-type"] == "application/json"
    assert list(words) == ["error"]
    assert "\n" not in words["error"]
    return status, words["error"]


def resized():
    image = Image.fromarray(PIXELS).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    return np.asarray(image)


def test_an_image_is_scored(ask):
    status, _, body = ask("POST", "/score", png(), Content_Type="image/png")
    score = resized().mean() / 255
    words = json.loads(body)
    assert status == 200
    assert words["score"] == pytest.approx(score, rel=1e-5)
    assert float(f"{words['p_value']:.6g}") == words["p_value"] == pytest.approx(1 - score, rel=1e-5)
    assert words["decision"] == ("anomalous" if score > THRESHOLD else "normal")
    assert (words["threshold"], words["alpha"]) == (THRESHOLD, 0.01)
    light = ask("POST", "/score", png(np.full_like(PIXELS, 200)), Content_Type="image/png")
    assert json.loads(light[2])["decision"] == "anomalous"


def test_the_heatmap_is_the_overlay_of_the_map(ask):
    status, headers, body = ask("POST", "/heatmap", png(), Content_Type="image/png")
    assert (status, headers["content-type"]) == (200, "image/png")
    words = json.loads(ask("POST", "/score?heatmap=true", png(), Content_Type="image/png")[2])
    anomaly_map = resized().mean(2) / 255
    # The map's highest value has the colour of the image's score, which ends at twice the threshold.
    unit = anomaly_map.max() / min(words["score"], 2 * THRESHOLD)
    expected = overlay(resized(), anomaly_map, unit * THRESHOLD / 2, unit * 2 * THRESHOLD)
    np.testing.assert_allclose(np.asarray(Image.open(BytesIO(body))).astype(int), expected, atol=1)
    assert base64.b64decode(words["heatmap"]) == body


def test_health_names_the_detector_and_counts(ask):
    before = json.loads(ask("GET", "/health")[2])
    assert (before["status"], before["detector"]) == ("ok", "tiny")
    ask("POST", "/score", png(), Content_Type="image/png")
    ask("POST", "/score", b"", Content_Type="image/png")
    after = json.loads(ask("GET", "/health")[2])
    assert [after[k] - before[k] for k in ("scored", "refused", "present")] == [1, 1, 0]


def test_bad_uploads_are_one_line_of_json(ask):
    assert refusal(ask("POST", "/score", b"<html>", Content_Type="image/png"))[0] == 415
    assert refusal(ask("POST", "/score", png(form="GIF"), Content_Type="image/png"))[0] == 415
    assert refusal(ask("POST", "/score", png()[:-40], Content_Type="image/png"))[0] == 422
    large = ask("POST", "/score", claiming(2_000, 1_000), Content_Type="image/png")
    assert refusal(large) == (413, "2000x1000 pixels, and at most 10000 are read")
    bomb = ask("POST", "/score", claiming(60_000, 60_000), Content_Type="image/png")
    assert refusal(bomb) == (413, "far more pixels than the 10000 that are read")
    assert refusal(ask("POST", "/score", bytes(20_001), Content_Type="image/png")) == (
        413,
        "the upload is larger than 20000 bytes",
    )
    # Without a length: the body is counted as it comes.
    chunks = ask("POST", "/score", iter([bytes(15_000), bytes(15_000)]), Content_Type="image/png")
    assert refusal(chunks)[0] == 413
    assert refusal(ask("GET", "/score"))[0] == 405
    assert refusal(ask("POST", "/else", b""))[0] == 404
    assert refusal(ask("POST", "/score?heatmap=perhaps", png(), Content_Type="image/png"))[0] == 422
    assert ask("POST", "/score", png(), Content_Type="image/png")[0] == 200


def test_a_narrow_image_that_its_crop_would_make_huge_is_refused(ask, detector, monkeypatch):
    crop = replace(detector._transform, fit="crop")
    monkeypatch.setattr(detector, "_transform", crop)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)
    status, line = refusal(ask("POST", "/score", png(PIXELS[:1].repeat(20, 1)), Content_Type="image/png"))
    assert status == 422
    assert "600x1 pixels are too narrow for image.fit=crop" in line


@pytest.mark.parametrize("form", ["PNG", "JPEG", "BMP"])
@pytest.mark.parametrize("named", ["image/png", "application/x-www-form-urlencoded", None])
def test_the_format_is_read_from_the_first_bytes(ask, form, named):
    given = {"Content_Type": named} if named else {}
    assert ask("POST", "/score", png(form=form), **given)[0] == 200


def test_a_form_is_scored_by_its_file(ask):
    """The body that ``curl -F note=a -F file=@x.png`` sends."""
    head = 'Content-Disposition: form-data; name="note"\r\n\r\na'
    file = 'Content-Disposition: form-data; name="file"; filename="x.png"\r\nContent-Type: image/png\r\n\r\n'
    note, end = f"--abc\r\n{head}\r\n--abc\r\n".encode(), b"\r\n--abc--\r\n"
    typed = "multipart/form-data; boundary=abc"
    found = ask("POST", "/score", note + file.encode() + png() + end, Content_Type=typed)
    assert json.loads(found[2]) == json.loads(ask("POST", "/score", png())[2])
    assert refusal(ask("POST", "/score", note[:-9] + end, Content_Type=typed))[0] == 422


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_the_page_loads_nothing_from_elsewhere(ask, path):
    status, headers, body = ask("GET", path)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"//" not in body.replace(b"// without heatmaps", b"")


@pytest.mark.parametrize("page", ["/", "/docs", "/health"])
def test_head_answers_as_get_does_without_a_body(ask, page):
    """Probes and proxies may ask with HEAD whether a page is there."""
    answers = [ask(method, page) for method in ("GET", "HEAD")]
    get, head = ([named[key] for key in ("content-type", "content-length")] for _, named, _ in answers)
    assert get == head
    assert [(status, bool(body)) for status, _, body in answers] == [(200, True), (200, False)]


def test_a_request_is_a_line(detector):
    import anyio

    display = SimpleNamespace(note=(lines := []).append)

    async def receive():
        return {"type": "http.request", "body": b""}

    async def send(message):
        pass

    for path in ("/health", f"/{'a' * 60_000}"):
        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        anyio.run(Logged(application(Desk(detector, LIMITS, 1, 1)), display), scope, receive, send)
    said = r"\d\d:\d\d:\d\d  GET /health  200  \d+ ms\n.{8}  GET /a{99}  404  \d+ ms"
    assert re.fullmatch(said, "\n".join(lines))


def test_sixteen_bits_and_transparency_are_read_as_in_training():
    assert np.asarray(read_upload(png(np.full((4, 4), 65535, np.uint16)), 100)).min() == 255
    with pytest.raises(RefusedError, match="float or 32-bit"):
        read_upload(png(np.ones((4, 4), np.float32), "TIFF"), 100)
    half = png(np.full((4, 4, 4), (0, 0, 0, 102), np.uint8))
    assert np.asarray(read_upload(half, 100)).min() == 153
    with pytest.raises(RefusedError, match="transparent"):
        read_upload(png(np.zeros((4, 4, 4), np.uint8)), 100)


def test_requests_beyond_the_queue_are_told_to_try_again(detector):
    entered, go = threading.Event(), threading.Event()

    class Slow:
        sheet, localises, page, heatmap = detector.sheet, True, None, detector.heatmap

        def __call__(self, image):
            entered.set()
            assert go.wait(60)
            return detector(image)

    desk = Desk(Slow(), LIMITS, workers=1, queue=1)
    with served(desk) as port:
        statuses = []

        def post():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("POST", "/score", png(), {"Content-Type": "image/png"})
            answer = connection.getresponse()
            statuses.append((answer.status, answer.getheader("retry-after")))

        threads = [threading.Thread(target=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert entered.wait(60)
        while desk.present < 2:
            time.sleep(0.01)
        post()
        assert statuses == [(503, "1")]
        go.set()
        for thread in threads:
            thread.join()
        assert statuses[1:] == [(200, None)] * 2
        post()
        assert statuses[-1][0] == 200


def test_an_upload_that_does_not_arrive_loses_its_place(detector):
    desk = Desk(detector, Limits(patience=0.2), workers=1, queue=0)
    with served(desk) as port, socket.create_connection(("127.0.0.1", port), 60) as idle:
        idle.sendall(
            b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Type: image/png\r\nContent-Length: 99\r\n\r\nab"
        )
        answer = idle.recv(4096).decode()
        assert answer.startswith("HTTP/1.1 408 ")
        assert desk.present == 0


def test_files_are_checked_before_they_are_used(tmp_path):
    folder = tiny_detector(tmp_path / "a")
    content = (folder / "detector.onnx").read_bytes()
    (folder / "detector.onnx").write_bytes(content + b"x")
    with pytest.raises(UserError, match=r"detector\.onnx: changed since it was exported"):
        ServedDetector(folder)
    (folder / "detector.onnx").unlink()
    with pytest.raises(UserError, match=r"detector\.onnx: cannot be read"):
        ServedDetector(folder)
    folder = tiny_detector(tmp_path / "b")
    sheet = json.loads((folder / "detector.json").read_text())
    for damage in (
        {**sheet, "format": 99},
        {**sheet, "threshold": "high"},
        {**sheet, "more": 1},
        {**sheet, "colour": 10**400},
        {**sheet, "alpha": float("nan")},
        {**sheet, "sha256": {}},
        [],
    ):
        (folder / "detector.json").write_text(json.dumps(damage))
        with pytest.raises(UserError, match="export the detector again") as caught:
            ServedDetector(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("preprocessing.json", {"size": 1 << 62}, r"preprocessing.json: cannot be read \(image.size"),
        ("preprocessing.json", {"fit": "x" * 100_000}, r"preprocessing.json: cannot be read \(image.fit"),
        (
            "preprocessing.json",
            {"size": 2 * SIDE},
            "detector.onnx: does not score an image as the files beside it",
        ),
        ("detector.json", {"classes": ["a"], "colour": None}, "detector.onnx: is no detector"),
    ],
)
def test_files_that_do_not_fit_each_other_are_refused_before_anybody_asks(tmp_path, name, change, message):
    folder = tiny_detector(tmp_path)
    changed = {**json.loads((folder / name).read_text()), **change}
    (folder / name).write_text(json.dumps(changed))
    sheet = json.loads((folder / "detector.json").read_text())
    sheet["sha256"]["preprocessing.json"] = hashlib.sha256(
        (folder / "preprocessing.json").read_bytes()
    ).hexdigest()
    (folder / "detector.json").write_text(json.dumps(sheet))
    with pytest.raises(UserError, match=message) as caught:
        ServedDetector(folder)
    assert len(str(caught.value)) < 500


def test_a_file_of_any_size_is_not_read(tmp_path):
    folder = tiny_detector(tmp_path)
    with (folder / "detector.onnx").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="detector.onnx: has 1099511627776 bytes"):
        ServedDetector(folder)


def test_an_address_that_cannot_be_listened_on_is_one_line(tmp_path, capsys):
    folder = tiny_detector(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", f"run={folder}", f"port={port}"]) == 2
    assert f"host=127.0.0.1 port={port}: cannot be listened on" in capsys.readouterr().err
    assert cli.main(["serve", f"run={folder}", "workers=0"]) == 2
    capsys.readouterr()
    assert cli.main(["serve", f"run={folder}", f"port={65536 + port}"]) == 2  # which would be that port
    assert f"serve.port={65536 + port} must be in [0, 65535]" in capsys.readouterr().err


def test_the_operators_page_scores_by_the_detector_that_was_exported_last(tmp_path):
    folder, attempt = tiny_detector(tmp_path / "export" / "client_0"), trial(tmp_path)
    assert "by tiny" in attempt(png(), "a.png")[-1]
    sheet = json.loads((folder / "detector.json").read_text())
    (folder / "detector.json").write_text(json.dumps({**sheet, "name": "version 1"}))
    assert "by version 1" in attempt(png(), "a.png")[-1]


def test_the_operators_page_passes_over_exports_of_other_formats(tmp_path):
    other = tiny_detector(tmp_path / "export" / "client_0") / "detector.onnx"
    tiny_detector(tmp_path / "export" / "client_1")
    other.rename(other.with_name("detector.pt2"))
    assert "by tiny" in trial(tmp_path)(png(), "a.png")[-1]


def test_the_operators_page_says_that_a_score_is_no_number(tmp_path, monkeypatch):
    tiny_detector(tmp_path / "export" / "client_0")
    whole = ServedDetector._entries

    def words(self, outputs):
        return whole(self, {**outputs, "image_score": np.float32("nan")})

    monkeypatch.setattr(ServedDetector, "_entries", words)
    assert "score that is no number" in trial(tmp_path)(png(), "a.png")[-1]


@pytest.mark.slow
def test_the_served_detector_scores_as_predict_does(tiny_run, tmp_path):
    import csv

    from lit_fedad.deployment.export import export
    from lit_fedad.deployment.predict import predict

    images = sorted((tiny_run.parent / "data").rglob("*.png"))[:5]
    folder = export(str(tiny_run), client=1, format=("onnx",), out=str(tmp_path / "out"))
    detector = ServedDetector(folder, threads=1)
    for path in images:
        scores = predict(str(tiny_run), str(path), client=1, out=str(tmp_path / "scores"))
        with scores.open(newline="") as file:
            (row,) = csv.DictReader(file)
        words = detector(read_upload(path.read_bytes(), 10**7)).words
        assert words["score"] == pytest.approx(float(row["score"]), rel=1e-4)
        assert words["p_value"] == pytest.approx(float(row["p_value"]), abs=1e-5)
        assert words["decision"] == row["decision"]
