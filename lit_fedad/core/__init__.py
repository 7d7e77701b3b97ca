"""What all packages build on: configuration, options, errors, names of clients, checks of what users give."""
