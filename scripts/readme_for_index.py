"""Build hook: the README as package indexes show it, with whole addresses for its pictures and pages.

An index has none of the repository's files, so that relative links lead nowhere there. `project.urls.Source` of
pyproject.toml says where they are; without it the README stays as it is.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")


def with_addresses(text: str, source: str) -> str:
    """Gives relative links their addresses on the main branch, as GitHub has them.

    Args:
        text: The README.
        source: Address of the repository.

    Returns:
        The text: pictures lead to the bare file, other links to its page.
    """
    base = source.rstrip("/")

    def whole(link: re.Match[str]) -> str:
        kind = "raw" if link[1] else "blob"
        return f"{link[1]}[{link[2]}]({base}/{kind}/main/{link[3]})"

    return _LINK.sub(whole, text)


class ReadmeForIndex(MetadataHookInterface):
    """Sets the package's readme."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the readme to the metadata of the project."""
        text = Path(self.root, "README.md").read_text()
        source = metadata.get("urls", {}).get("Source")
        shown = with_addresses(text, source) if source else text
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
