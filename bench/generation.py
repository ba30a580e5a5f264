"""servax's engine against other ways to generate text, side by side in one run, on two cores: SmolLM2-135M.

All have the weights of one GGUF file of 4 bits. Each is a process of its own, loaded once; they are asked in turn, so
that a machine whose speed drifts treats all alike. Printed are medians of runs.

- Contexts: sequences grow from half a context to its end (from 64 tokens before it at 512 and more).
- First token: a prompt that was never seen, alone. Prefill: its tokens, by the time beyond that of one token's prompt.
- Decode: greedy, all sequences at once, from when all have begun to when the first has ended.
- servax by its engine, without a server; then what is left of that through the OpenAI API, in 16 streams; a Poisson
  load through the API; and `aiperf`, from an environment of its own.
- The wrappers; what the allocated window costs; what 8 bits cost in quality.

    python bench/generation.py [--quick] [--only servax,llamacpp,torch,naive] [--runs 3]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from measure import generation_report, processes, smollm2, streams
from measure.generators import KINDS, Running, Unavailable, install
from workloads import ROOT, machine, write_results

BATCHES = (1, 4, 16)
SWEEP = (1, 2, 4, 8, 16)
SERVED = "int8"
"""The weights behind the API, and of the windows."""
WRAPPED = "float32"
"""The weights of the bundle whose wrappers are compared."""
WINDOWS = (512, 2048)
STREAMS, PROMPT, ANSWER = 16, 64, 64
LOAD, LOAD_TOKENS = 0.7, 32
"""Poisson load, of what prompts alone and 16 streams reached; tokens of each of its answers."""


def span(context: int) -> tuple[int, int]:
    """Tokens of the prompt, and steps after it."""
    steps = min(64, context // 2)
    return context - steps, steps


def source(kind: str, folder: Path) -> str:
    """Where a generator finds the model, made where it is missing."""
    wanted = KINDS[kind].source
    if wanted == "gguf":
        return str(smollm2.smollm2.package_file())
    return str(getattr(smollm2, wanted)(folder))


def measure_generators(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Every generator at every context and batch, all loaded at the same time and asked in turn."""
    with ExitStack() as stack:
        running: dict[str, Running] = {}
        for name in arguments.kinds:
            kind = KINDS[name]
            try:
                python = install(kind.script, arguments.folder.parent.parent / "venvs")
                given = [source(name, arguments.folder), *kind.arguments]
                say(f"loading {kind.title}")
                log = arguments.folder / "logs" / f"{name}.log"
                started = Running(python, kind.script, given, log, arguments.nice)
            except (Unavailable, subprocess.CalledProcessError) as error:
                lost(results, name, error)
                continue
            running[name] = stack.enter_context(started)
        for number in range(arguments.runs):
            run: dict[str, Any] = {name: {"first": {}, "decode": {}} for name in running}
            results["runs"].append(run)
            for context in arguments.contexts if number == 0 else arguments.contexts[:1]:
                start, steps = span(context)
                say(f"run {number + 1} of {arguments.runs}: context {context}")
                shapes: list[int | None] = [None, *(SWEEP if context == arguments.contexts[0] else BATCHES)]
                for batch in shapes:
                    for name in list(running):
                        ours = KINDS[name].script == "servax_generator"
                        if context > KINDS[name].longest or (batch not in (None, *BATCHES) and not ours):
                            continue
                        measured = run[name]
                        try:
                            if batch is None:
                                for tokens in (1, context):
                                    took = running[name].first(tokens, arguments.seconds / 2)
                                    measured["first"][str(tokens)] = statistics.median(took)
                            else:
                                found = running[name].decode(batch, start, steps, arguments.seconds)
                                measured["decode"].setdefault(str(context), {})[str(batch)] = found
                        except Unavailable as error:
                            lost(results, name, error)
                            del running[name]


def measure_wrappers(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """The same bundle by each of its wrappers."""
    context = arguments.contexts[0]
    start, steps = span(context)
    bundle = str(smollm2.bundle(arguments.folder, WRAPPED))
    with ExitStack() as stack:
        running: dict[str, Running] = {}
        for wrapper in ("aot", "export", "jit"):
            say(f"loading the {wrapper} wrapper")
            log = arguments.folder / "logs" / f"wrapper-{wrapper}.log"
            try:
                started = Running(Path(sys.executable), "servax_generator", [bundle, wrapper], log, arguments.nice)
            except Unavailable as error:
                lost(results, f"wrapper {wrapper}", error)
                continue
            running[wrapper] = stack.enter_context(started)
            results["wrappers"][wrapper] = {"ready": started.seconds_to_ready, "first": [], "1": [], "16": []}
        for _ in range(arguments.runs):
            for wrapper, generator in running.items():
                found = results["wrappers"][wrapper]
                found["first"] += generator.first(context, arguments.seconds / 2)
                for batch in (1, 16):
                    found[str(batch)].append(generator.decode(batch, start, steps, arguments.seconds)["rate"])


def measure_windows(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Seconds of a step of 16 sequences, by the context in use and by the window that was allocated."""
    checkpoint = str(smollm2.checkpoint(arguments.folder))
    with ExitStack() as stack:
        running: dict[int, Running] = {}
        for window in WINDOWS:
            say(f"compiling a window of {window}")
            log = arguments.folder / "logs" / f"window-{window}.log"
            given = [checkpoint, SERVED, str(window)]
            started = Running(Path(sys.executable), "servax_generator", given, log, arguments.nice)
            running[window] = stack.enter_context(started)
        for used in (128, 256, 512, 1024, 2048):
            for window, generator in running.items():
                if used <= window:
                    rates = [
                        generator.decode(16, used - 32, 32, arguments.seconds)["rate"] for _ in range(arguments.runs)
                    ]
                    results["windows"].setdefault(str(window), {})[str(used)] = 16 / statistics.median(rates)


@contextmanager
def server(checkpoint: str, arguments: argparse.Namespace) -> Generator[int]:
    """`servax serve` for the length of a block; its port.

    Raises:
      Unavailable: it did not become ready.
    """
    port = processes.free_port()
    command = [sys.executable, "-m", "servax", "serve", "servax.zoo.smollm2:model", "--checkpoint", checkpoint]
    command += ["--weights", SERVED, "--cache-dir", str(arguments.folder / "jax_cache")]
    command += ["--http", str(port), "--grpc", "-1", "--no-access-log"]
    log = arguments.folder / "logs" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen(
            processes.pinned(None, command, arguments.nice),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=processes.environment(),
            start_new_session=True,
        )
    try:
        ends = time.perf_counter() + 240
        while True:
            if child.poll() is not None or time.perf_counter() > ends:
                raise Unavailable(f"the server is not ready: {log.read_text(errors='replace').strip()[-400:]}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5):
                    break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        child.terminate()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def measure_api(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Sixteen streams beside the engine alone, in turn; then a Poisson load."""
    checkpoint = str(smollm2.checkpoint(arguments.folder))
    api = results["api"]
    say("loading the server")
    with ExitStack() as stack:
        log = arguments.folder / "logs" / "api-engine.log"
        started = Running(Path(sys.executable), "servax_generator", [checkpoint, SERVED], log, arguments.nice)
        engine = stack.enter_context(started)
        port = stack.enter_context(server(checkpoint, arguments))

        def ask(prompts: list[list[int]], tokens: int, arrivals: list[float] | None = None) -> list[streams.Stream]:
            plan = streams.Plan(
                port=port, model="smollm2", prompts=prompts, tokens=tokens, arrivals=arrivals, nice=arguments.nice
            )
            return streams.measure(plan)

        random = np.random.default_rng(5)
        for _ in range(max(3, arguments.runs)):
            prompt = random.integers(100, 40_000, PROMPT).tolist()
            ask([prompt] * STREAMS, 1)
            answers = ask([prompt] * STREAMS, ANSWER)
            if errors := [stream.error for stream in answers if stream.error]:
                raise Unavailable(f"the API: {errors[0]}")
            tokens, seconds = streams.steady_rate(answers)
            api["streams"].append(tokens / seconds)
            api["engine"].append(engine.decode(STREAMS, PROMPT, ANSWER, arguments.seconds)["rate"])
        alone = statistics.median(engine.first(PROMPT, 1.0))
        rate = LOAD / (alone + LOAD_TOKENS / statistics.median(api["streams"]))
        count = max(8, int(rate * arguments.load))
        arrivals = np.cumsum(random.exponential(1 / rate, count)).tolist()
        prompts = [random.integers(100, 40_000, length).tolist() for length in random.integers(16, 129, count)]
        say(f"{count} requests at {rate:.1f} a second")
        answers = ask(prompts, LOAD_TOKENS, arrivals)
        results["poisson"] = poisson(answers, rate)
        aiperf(results, port, arguments)


def poisson(answers: list[streams.Stream], rate: float) -> dict[str, Any]:
    """First tokens and gaps of streams that came and went."""
    good = [stream for stream in answers if stream.error is None]
    first = [stream.arrivals[0][0] - stream.sent for stream in good]
    gaps = [after[0] - before[0] for stream in good for before, after in pairwise(stream.arrivals)]
    each = [
        (stream.arrivals[-1][0] - stream.arrivals[0][0]) / (stream.arrivals[-1][1] - stream.arrivals[0][1])
        for stream in good
        if stream.arrivals[-1][1] > stream.arrivals[0][1]
    ]
    lasted = max(stream.arrivals[-1][0] for stream in good) - min(stream.sent for stream in good)
    return {
        "requests": len(answers),
        "errors": len(answers) - len(good),
        "requests/s": rate,
        "tokens/s": sum(stream.arrivals[-1][1] for stream in good) / lasted,
        "first": np.percentile(first, [50, 99]).tolist(),
        "gap": np.percentile(gaps, [50, 99]).tolist(),
        "token": np.percentile(each, [50, 99]).tolist(),
    }


def aiperf(results: dict[str, Any], port: int, arguments: argparse.Namespace) -> None:
    """NVIDIA's load generator for OpenAI's API, unchanged, with the tokenizer from disk."""
    try:
        python = install("aiperf_client", arguments.folder.parent.parent / "venvs")
    except Unavailable as error:
        lost(results, "aiperf", error)
        return
    say("aiperf")
    output = arguments.folder / "aiperf"
    command = [str(python.parent / "aiperf"), "profile", "--model", "smollm2", "--url", f"http://127.0.0.1:{port}"]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(smollm2.hugging_face(arguments.folder))]
    command += ["--concurrency", "8", "--request-count", "32", "--synthetic-input-tokens-mean", "64"]
    command += ["--output-tokens-mean", "32", "--extra-inputs", "ignore_eos:true", "--ui", "none"]
    command += ["--output-artifact-dir", str(output), "--random-seed", "1"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        lost(results, "aiperf", "not done within 240 s")
        return
    report = output / "profile_export_aiperf.json"
    if done.returncode or not report.exists():
        lost(results, "aiperf", f"status {done.returncode}: {(done.stdout + done.stderr).strip()[-400:]}")
        return
    whole = json.loads(report.read_text())
    wanted = ("request_count", "error_request_count", "output_token_throughput", "time_to_first_token")
    wanted += ("inter_token_latency", "request_latency", "output_sequence_length")
    results["aiperf"] = {name: whole[name] for name in wanted if whole.get(name)}


def quality(results: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Of bfloat16 and int8 against float32, on text."""
    say("quality")
    given = [str(smollm2.checkpoint(arguments.folder)), str(arguments.text)]
    done = subprocess.run(
        processes.pinned(None, [sys.executable, "-m", "measure.quality", *given], arguments.nice),
        stdout=subprocess.PIPE,
        env=processes.environment(),
        start_new_session=True,
        timeout=400,
        check=True,
    )
    results["quality"] = json.loads(done.stdout)


def main() -> None:
    arguments = options()
    results: dict[str, Any] = {
        "machine": {**machine(), "load average at start": os.getloadavg()[0]},
        "options": {name: value for name, value in vars(arguments).items() if name != "folder"},
        "unavailable": {},
        "runs": [],
        "wrappers": {},
        "windows": {},
        "quality": None,
        "api": {"streams": [], "engine": []},
        "poisson": None,
        "aiperf": None,
    }
    began = time.perf_counter()
    for name, part in (
        ("generators", measure_generators),
        ("api", measure_api),
        ("windows", measure_windows),
        ("quality", quality),
        ("wrappers", measure_wrappers),
    ):
        if name in ("generators", *arguments.parts):
            try:
                part(results, arguments)
            except (Unavailable, subprocess.SubprocessError, RuntimeError) as error:
                lost(results, name, error)
            results["seconds"] = time.perf_counter() - began
            if arguments.write:
                write_results(Path(__file__), results)
    print(generation_report.text(results))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    families = ["servax", "llamacpp", "torch", "naive"]
    parts = ["api", "wrappers", "windows", "quality"]
    parser.add_argument("--only", type=_list, default=families, metavar="LIST", help=f"of {','.join(families)}")
    parser.add_argument("--parts", type=_list, default=parts, metavar="LIST", help=f"of {','.join(parts)}")
    parser.add_argument("--contexts", type=_numbers, default=[128, 512, 1024], metavar="LIST", help="tokens")
    parser.add_argument("--runs", type=int, default=3, help="of the first context; longer ones are measured once")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement, at most")
    parser.add_argument("--load", type=float, default=20.0, help="seconds of the Poisson load")
    parser.add_argument("--text", type=int, default=2000, help="tokens that quality is measured on")
    parser.add_argument("--nice", type=int, default=0, help="priority; below 0 disturbs less on a busy machine (root)")
    parser.add_argument("--no-write", dest="write", action="store_false", help="print only")
    parser.add_argument("--quick", action="store_true", help="one run of short measurements at one context")
    parser.add_argument("--folder", type=Path, default=ROOT / ".servax" / "bench" / "generation")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.seconds, arguments.contexts = 1, 1.5, arguments.contexts[:1]
        arguments.load, arguments.text, arguments.parts = 6.0, 500, ["api"]
    arguments.kinds = [name for name, kind in KINDS.items() if kind.script.partition("_")[0] in arguments.only]
    return arguments


def lost(results: dict[str, Any], name: str, why: object) -> None:
    results["unavailable"][name] = str(why)
    say(f"{name}: {why}")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _list(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
