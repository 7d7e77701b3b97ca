"""How clients are scored."""
