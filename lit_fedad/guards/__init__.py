"""Guards: numbers that a configuration gives, and text that leaves the program."""
