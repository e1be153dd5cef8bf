"""A deliberate bug that the tests must detect: a layer's tables switch but its weights do not."""


def commit_without_weights() -> None:
    """Patch this process's agent."""
    from worker_agent.swap import staging

    original = staging.copy_into

    def install(layer, staged, slots, *tables):
        return original(layer, [buffer[:0] for buffer in staged], [], *tables)

    staging.copy_into = install
