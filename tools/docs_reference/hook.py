"""MkDocs hook that adds the generated pages to the site (see ``hooks`` in ``mkdocs.yml``).

It also adds the files in the repository root that are pages of the site.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

# MkDocs loads this file by path, so the repository root may not be on the import path.
sys.path.insert(0, str(Path(__file__).parents[2]))

from tools.docs_reference.site_pages import ROOT, ROOT_PAGES, generated_pages

_EXAMPLE = re.compile(r"^# (examples/\w+\.py)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site (called by MkDocs)."""
    from mkdocs.structure.files import File

    for path, text in generated_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the Markdown of a page in ``docs/``, adapted to the site (called by MkDocs).

    In the repository, pages link to files in its root. These links are replaced with links to the site's pages. A line
    ``# examples/NAME.py`` is replaced with the content of that file.
    """
    for name, path in ROOT_PAGES.items():
        markdown = re.sub(
            rf"\]\((\.\./)?\.\./{re.escape(name)}(#[\w-]+)?\)", rf"](\g<1>{path}\g<2>)", markdown
        )
    return _EXAMPLE.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8").strip(), markdown)
