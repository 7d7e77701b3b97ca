"""Foundations of all packages: configuration, options, errors, names of clients, and checks of user input."""
