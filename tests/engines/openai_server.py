"""A real vLLM HTTP server, and requests that record each token's arrival time."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from tests.e2e.service import free_address
from tests.engines.processes import end_engine, start_engine

START_SECONDS = 900.0
TOKEN_IDS_ALONE = ("--skip-tokenizer-init", "--max-model-len", "512", "--max-num-seqs", "8")
"""Options for a server without a tokenizer. Its prompts and answers are token ids."""


class ServerError(RuntimeError):
    """The server did not start or rejected a request. The message contains the reason or the end of the log."""


class OpenAiServer:
    """``python -m vllm.entrypoints.openai.api_server`` in a process whose output goes to ``log``.

    As a context manager, it stops the process on exit.
    """

    def __init__(
        self, python: Path, log: Path, model: Path, options: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.port = int(free_address().rpartition(":")[2])
        self._model = str(model)
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", self._model]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager"]
        self._process = start_engine([*command, *options], environment, log)

    def __enter__(self) -> OpenAiServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server and its workers."""
        end_engine(self._process)

    def wait_until_healthy(self) -> None:
        """Wait until the server accepts requests. Raises ``ServerError`` if the server exits or takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None:
                raise ServerError(f"vLLM exited during start-up; see {self._log}: {self.tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"vLLM did not start within {START_SECONDS:.0f} s: {self.tail()}")
            time.sleep(0.5)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def answers(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Return greedy completions of token-id prompts, which are sent concurrently."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._answer(prompt, max_tokens), prompts))

    def _answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
        }
        choices = streamed_choices(self.port, body, timeout=300.0)
        return [token for choice, _ in choices for token in choice.get("token_ids") or []]

    def tail(self) -> str:
        """Return the end of the server's log."""
        return self._log.read_text(errors="replace")[-6000:].strip()


def streamed_choices(
    port: int, body: dict[str, Any], timeout: float
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield each part of a streamed completion with the seconds since the request.

    Raises ``ServerError`` if the server rejects the request, breaks off the stream or cannot be reached.
    """
    payload = json.dumps(body | {"return_token_ids": True, "stream": True})
    with closing(HTTPConnection("127.0.0.1", port, timeout=timeout)) as connection:
        began = time.perf_counter()
        try:
            connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(f"status {response.status}: {response.read(500).decode(errors='replace')}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[len(b"data: ") :])
                    if "error" in event:
                        raise ServerError(f"the server reports {event['error']}")
                    for choice in event["choices"]:
                        yield choice, time.perf_counter() - began
        except (OSError, HTTPException, ValueError, KeyError) as error:
            raise ServerError(f"{type(error).__name__}: {error}") from error
