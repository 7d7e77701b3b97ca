"""Runs the benchmarks: ``python -m benchmarks [NAME ...]``; without a name, all of them."""

import importlib
import sys
import time
from pathlib import Path

import lit_fedad  # noqa: F401  (before anything imports torchvision)


def main() -> None:
    available = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    names = sys.argv[1:] or available
    for name in names:
        if name not in available:
            sys.exit(f"no benchmark '{name}'; one of {', '.join(available)}")
    for name in names:
        print(f"== {name}")
        began = time.perf_counter()
        sys.argv = [name]
        importlib.import_module(f"benchmarks.{name}").main()
        print(f"   ({time.perf_counter() - began:.0f} s)\n", flush=True)


if __name__ == "__main__":
    main()
