"""A real vLLM server over HTTP, and requests to it whose tokens are timed one by one."""

from __future__ import annotations

import http.client
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tests.engines.processes import end_engine, start_engine

START_SECONDS = 900


@dataclass(frozen=True)
class Answer:
    """One streamed completion: token ids, and when each came, in seconds since the request."""

    ids: list[int]
    arrived: list[float]

    @property
    def first_token(self) -> float:
        """Time to first token, seconds."""
        return self.arrived[0]

    @property
    def per_token(self) -> list[float]:
        """Seconds between tokens that came one after another."""
        return [late - early for early, late in zip(self.arrived, self.arrived[1:], strict=False)]


class OpenAiServer:
    """``python -m vllm.entrypoints.openai.api_server`` in a process of its own.

    Parameters
    ----------
    python
        The engine's interpreter.
    folder
        Where its log goes.
    checkpoint
        The model, without a tokenizer: prompts and answers are token ids.
    options
        Further command line.
    environment
        Of the process.
    """

    def __init__(
        self, python: Path, folder: Path, checkpoint: Path, options: list[str], environment: dict[str, str]
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / "server.log"
        self.model = str(checkpoint)
        module = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command = [
            *module,
            "--port",
            str(self.port),
            "--model",
            self.model,
            "--skip-tokenizer-init",
            *options,
        ]
        command += ["--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"]
        self._process = start_engine(command, environment, self.log)

    def wait_until_healthy(self) -> None:
        """Until it takes requests; raises ``AssertionError`` with the end of its log where it does not come to that."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            assert self._process.poll() is None, self.tail()
            assert time.monotonic() < deadline, f"not healthy after {START_SECONDS} s: {self.tail()}"
            if self._is_healthy():
                return
            time.sleep(0.5)

    def _is_healthy(self) -> bool:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)) as connection:
            try:
                connection.request("GET", "/health")
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException):
                return False
            return response.status == 200

    def answer(self, prompt: list[int], max_tokens: int) -> Answer:
        """One greedy completion, streamed."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            "stream": True,
        }
        headers = {"content-type": "application/json"}
        ids, arrived = [], []
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            began = time.perf_counter()
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                (choice,) = json.loads(line[len(b"data: ") :])["choices"]
                came = choice.get("token_ids") or []
                ids += came
                arrived += [time.perf_counter() - began] * len(came)
        return Answer(ids, arrived)

    def answers(self, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
        """All prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.answer(prompt, max_tokens), prompts))

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-6000:]

    def stop(self) -> None:
        """End it, with its workers."""
        end_engine(self._process)
