"""Images on disk, who holds them, and how they are read."""
