"""Hooks on the workers of vLLM and vLLM-Ascend: loading the model, warming up, and running a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from worker_agent.adapters.batch import Batch, TokenShare, batch_of, step_of
from worker_agent.adapters.compat import KnownReleases, Patches, UnsupportedEngineError, mismatches, nearest
from worker_agent.observe.counter import RouterCounter
from worker_agent.observe.observer import NotObservedError, Observer, harmless, log, not_observed


def hooks_fit(engine: str, version: str, releases: KnownReleases, patches: Patches) -> bool:
    """Return True if the hooked functions have the parameters that the hooks declare; otherwise log it.

    Parameters
    ----------
    engine
        Name of the engine.
    version
        Installed version, which may be unknown.
    releases
        Functions of all known releases.
    patches
        Hooked functions.
    """
    functions = releases[nearest(version, releases)]
    hooked = {target: functions[target] for target in patches if target in functions}
    fatal = [mismatch.target for mismatch in mismatches(hooked, patches) if mismatch.fatal]
    if fatal:
        not_observed(f"the hooks do not fit {', '.join(fatal)} of {engine} {version}; install a newer agent")
    return not fatal


class WorkerObservation:
    """Observation of the target model of one worker.

    Parameters
    ----------
    observer
        This rank's observer.
    counter
        Counter of the routers' choices.
    share
        This rank's share of the tokens of its data-parallel rank; ``None`` if the tokens are unknown.

    Attributes
    ----------
    observer
        This rank's observer.
    """

    def __init__(self, observer: Observer, counter: RouterCounter, share: TokenShare | None) -> None:
        self.observer = observer
        self._counter = counter
        self._share = share
        self._batch: Batch | None = None
        self._is_dummy = False
        self._runs = False

    @property
    def stopped(self) -> bool:
        """True once an error has ended the observation."""
        return self.observer.stopped

    def stop(self, error: Exception) -> None:
        """End the observation because of an error."""
        self.observer.stop(error)

    @harmless
    def before(self, scheduler_output: Any) -> None:
        """Prepare for the batch that is about to run."""
        self._prepare(batch_of(scheduler_output), is_dummy=False)

    @harmless
    def before_dummy(self) -> None:
        """Prepare for a pass in which this rank has no tokens."""
        self._prepare(None, is_dummy=True)

    def _prepare(self, batch: Batch | None, *, is_dummy: bool) -> None:
        self._batch = batch
        self._is_dummy = is_dummy
        # Without tokens, the engine runs no pass, unless the other ranks need this rank's dummy pass.
        self._runs = batch is not None or is_dummy
        if self._runs:
            self.observer.before_pass()
            self._counter.expect(0 if batch is None else batch.tokens)

    @harmless
    def after(self) -> None:
        """Record the pass that has just been queued, if there was one."""
        if not self._runs:
            return
        self._runs = False
        self._counter.record(counts=self._counts())
        self.observer.after_pass(*step_of(self._batch, self._share, is_dummy=self._is_dummy))

    def _counts(self) -> bool:
        """Return True if this rank's choices in the pass are to be counted."""
        return not self._is_dummy


def watch_worker(worker_class: Any, observe: Callable[[Any], WorkerObservation]) -> None:
    """Start observing once a worker has loaded its model, and call the observation around each batch.

    Parameters
    ----------
    worker_class
        The engine's worker class.
    observe
        Function that starts observing a worker's model (collective over its ranks). It raises ``NotObservedError`` or
        ``UnsupportedEngineError``, on all ranks, if the model cannot be observed.
    """

    def hook(name: str, call_around: Callable[..., Any]) -> None:
        original = getattr(worker_class, name)

        @wraps(original)
        def hooked(self: Any, *arguments: Any, **named: Any) -> Any:
            return call_around(original, self, *arguments, **named)

        setattr(worker_class, name, hooked)

    def load_model(original: Callable[..., Any], worker: Any, *arguments: Any, **named: Any) -> Any:
        result = original(worker, *arguments, **named)
        worker.eplb_observation = _observation_of(worker, observe)
        return result

    def warm_up(original: Callable[..., Any], worker: Any, *arguments: Any, **named: Any) -> Any:
        # vLLM's second model runner warms up with its own batches.
        observation = worker.eplb_observation
        worker.eplb_observation = None
        try:
            return original(worker, *arguments, **named)
        finally:
            worker.eplb_observation = observation

    def execute_model(
        original: Callable[..., Any], worker: Any, scheduler_output: Any, *rest: Any, **named: Any
    ) -> Any:
        observation = worker.eplb_observation
        if observation is None:
            return original(worker, scheduler_output, *rest, **named)
        observation.before(scheduler_output)
        result = original(worker, scheduler_output, *rest, **named)
        observation.after()
        return result

    def execute_dummy_batch(original: Callable[..., Any], worker: Any, *arguments: Any, **named: Any) -> Any:
        observation = worker.eplb_observation
        if observation is None:
            return original(worker, *arguments, **named)
        observation.before_dummy()
        result = original(worker, *arguments, **named)
        observation.after()
        return result

    worker_class.eplb_observation = None
    hook("load_model", load_model)
    hook("compile_or_warm_up_model", warm_up)
    hook("execute_model", execute_model)
    hook("execute_dummy_batch", execute_dummy_batch)


def _observation_of(worker: Any, observe: Callable[[Any], WorkerObservation]) -> WorkerObservation | None:
    """Start observing, or log why the model cannot be observed. No error reaches the engine."""
    try:
        if worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise NotObservedError("with pipeline parallelism, no rank sees all layers")
        return observe(worker)
    except NotObservedError as error:
        reason = str(error)
    except UnsupportedEngineError as error:
        reason = f"{error.subject}. {error.reason}"
    except Exception:
        log.exception("rank %d: eplb-agent could not start observing this engine", worker.rank)
        reason = "see the error above"
    if worker.rank == 0:
        not_observed(reason)
    return None
