"""How an error repeats what a request said."""

from __future__ import annotations


def short(text: str, most: int = 100) -> str:
    """A text of a request, no longer than `most` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
