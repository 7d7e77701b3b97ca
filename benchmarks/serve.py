"""``lit-fedad serve`` under good and bad uploads: answers by status, latency, and the server's memory.

The detector is that of the default run. ``LIT_FEDAD_RUN`` may name another run with an exported detector.
"""

from __future__ import annotations

import http.client
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from io import BytesIO
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from benchmarks._runs import PLAIN
from lit_fedad.core.config import compose
from lit_fedad.deployment.export import export
from lit_fedad.experiment.train import train

_PORT = 18080
_REQUESTS, _AT_A_TIME = 10_000, 8
_BAD = 0.3
_SIDES = ((224, 224), (480, 640), (900, 1200))


def main() -> None:
    """Sends requests from several threads, and prints what came back."""
    with tempfile.TemporaryDirectory() as folder:
        _measure(os.environ.get("LIT_FEDAD_RUN") or _exported(Path(folder)), _REQUESTS, _AT_A_TIME)


def _exported(folder: Path) -> str:
    run = folder / "run"
    train(compose([*PLAIN, f"out={run}"]), quiet=True)
    export(str(run), format=("onnx",))
    return str(run)


def _measure(run: str, requests: int, at_a_time: int) -> None:
    command = [sys.executable, "-m", "lit_fedad", "serve", f"run={run}", f"port={_PORT}", "patience=2"]
    server = subprocess.Popen(
        [*command, "max_bytes=4000000", "max_pixels=4000000"], stdout=subprocess.DEVNULL
    )
    try:
        _until_healthy(server)
        good, bad = _good(), _bad()
        memory = [psutil.Process(server.pid).memory_info().rss]
        seconds: dict[str, list[float]] = {"good": [], "bad": []}
        statuses: Counter[str] = Counter()
        numbers, lock = iter(range(requests)), threading.Lock()

        def work(seed: int) -> None:
            draw = random.Random(seed)  # noqa: S311 - which upload is sent
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                kind = "bad" if draw.random() < _BAD else "good"
                name, content, form = draw.choice(bad if kind == "bad" else good)
                begun = time.perf_counter()
                status = _send(content, form, draw.choice(("/score", "/score?heatmap=true", "/heatmap")))
                taken = time.perf_counter() - begun
                with lock:
                    seconds[kind].append(taken)
                    statuses[f"{kind:<5} {name:<28} {status}"] += 1
                    if number % 500 == 0:
                        memory.append(psutil.Process(server.pid).memory_info().rss)

        begun = time.perf_counter()
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(at_a_time)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total = time.perf_counter() - begun
        alive = server.poll() is None
        print(
            f"{requests} requests, {at_a_time} at a time, {total:.0f} s; the server is {'up' if alive else 'DOWN'}"
        )
        for line, count in sorted(statuses.items()):
            print(f"  {line}  {count}")
        for kind, values in seconds.items():
            p50, p99 = (1000 * np.quantile(values, q) for q in (0.5, 0.99))
            print(f"{kind:<5} p50 {p50:.0f} ms  p99 {p99:.0f} ms  of {len(values)}")
        print("memory in MB, every 500 requests:", " ".join(f"{rss / 1e6:.0f}" for rss in memory))
    finally:
        server.terminate()
        server.wait(60)


def _good() -> list[tuple[str, bytes, str]]:
    draw, found = np.random.default_rng(0), []
    for height, width in _SIDES:
        pixels = draw.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
        for form in ("png", "jpeg", "webp"):
            file = BytesIO()
            Image.fromarray(pixels).save(file, form)
            found.append((f"{form} {height}x{width}", file.getvalue(), f"image/{form}"))
    return found


def _bad() -> list[tuple[str, bytes, str]]:
    flat = BytesIO()
    Image.fromarray(np.zeros((9_000, 9_000), np.uint8)).save(flat, "png")  # 81 million pixels in few bytes
    whole = next(content for name, content, _ in _good() if name.startswith("png"))
    return [
        ("nothing", b"", "image/png"),
        ("noise", os.urandom(50_000), "image/png"),
        ("half a PNG", whole[: len(whole) // 2], "image/png"),
        ("a PNG called JPEG", whole, "image/jpeg"),
        ("text", b"hello", "text/plain"),
        ("decompression bomb", flat.getvalue(), "image/png"),
        ("more bytes than allowed", bytes(4_000_001), "image/png"),
        ("an upload that breaks off", b"", "broken"),
    ]


def _send(content: bytes, form: str, path: str) -> int | str:
    connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=120)
    try:
        if form == "broken":
            connection.putrequest("POST", path)
            connection.putheader("Content-Type", "image/png")
            connection.putheader("Content-Length", "5000")
            connection.endheaders(b"\x89PNG")
            return "gone"
        connection.request("POST", path, content, {"Content-Type": form})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (http.client.HTTPException, OSError) as error:
        return type(error).__name__
    finally:
        connection.close()


def _until_healthy(server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.5)
        finally:
            connection.close()
    raise SystemExit("the server did not start")


if __name__ == "__main__":
    main()
