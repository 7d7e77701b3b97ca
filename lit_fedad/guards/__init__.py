"""Guards: what a configuration gives, packages that a command needs, and text that leaves the program."""
