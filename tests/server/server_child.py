"""A process that serves the toy, for tests of `server.process`: `python server_child.py MODE PORT [DRAIN [SETTINGS]]`.

It talks over its standard streams: a line on stdin lets go of what MODE holds.
"""

import asyncio
import gc
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import serving_toys as toys
from servax.core.errors import BundleError, UsageError
from servax.runtime.servable import State
from servax.server.models import LoadedModels
from servax.server.process import Told, run
from servax.server.settings import make
from servax.stages.buckets import Bucket

mode, port = sys.argv[1], int(sys.argv[2])
drain_timeout = float(sys.argv[3]) if len(sys.argv) > 3 else 60.0
KEY = ("predict", Bucket.of(batch=1, length=8))


class Death(BaseException):
    """What no code of ours expects on the device's thread."""


def wait_for_line() -> None:
    print("held", flush=True)
    sys.stdin.readline()


def running_loop() -> str:
    """The library of the event loop that the process runs on."""
    loops = (each for each in gc.get_objects() if isinstance(each, asyncio.AbstractEventLoop) and each.is_running())
    return type(next(loops)).__module__.partition(".")[0]


def load():
    if mode == "broken":
        raise BundleError("the bundle is damaged", where="params/0", remedy="copy it again")
    if mode == "contradiction":
        raise UsageError("--require aot and --no-executables contradict one another", remedy="leave one of them out")
    if mode == "bug":
        raise ZeroDivisionError("a bug")
    if mode == "loading":
        wait_for_line()
    if mode == "plain":
        return toys.toy()
    if mode == "twins":
        return [toys.toy(), toys.toy()]
    if mode == "loop":
        return toys.toy(running_loop())
    held = toys.Held(toys.table()[KEY])

    class Program:
        calls = 0

        def __call__(self, params, state, inputs):
            Program.calls += 1
            if (mode == "warming" and Program.calls == 1) or (mode == "running" and servable.state is State.READY):
                wait_for_line()
            if mode == "dying" and servable.state is State.READY:
                raise Death("out of luck")
            return held.loaded.program(params, state, inputs)

    servable = toys.toy(table=toys.with_program(KEY, Program()))
    return [servable]


options = {"http": port, "grpc": 0, "drain_timeout": drain_timeout} | json.loads(
    sys.argv[4] if len(sys.argv) > 4 else "{}"
)
as_json = options.pop("as_json", False)
sys.exit(run(LoadedModels(load), make(**options), Told(as_json)))
