"""One run: built from its configuration, played, kept in its folder, opened again."""
