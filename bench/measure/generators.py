"""Generators of text as child processes, each in an environment of its own: a line of JSON in, a line out."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from measure import processes
from measure.peers import FOLDER, Unavailable, environment

PATIENCE = 240.0
"""Seconds that an answer may take, compilation included."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A generator to measure.

    Attributes:
      title: its name in tables.
      script: in bench/peers; where requirements stand in a .txt beside it, it has an environment of its own.
      source: which form of the model it takes.
      arguments: more of its script's.
      longest: the longest context it is measured at.
    """

    title: str
    script: str
    source: str
    arguments: tuple[str, ...] = ()
    longest: int = 1 << 20


KINDS = {
    "float32": Kind("servax float32", "servax_generator", "checkpoint", ("float32",)),
    "bfloat16": Kind("servax bfloat16", "servax_generator", "checkpoint", ("bfloat16",)),
    "int8": Kind("servax int8", "servax_generator", "checkpoint", ("int8",)),
    "q4_1": Kind("llama.cpp Q4_1", "llamacpp_generator", "gguf"),
    "f16": Kind("llama.cpp F16", "llamacpp_generator", "gguf_f16"),
    "torch-float32": Kind("transformers float32", "torch_generator", "hugging_face", ("float32",)),
    "torch-bfloat16": Kind("transformers bfloat16", "torch_generator", "hugging_face", ("bfloat16",)),
    "naive": Kind("JAX, naive", "naive_generator", "checkpoint", longest=128),
}


def install(script: str, folder: Path) -> Path:
    """The interpreter that a script runs under, in an environment that is made where it is missing or has other pins.

    Raises:
      Unavailable: pip's last words.
    """
    requirements = FOLDER / f"{script}.txt"
    if not requirements.exists():
        return Path(sys.executable)
    return environment(requirements, folder / script.partition("_")[0])


class Running:
    """A generator that runs for the length of a block.

    Raises:
      Unavailable: it did not start.

    Attributes:
      seconds_to_ready: from the start of the process.
    """

    def __init__(self, python: Path, script: str, arguments: list[str], log: Path, nice: int = 0) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                processes.pinned(None, [str(python), str(FOLDER / f"{script}.py"), *arguments], nice),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=processes.environment(HF_HUB_OFFLINE="1"),
                start_new_session=True,
            )
        self._line(PATIENCE)
        self.seconds_to_ready = time.perf_counter() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def first(self, tokens: int, seconds: float) -> list[float]:
        """Seconds from a prompt of so many tokens to the first token, several times."""
        return self._ask(do="first", tokens=tokens, seconds=seconds)["seconds"]

    def decode(self, batch: int, start: int, steps: int, seconds: float) -> dict[str, float]:
        """Tokens/s of `batch` sequences after prompts of `start` tokens, and cores that anything else kept busy."""
        busy, own, began = self._marks()
        answer = self._ask(do="decode", batch=batch, start=start, steps=steps, seconds=seconds)
        busy_end, own_end, ended = self._marks()
        others = max(0.0, (busy_end - busy - (own_end - own)) / (ended - began))
        return {"rate": answer["tokens"] / answer["seconds"], "others": others}

    def _marks(self) -> tuple[float, float, float]:
        return processes.busy_seconds(), processes.cpu_seconds([self._process.pid]), time.perf_counter()

    def _ask(self, **asked: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        return self._line(PATIENCE)

    def _line(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        watch = threading.Timer(timeout, self._process.kill)
        watch.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not line:
            raise self._ended()
        return json.loads(line)

    def _ended(self) -> Unavailable:
        status = self._process.wait()
        return Unavailable(f"ended with status {status}: {self._log.read_text(errors='replace').strip()[-400:]}")
