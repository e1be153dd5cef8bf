"""The hook of MkDocs (`hooks` in mkdocs.yml) by which `make docs` has the generated pages.

It adds them, and those files of the repository's root that are pages of the site too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

# MkDocs loads this file by its path, from wherever it was started.
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
    """Return a page of ``docs/`` as it is in the site (called by MkDocs).

    Pages link to files of the repository's root as GitHub resolves the links; in the site these are links to its pages.
    A line ``# examples/NAME.py`` becomes that file.
    """
    for name, path in ROOT_PAGES.items():
        markdown = re.sub(
            rf"\]\((\.\./)?\.\./{re.escape(name)}(#[\w-]+)?\)", rf"](\g<1>{path}\g<2>)", markdown
        )
    return _EXAMPLE.sub(lambda match: (ROOT / match[1]).read_text(encoding="utf-8").strip(), markdown)
