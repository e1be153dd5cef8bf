"""Lets vLLM take Triton's interpreter for a CPU backend, so that its second model runner runs; a ``sitecustomize``.

The runner prepares its inputs by Triton kernels, which ``TRITON_INTERPRET=1`` runs in Python. vLLM asks Triton's
package for a backend named ``cpu`` before it uses any, and does so before it loads plugins.
"""

import os

if os.environ.get("TRITON_INTERPRET"):
    from triton.backends import backends

    class _Driver:
        @staticmethod
        def is_active():
            return True

    class _Interpreter:
        driver = _Driver

    backends["cpu"] = _Interpreter()
