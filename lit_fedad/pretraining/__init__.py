"""How the library's own backbone is made: from pictures that formulas draw, and nothing else."""
