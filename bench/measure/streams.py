"""Streams of the OpenAI API from a process of its own: a plan comes in on standard input, an outcome goes out."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import msgspec
import uvloop

from measure import processes


class Plan(msgspec.Struct, kw_only=True):
    """What to ask for.

    Attributes:
      prompts: token ids of each request.
      tokens: of each answer.
      arrivals: when each request is sent, in seconds; None: all at once.
      nice: priority of the process.
    """

    port: int
    model: str
    prompts: list[list[int]]
    tokens: int
    arrivals: list[float] | None = None
    nice: int = 0


class Stream(msgspec.Struct, kw_only=True):
    """What came of one request.

    Attributes:
      sent: when it was due.
      arrivals: when its tokens came, with how many there were by then.
      error: None where all went well.
    """

    sent: float
    arrivals: list[tuple[float, int]]
    error: str | None = None


def measure(plan: Plan, timeout: float = 120.0) -> list[Stream]:
    """Runs a plan in a process of its own.

    Raises:
      RuntimeError: that process failed.
    """
    done = subprocess.run(
        processes.pinned(None, [sys.executable, "-m", "measure.streams"], plan.nice),
        start_new_session=True,
        input=msgspec.msgpack.encode(plan),
        capture_output=True,
        env=processes.environment(),
        check=False,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"the client failed: {done.stderr.decode()[-2000:]}")
    return msgspec.msgpack.decode(done.stdout, type=list[Stream])


def steady_rate(streams: list[Stream]) -> tuple[int, float]:
    """Tokens and seconds from when every stream has begun to when the first has ended."""
    began = max(stream.arrivals[0][0] for stream in streams)
    ended = min(stream.arrivals[-1][0] for stream in streams)
    tokens = 0
    for stream in streams:
        counts = dict(stream.arrivals)
        tokens += max(count for when, count in counts.items() if when <= ended)
        tokens -= max(count for when, count in counts.items() if when <= began)
    return tokens, ended - began


async def _ask(plan: Plan, prompt: list[int], due: float) -> Stream:
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    stream = Stream(sent=due, arrivals=[])
    body = json.dumps(
        {
            "model": plan.model,
            "prompt": prompt,
            "max_tokens": plan.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", plan.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{plan.port}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    status = await reader.readline()
    if b" 200 " not in status:
        stream.error = (status + await reader.read()).decode(errors="replace")[-300:]
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            stream.error = str(event["error"])[:300]
        count = (event.get("usage") or {}).get("completion_tokens", 0)
        if count and event["choices"] and (not stream.arrivals or count > stream.arrivals[-1][1]):
            stream.arrivals.append((time.perf_counter(), count))
    writer.close()
    if stream.error is None and (not stream.arrivals or stream.arrivals[-1][1] != plan.tokens):
        stream.error = f"{stream.arrivals[-1][1] if stream.arrivals else 0} of {plan.tokens} tokens came"
    return stream


async def _all(plan: Plan) -> list[Stream]:
    began = time.perf_counter() + 0.01
    due = plan.arrivals or [0.0] * len(plan.prompts)
    asked = (_ask(plan, prompt, began + when) for prompt, when in zip(plan.prompts, due, strict=True))
    return list(await asyncio.gather(*asked))


def main() -> None:
    plan = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Plan)
    sys.stdout.buffer.write(msgspec.msgpack.encode(uvloop.run(_all(plan))))


if __name__ == "__main__":
    main()
