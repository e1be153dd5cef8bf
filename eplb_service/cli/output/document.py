"""What commands print with ``--json``, or write as ``.json``, is described by documents: their fields, with units.

The JSON schemas that ``eplb schema`` prints and the docs publish are made of these; tests hold what commands print to
them. Ratios that there are not, such as the PAR of a layer without tokens, are ``null``.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

Ratio = float | None


class Document(BaseModel):
    """A JSON object with these fields, to which later versions may add others."""

    model_config = ConfigDict(use_attribute_docstrings=True)
