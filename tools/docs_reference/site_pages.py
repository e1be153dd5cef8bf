"""Pages of the site that are not in ``docs/``: generated ones, and files of the repository's root."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

from tools.docs_reference.command_line import cli_page
from tools.docs_reference.metrics import metrics_page
from tools.docs_reference.settings import settings_page

ROOT = Path(__file__).parents[2]
ROOT_PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository's root that are pages of the site, and their paths there."""

_NOTEBOOK = "examples/decision.ipynb"


def generated_pages() -> dict[str, str]:
    """Markdown of every page that is not in ``docs/``, by its path in the site."""
    pages = {
        "reference/cli.md": cli_page(),
        "reference/settings.md": settings_page(),
        "reference/metrics.md": metrics_page(),
    }
    pages["notebook.md"] = notebook_page()
    for name, path in ROOT_PAGES.items():
        pages[path] = site_links((ROOT / name).read_text(encoding="utf-8"))
    return pages


def site_links(text: str) -> str:
    """Markdown of a page at the repository's root, with its links as they are in the site."""

    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        if target in ROOT_PAGES:
            return f"[{label}]({ROOT_PAGES[target]})"
        if target.startswith("docs/"):
            return f"[{label}]({target.removeprefix('docs/')})"
        if target.startswith(("http", "#")):
            return match[0]
        return label

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, text)


def notebook_page() -> str:
    """``notebook.md``: the cells of the notebook and what they printed and drew, as ``tools/notebook.py`` kept it."""
    parts = [f"[This page as a notebook]({_NOTEBOOK})."]
    for cell in json.loads((ROOT / "docs" / _NOTEBOOK).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(
            f"```python\n{source}\n```" if cell["cell_type"] == "code" else source.replace("](../", "](")
        )
        for output in cell.get("outputs", ()):
            picture = "".join(output.get("data", {}).get("image/svg+xml", ()))
            printed = "".join(output.get("text", ()))
            # As a file of its own, so that its style stays its own.
            image = base64.b64encode(picture.encode()).decode()
            drawn = f'<img alt="the chart" src="data:image/svg+xml;base64,{image}">'
            parts.append(drawn if picture else f"```text\n{printed}```")
    heading = parts.pop(1)
    return "\n\n".join([heading, *parts]) + "\n"
