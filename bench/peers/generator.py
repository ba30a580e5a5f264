"""What every generator of the benchmark does: answers questions about its speed, a line of JSON each.

`{"do": "first", "tokens": 128, "seconds": 2}` -> `{"seconds": [...]}`: from a prompt to its first token, several times.
`{"do": "decode", "batch": 16, "start": 64, "steps": 64, "seconds": 4}` -> `{"tokens": 960, "seconds": 3.1}`: that many
sequences, their prompts of `start` tokens computed already.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any, Protocol

CORES = 2


class Generator(Protocol):
    """One way to generate text."""

    def first(self, prompt: list[int]) -> float:
        """Seconds from a prompt that it has not seen to its first token."""
        ...

    def decode(self, prompt: list[int], batch: int, steps: int, seconds: float) -> tuple[int, float]:
        """Tokens and seconds of up to `steps` greedy steps of `batch` sequences; it may stop after `seconds`."""
        ...


def serve(make: Any) -> None:
    """Answers until standard input ends; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    generator: Generator = make()
    numbers = random.Random(os.getpid())

    def prompt(length: int) -> list[int]:
        return [numbers.randrange(100, 40_000) for _ in range(length)]

    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "first":
            took: list[float] = []
            ends = time.perf_counter() + asked["seconds"]
            while len(took) < 3 or (time.perf_counter() < ends and len(took) < 25):
                took.append(generator.first(prompt(asked["tokens"])))
            answer: dict[str, Any] = {"seconds": took[1:]}  # the first may compile, or allocate
        else:
            tokens, seconds = generator.decode(prompt(asked["start"]), asked["batch"], asked["steps"], asked["seconds"])
            answer = {"tokens": tokens, "seconds": seconds}
        print(json.dumps(answer), file=answers, flush=True)
