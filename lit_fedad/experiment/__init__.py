"""One run: its construction from a configuration, its rounds, its folder, and the reopening of a finished run."""
