"""Make vLLM accept Triton's interpreter as a CPU backend, so that its second model runner works. A ``sitecustomize``.

The runner prepares its inputs with Triton kernels, which ``TRITON_INTERPRET=1`` runs in Python. vLLM checks for a
Triton backend named ``cpu`` before it uses Triton, and does so before it loads plugins.
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
