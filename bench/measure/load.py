"""Load on one server, from a process of its own: a plan comes in on standard input, an outcome goes out.

Closed loop: so many callers, each sends its next request when it has its answer. Open loop: requests leave at
scheduled times, whatever the server does, and their latency counts from the scheduled time.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Literal

import msgspec
import uvloop

from measure import http1, http2, processes

_PATIENCE = 30.0
"""Seconds that the last answers may take."""
_SPIN = 0.002
"""Seconds before a scheduled time in which the loop spins, because its timers count in milliseconds."""
_CALLS_PER_CONNECTION = 8
_RECONNECTIONS = 1000
"""Connections that a server may close before the measurement is given up."""


class Plan(msgspec.Struct, kw_only=True):
    """What to send where.

    Attributes:
      heads: headers of each request over HTTP.
      bodies: what the requests carry; `order` has indices into it, and starts again at its end.
      seconds: length of the measured window of a closed loop, which begins after `warm` seconds of the same.
      concurrency: callers of the closed loop; connections of the open loop.
      arrivals: seconds at which the requests of an open loop leave; None: closed loop.
      keep: every so many answers one is kept whole.
      core: the core this process stays on; None: any.
      nice: its priority.
      pids: the server's processes.
    """

    wire: Literal["http", "grpc"]
    port: int
    path: str
    heads: list[dict[str, str]]
    bodies: list[bytes]
    order: list[int]
    seconds: float = 0.0
    warm: float = 0.0
    concurrency: int = 1
    arrivals: list[float] | None = None
    keep: int = 1
    core: int | None = None
    nice: int = 0
    pids: list[int] = []


class Outcome(msgspec.Struct, kw_only=True):
    """What came back within the window.

    Attributes:
      latencies: seconds of each answered request.
      errors: what went wrong, by count.
      seconds: length of the window.
      client: share of its core that this process used.
      server: seconds of processor time that the server's processes used.
      others: cores that anything else kept busy.
      late: median seconds by which requests of an open loop left after their time.
      kept: index into `bodies`, and the answer.
    """

    latencies: list[float]
    errors: dict[str, int]
    seconds: float
    client: float
    server: float
    others: float
    late: float = 0.0
    kept: list[tuple[int, bytes]]


def measure(plan: Plan) -> Outcome:
    """Runs a plan in a process of its own.

    Raises:
      RuntimeError: that process failed.
    """
    command = [sys.executable, "-m", "measure.load"]
    done = subprocess.run(
        command if plan.core is None else processes.pinned(plan.core, command, plan.nice),
        start_new_session=True,
        input=msgspec.msgpack.encode(plan),
        capture_output=True,
        env=processes.environment(),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the load generator failed: {done.stderr.decode()[-2000:]}")
    return msgspec.msgpack.decode(done.stdout, type=Outcome)


class _Load:
    """One plan in progress."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._latencies: list[float] = []
        self._errors: Counter[str] = Counter()
        self._kept: list[tuple[int, bytes]] = []
        self._late: list[float] = []
        self._sent = 0
        self._reconnections = 0
        self._failure: BaseException | None = None
        self._out = 0
        self._opened = self._closed = float("inf")
        self._finished = asyncio.Event()
        self._marks: list[tuple[float, float, float, float]] = []

    async def run(self) -> Outcome:
        plan = self._plan
        host = f"127.0.0.1:{plan.port}"
        make: Callable[[], http1.Connection | http2.Connection]
        if plan.wire == "http":
            self._requests = [
                http1.encode(host, plan.path, headers, body)
                for headers, body in zip(plan.heads, plan.bodies, strict=True)
            ]
            make, count = http1.Connection, plan.concurrency
        else:
            self._requests = [http2.encode(body) for body in plan.bodies]
            headers = http2.header_block(host, plan.path)
            make, count = lambda: http2.Connection(headers), -(-plan.concurrency // _CALLS_PER_CONNECTION)
        loop = asyncio.get_running_loop()
        self._make = lambda: loop.create_connection(make, "127.0.0.1", plan.port)
        try:
            connections = [(await self._make())[1] for _ in range(count)]
        except OSError as error:
            return Outcome(
                latencies=[], errors={str(error): 1}, seconds=1.0, client=0.0, server=0.0, others=0.0, kept=[]
            )
        if plan.arrivals is None:
            await self._closed_loop(connections)
        else:
            await self._open_loop(connections, plan.arrivals)
        for connection in connections:
            connection.close()
        if self._failure is not None:
            raise self._failure
        (began, own, server, busy), (ended, own_end, server_end, busy_end) = self._marks
        seconds = ended - began
        spent = own_end - own
        return Outcome(
            latencies=self._latencies,
            errors=dict(self._errors),
            seconds=seconds,
            client=spent / seconds,
            server=server_end - server,
            others=max(0.0, (busy_end - busy - spent - (server_end - server)) / seconds),
            late=sorted(self._late)[len(self._late) // 2] if self._late else 0.0,
            kept=self._kept,
        )

    def _mark(self) -> None:
        self._marks.append(
            (
                time.perf_counter(),
                time.process_time(),
                processes.cpu_seconds(self._plan.pids),
                processes.busy_seconds(),
            )
        )

    def _number(self) -> int:
        number = self._plan.order[self._sent % len(self._plan.order)]
        self._sent += 1
        return number

    def _record(self, number: int, began: float, error: str | None, body: bytes) -> None:
        if error is not None:
            self._errors[error] += 1
            return
        self._latencies.append(time.perf_counter() - began)
        if len(self._latencies) % self._plan.keep == 0:
            self._kept.append((number, body))

    async def _closed_loop(self, connections: list[http1.Connection] | list[http2.Connection]) -> None:
        plan = self._plan
        loop = asyncio.get_running_loop()

        def opening() -> None:
            self._mark()
            self._opened = self._marks[0][0]

        def closing() -> None:
            self._mark()
            self._closed = self._marks[1][0]

        if plan.warm:
            loop.call_later(plan.warm, opening)
        else:
            opening()
        loop.call_later(plan.warm + plan.seconds, closing)
        for caller in range(plan.concurrency):
            self._next(connections[caller % len(connections)])
        try:
            await asyncio.wait_for(self._finished.wait(), plan.warm + plan.seconds + _PATIENCE)
        except TimeoutError:
            self._errors["no answer in time"] += self._out

    def _next(self, connection: http1.Connection | http2.Connection) -> None:
        number = self._number()
        self._out += 1
        began = time.perf_counter()

        def done(error: str | None, body: bytes) -> None:
            self._out -= 1
            now = time.perf_counter()
            if self._opened <= now < self._closed:
                self._record(number, began, error, body)
            if now >= self._closed:
                if not self._out:
                    self._finished.set()
            elif connection.open:
                self._next(connection)
            else:
                self._on_reconnected(self._next)

        connection.send(self._requests[number], done)

    def _on_reconnected(self, then: Callable[[http1.Connection | http2.Connection], None]) -> None:
        def ready(task: asyncio.Task[http1.Connection | http2.Connection]) -> None:
            if error := task.exception():
                self._failure = error
                self._finished.set()
            else:
                then(task.result())

        asyncio.ensure_future(self._reconnect()).add_done_callback(ready)

    async def _reconnect(self) -> http1.Connection | http2.Connection:
        """A new connection in place of one that the server closed."""
        self._reconnections += 1
        if self._reconnections > _RECONNECTIONS:
            raise ConnectionError(f"the server closed {_RECONNECTIONS} connections: {dict(self._errors)}")
        return (await self._make())[1]

    async def _open_loop(
        self, connections: list[http1.Connection] | list[http2.Connection], arrivals: list[float]
    ) -> None:
        loop = asyncio.get_running_loop()
        per_connection = 1 if self._plan.wire == "http" else _CALLS_PER_CONNECTION
        idle = [connection for connection in connections for _ in range(per_connection)]
        waiting: deque[tuple[int, float]] = deque()
        left = len(arrivals)
        due = iter(arrivals)
        self._mark()
        start = time.perf_counter() + 0.01
        upcoming = next(due)

        def send(number: int, scheduled: float) -> None:
            connection = idle.pop()
            if connection.open:
                send_on(connection, number, scheduled)
                return
            # A server may close what was idle for long.
            self._on_reconnected(lambda connection: send_on(connection, number, scheduled))

        def send_on(connection: http1.Connection | http2.Connection, number: int, scheduled: float) -> None:

            def done(error: str | None, body: bytes) -> None:
                nonlocal left
                left -= 1
                self._record(number, scheduled, error, body)
                idle.append(connection)
                if waiting:
                    send(*waiting.popleft())
                if not left:
                    self._finished.set()

            connection.send(self._requests[number], done)

        def tick() -> None:
            nonlocal upcoming
            now = time.perf_counter()
            while start + upcoming <= now:
                self._late.append(now - start - upcoming)
                request = (self._number(), start + upcoming)
                if idle:
                    send(*request)
                else:
                    waiting.append(request)
                upcoming = next(due, None)
                if upcoming is None:
                    return
            ahead = start + upcoming - now
            if ahead > _SPIN:
                loop.call_later(ahead - _SPIN, tick)
            else:
                loop.call_soon(tick)

        tick()
        try:
            await asyncio.wait_for(self._finished.wait(), arrivals[-1] + _PATIENCE)
        except TimeoutError:
            self._errors["no answer in time"] += left
        self._mark()


def main() -> None:
    plan = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Plan)
    outcome = uvloop.run(_Load(plan).run())
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcome))


if __name__ == "__main__":
    main()
