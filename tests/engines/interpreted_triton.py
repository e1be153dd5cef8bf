"""A ``sitecustomize`` that makes vLLM accept Triton's interpreter as a CPU backend for its second model runner.

The runner prepares its inputs with Triton kernels, which ``TRITON_INTERPRET=1`` runs in Python. Before it uses Triton,
and before it loads plugins, vLLM checks for a Triton backend named ``cpu``.
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
