"""Pages of the site that are not in ``docs/``: generated pages, and files in the repository root."""

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
"""Files in the repository root that are pages of the site, with their paths in the site."""

_NOTEBOOK = "examples/decision.ipynb"


def generated_pages() -> dict[str, str]:
    """Return the Markdown of every page that is not in ``docs/``, by its path in the site."""
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
    """Return the Markdown of a page in the repository root, with its links adapted to the site."""

    def link(match: re.Match[str]) -> str:
        label = match[1]
        target = match[2]
        if target in ROOT_PAGES:
            return f"[{label}]({ROOT_PAGES[target]})"
        if target.startswith("docs/"):
            return f"[{label}]({target.removeprefix('docs/')})"
        if target.startswith(("http", "#")):
            return match[0]
        return label

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", link, text)


def notebook_page() -> str:
    """Return the text of ``notebook.md``: the notebook's cells with their printed output and charts."""
    sections = [f"[This page as a notebook]({_NOTEBOOK})."]
    for cell in json.loads((ROOT / "docs" / _NOTEBOOK).read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        sections.append(
            f"```python\n{source}\n```" if cell["cell_type"] == "code" else source.replace("](../", "](")
        )
        for output in cell.get("outputs", ()):
            picture = "".join(output.get("data", {}).get("image/svg+xml", ()))
            printed = "".join(output.get("text", ()))
            # Embed the chart as a separate image, so that its styles do not affect the page.
            image = base64.b64encode(picture.encode()).decode()
            drawn = f'<img alt="chart" src="data:image/svg+xml;base64,{image}">'
            sections.append(drawn if picture else f"```text\n{printed}```")
    heading = sections.pop(1)
    return "\n\n".join([heading, *sections]) + "\n"
