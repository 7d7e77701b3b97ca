"""Threads for work on files."""

import os
from concurrent.futures import ThreadPoolExecutor


def file_threads() -> ThreadPoolExecutor:
    """Starts a thread for each core, but at most eight: each may hold a whole decoded photograph."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1))
