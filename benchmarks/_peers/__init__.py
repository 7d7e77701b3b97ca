"""Parts of ``python -m benchmarks peers``: environments, and what each side runs in a process of its own."""
