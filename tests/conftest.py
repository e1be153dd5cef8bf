"""How all tests run: the same examples every time, and no deadlines, since a busy machine is no defect of the code.

What random exploration finds (``make fuzz-properties``) is kept beside its test as an explicit ``@example``.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("gate", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, derandomize=False, database=None, print_blob=True)
settings.load_profile("gate")
