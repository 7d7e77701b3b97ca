"""The tables and figures of the four papers, and the page that compares all tracked runs."""
