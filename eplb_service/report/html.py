"""Building blocks of the HTML reports: a self-contained document, charts, tiles, tables and collapsed lists.

Texts are escaped. A document loads no external resources.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files


def document(title: str, sections: Iterable[str]) -> str:
    """Return a complete HTML document with the given sections, which are HTML."""
    css = files("eplb_service.report").joinpath("report.css").read_text()
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def figure(picture: str, note: str) -> str:
    """Return a chart and its note.

    The SVG is embedded as an image, so its ids cannot clash with the page's, and it cannot run scripts.
    """
    title = picture.partition("<title>")[2].partition("</title>")[0]
    data = base64.b64encode(picture.encode()).decode()
    image = f'<img src="data:image/svg+xml;base64,{data}" alt="{title}">'
    return f"<figure>{image}<figcaption>{escape(note)}</figcaption></figure>"


def tiles(values: Mapping[str, str]) -> str:
    """Return tiles for the figures, which are keyed by label."""
    boxes = (f"<div><b>{escape(value)}</b>{escape(label)}</div>" for label, value in values.items())
    return f'<div class="tiles">{"".join(boxes)}</div>'


def verdict(text: str) -> str:
    """Return a highlighted sentence."""
    return f'<p class="verdict">{escape(text)}</p>'


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table with a line for each row. The keys of the first row are the headings."""
    head = _cells("th", rows[0])
    body = "".join(f"<tr>{_cells('td', row.values())}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bullets(heading: str, texts: Iterable[str]) -> str:
    """Return a heading and a list of texts."""
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<h2>{escape(heading)}</h2>\n<ul>{items}</ul>"


def folded(summary: str, facts: Mapping[str, str]) -> str:
    """Return a collapsed list of facts, keyed by name."""
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<details><summary>{escape(summary)}</summary><dl>{''.join(rows)}</dl></details>"


def _cells(tag: str, texts: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(text)}</{tag}>" for text in texts)
