"""Runs the benchmarks: ``python -m benchmarks [NAME ...] [key=value ...]``; without a name, all that need no key."""

import importlib
import sys
import time
from pathlib import Path

import lit_fedad  # noqa: F401  (before anything imports torchvision)


def main() -> None:
    available = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    keys = [word for word in sys.argv[1:] if "=" in word]
    names = [word for word in sys.argv[1:] if word not in keys] or [
        name for name in available if name != "peers"
    ]
    for name in names:
        if name not in available:
            sys.exit(f"no benchmark '{name}'; one of {', '.join(available)}")
    for name in names:
        print(f"== {name}")
        began = time.perf_counter()
        sys.argv = [name, *keys]
        importlib.import_module(f"benchmarks.{name}").main()
        print(f"   ({time.perf_counter() - began:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
