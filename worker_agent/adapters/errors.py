"""What an adapter refuses, and how it says so."""

from __future__ import annotations


class UnsupportedEngineError(RuntimeError):
    """An engine, version or combination of options that the agent cannot balance; says what, why and what to do.

    Raised while the engine starts, before anything of it is patched.
    """

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(
            f"eplb-agent cannot balance this engine: {what}. {why}. {remedy}, "
            "or unset EPLB_AGENT_SERVICE to serve without it."
        )
