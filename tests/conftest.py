"""How all tests run: no hypothesis deadlines, since a busy machine is no defect of the code."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("eplb", deadline=None)
settings.load_profile("eplb")
