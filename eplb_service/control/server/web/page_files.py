"""The files of the web page, read once; they are served as they are."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

_KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Content(NamedTuple):
    """An answer's media type and bytes."""

    kind: str
    body: bytes


def _read() -> dict[str, Content]:
    folder = files("eplb_service.control.server.web").joinpath("page")
    found = {
        f"/{file.name}": Content(_KINDS[file.name.rpartition(".")[2]], file.read_bytes())
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in _KINDS
    }
    return found | {"/": found["/index.html"]}


PAGE_FILES = _read()
"""Every file of the page by its path; ``/`` is its HTML."""
