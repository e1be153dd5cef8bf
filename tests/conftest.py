"""How all tests run: the same examples every time, and no deadlines, since a busy machine is no defect of the code.

Properties are tried on 50 examples unless a test says otherwise, and on twice as many as in the gate by
``make test-slow``. What random exploration finds (``make fuzz-properties``) is kept beside its test as an explicit
``@example``.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("gate", max_examples=50, deadline=None, derandomize=True, database=None)
settings.register_profile(
    "explore", max_examples=50, deadline=None, derandomize=False, database=None, print_blob=True
)
settings.load_profile("gate")
