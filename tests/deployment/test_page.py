"""The operator's page in headless Chromium: every tab, and what its buttons do."""

from __future__ import annotations

import csv
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lit_fedad

pytest.importorskip("gradio")
playwright = pytest.importorskip("playwright.sync_api")
BROWSER = next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="needs Chromium")]

PATIENCE_S = 300


@contextmanager
def page_of(run, reviews):
    """Starts ``lit-fedad ui`` in a process of its own; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "lit_fedad", "ui", f"run={run}", f"out={reviews}", f"port={port}"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(lit_fedad.__file__).parents[1]),
        "NO_PROXY": "127.0.0.1",
    }
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    address, end = f"http://127.0.0.1:{port}/", time.monotonic() + PATIENCE_S
    open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    try:
        while True:
            assert server.poll() is None
            assert time.monotonic() < end
            try:
                open_url(address, timeout=10)
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture
def run(copied_run):
    """A copy of the tiny run with predictions, a watch that saw drift, and a detector to try."""
    from helpers.tiny_detector import tiny_detector

    heatmaps = copied_run / "predictions/heatmaps"
    heatmaps.mkdir(parents=True)
    rows = ["path,score,p_value,threshold,decision,heatmap"]
    for number, p_value in enumerate((0.5, 0.02, 0.9)):
        Image.fromarray(np.full((32, 32, 3), 60 * number, np.uint8)).save(heatmaps / f"{number}.png")
        rows.append(f"image_{number}.png,{10 - number},{p_value},9,normal,heatmaps/{number}.png")
    (copied_run / "predictions/scores.csv").write_text("\n".join(rows) + "\n")
    watch = copied_run / "watch/client_0"
    watch.mkdir(parents=True)
    (watch / "images.csv").write_text("path,score,p_value,decision\na.png,3,0.5,normal\n")
    summary = {"alarms": [17], "images": 40, "psi": 3, "psi_limit": 2, "ks_p_value": 0.01}
    (watch / "summary.json").write_text(json.dumps(summary))
    tiny_detector(copied_run / "export/client_0")
    return copied_run


def test_every_tab_shows_the_run_and_the_buttons_write_reviews(run, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    reviews, image = tmp_path / "reviews.csv", tmp_path / "bright.png"
    Image.fromarray(np.full((20, 20, 3), 250, np.uint8)).save(image)
    foreign, errors = [], []
    with page_of(run, reviews) as address, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--no-proxy-server"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("request", lambda sent: foreign.append(sent.url) if sent.url.startswith("http") else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector("text=client 1")

        page.get_by_role("tab", name="Site", exact=True).click()
        page.wait_for_selector("text=alarms: 1, first at image 17")
        alarms = page.locator("#alarms")
        said = alarms.inner_text()
        assert "false alarms a day, at most, of 1000 normal images" in said
        page.get_by_label("images a day").fill("5000")
        page.wait_for_function("document.querySelector('#alarms').innerText.includes('of 5000 normal')")
        page.locator("svg[aria-label='histogram of scores']").wait_for()

        page.get_by_role("tab", name="Gallery", exact=True).click()
        page.locator("#false-alarm").click()
        page.wait_for_selector("text=Choose an image first.")
        page.locator(".thumbnail-item").first.click()
        page.wait_for_selector("text=image_1.png: normal, p = 0.02")
        assert page.get_by_label("Fullscreen").count()
        assert not page.get_by_label("Share").count()  # with Gradio's makers
        scores = run / "predictions/scores.csv"
        shown = scores.read_text()
        scores.write_text(shown.replace("image_1", "image_9"))  # another `predict` while the page is open
        page.locator("#missed").click()
        page.wait_for_selector("text=image_1.png: missed. Reviewed: 1 missed.")
        assert page.locator("#false-alarm").is_disabled()
        scores.write_text(shown)
        os.utime(scores, ns=(before[scores], before[scores]))

        page.get_by_role("tab", name="Try", exact=True).click()
        page.locator("input[type=file]").last.set_input_files(image)
        page.locator("#verdict").get_by_text("anomalous").wait_for()

        phone = browser.new_page(viewport={"width": 390, "height": 844})
        phone.set_default_timeout(1000 * PATIENCE_S)
        phone.goto(address)
        phone.wait_for_selector("text=client 1")
        assert phone.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
        head = phone.get_by_text("seconds", exact=True).last
        assert head.evaluate("head => getComputedStyle(head).overflowWrap") == "normal"
        browser.close()
    assert [url for url in foreign if not url.startswith(address)] == []
    assert errors == []
    with reviews.open(newline="") as lines:
        (row,) = csv.DictReader(lines)
    assert (row["path"], row["review"]) == ("image_1.png", "missed")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
