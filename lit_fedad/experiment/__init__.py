"""One run: its construction from a configuration, its rounds, its folder, and reopening it."""
