import asyncio
import random
import threading

import pytest

import language_toys as toys
from servax.core import monitoring
from servax.core.errors import MemoryShortage, NotReady, Overloaded, TooLarge, UsageError
from servax.core.events import BurstDone, RequestFailed, listening
from servax.generation import servable as module
from servax.generation.entrance import EngineLimits
from servax.generation.params import SamplingParams
from servax.generation.sequence import Finish
from servax.runtime.request import InferRequest
from servax.runtime.servable import State

FREE = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def ids(answer):
    return [token.id for token, _, _ in answer.tokens]


@pytest.mark.parametrize("length", [1, 2, 8, 9, 33, 60])
def test_the_greedy_answer_is_the_networks_own(servable, length):
    """Against the network's plain call, which knows no cache, chunks or bursts."""
    prompt = toys.prompt(length, length)
    answer = servable.generate(prompt, FREE)
    assert answer.finish is Finish.LENGTH
    assert (answer.usage.prompt, answer.usage.answer) == (length, 20)
    assert toys.agrees(ids(answer), *toys.greedy(toys.llama().net, prompt, 20))


def test_raw_functions_are_the_engines(servable):
    with pytest.raises(UsageError, match="/v1/completions"):
        servable.infer(InferRequest("decode", {}))
    with pytest.raises(UsageError, match="no tokenizer"):
        servable.generate("text")
    with pytest.raises(UsageError, match="no chat template"):
        servable.chat([{"role": "user", "content": "Hi"}])


def test_streams_at_once_are_what_each_is_alone(servable):
    prompts = [toys.prompt(seed, 5 + 7 * seed) for seed in range(8)]

    async def whole(prompt):
        return [token.id async for part in servable.stream(prompt, FREE) for token, _, _ in part.tokens]

    async def run():
        return await asyncio.gather(*map(whole, prompts))

    together = asyncio.run(run())
    assert together == [ids(servable.generate(prompt, FREE)) for prompt in prompts]
    assert servable.in_flight == 0


def test_who_stops_reading_ends_the_sequence(servable):
    long = SamplingParams(max_tokens=90, ignore_eos=True)

    async def cancelled():
        stream = servable.stream([1, 2], long)
        await anext(stream)
        await stream.aclose()

    async def killed():
        async def read():
            async for _ in servable.stream([1, 2], long):
                started.set()

        started = asyncio.Event()
        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for stops in (cancelled, killed):
        asyncio.run(stops())
        servable.generate([3], FREE)  # the steps in between have run
        assert (servable.in_flight, servable.running, servable.queued) == (0, 0, 0)


def test_refusals_come_before_the_queue_and_are_told_of():
    told = []
    with toys.llama().servable(limits=EngineLimits(requests=0)) as servable:
        with listening(lambda event: told.append(event.status) if isinstance(event, RequestFailed) else None):
            with pytest.raises(TooLarge):
                servable.generate(toys.prompt(1, 96), FREE)
            with pytest.raises(Overloaded):
                servable.generate([1], FREE)
        assert told == ["TooLarge", "Overloaded"]
        assert servable.in_flight == 0


def test_drain_lets_those_that_run_finish_and_close_answers_the_rest():
    servable = toys.llama().servable()
    answers, errors = [], []

    def ask(seed):
        try:
            answers.append(servable.generate(toys.prompt(seed, 3), SamplingParams(max_tokens=90, ignore_eos=True)))
        except NotReady as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(9)]
    started = threading.Event()
    with listening(lambda event: started.set() if isinstance(event, BurstDone) else None):
        for thread in threads:
            thread.start()
        assert started.wait(60)
    servable.close(timeout=0)
    for thread in threads:
        thread.join()
    assert len(answers) + len(errors) == 9
    assert servable.state is State.UNLOADED
    with pytest.raises(NotReady):
        servable.generate([1], FREE)
    servable.close()


def test_nothing_compiles_after_ready(servable):
    """Counted by jax.monitoring over 300 requests with every parameter, every length up to the limit, and aborts."""
    _no_compiles(servable, 300)


@pytest.mark.long
def test_nothing_compiles_after_ready_in_2000_requests(servable):
    _no_compiles(servable, 2000)


def _no_compiles(servable, count):
    rng = random.Random(1)

    async def one():
        length = rng.randrange(1, 96)
        params = SamplingParams(
            max_tokens=rng.choice([None, 1, 96 - length]),
            temperature=rng.choice([0, 1, 1e-6, 2]),
            top_k=rng.choice([0, 1, 40, 100]),
            top_p=rng.choice([1, 0.9, 0.1]),
            min_p=rng.choice([0, 0.1]),
            presence_penalty=rng.choice([0, 1]),
            frequency_penalty=rng.choice([0, -1]),
            repetition_penalty=rng.choice([1, 1.2]),
            logit_bias=rng.choice([{}, {5: 3.0, 7: float("-inf")}]),
            seed=rng.choice([None, 3]),
            stop_token_ids=rng.choice([(), (9, 10)]),
            min_tokens=rng.choice([0, 1]),
            ignore_eos=rng.random() < 0.5,
            logprobs=rng.choice([None, 0, 20]),
        )
        stream = servable.stream(toys.prompt(rng.randrange(20), length), params)
        parts = 0
        async for part in stream:
            parts += 1
            if rng.random() < 0.1 and part.finish is None:
                await stream.aclose()
                break

    async def run():
        gate = asyncio.Semaphore(12)

        async def gated():
            async with gate:
                await one()

        await asyncio.gather(*(gated() for _ in range(count)))

    before = monitoring.counts(monitoring.SERVING).total
    asyncio.run(run())
    assert monitoring.counts(monitoring.SERVING).total == before
    assert servable.generate([1], FREE).finish is Finish.LENGTH
    assert (servable.in_flight, servable.running, servable.queued) == (0, 0, 0)


def test_a_cache_that_does_not_fit_says_which_context_would(monkeypatch):
    """4 slots of 128 tokens, 2 layers of keys and values, 2 heads of 8 floats: 128 KiB."""
    toy = toys.llama()
    beside = 4 * (4 + 4 + 1) + 2 * 4 * 320 * 4
    memory = [toy.table[key].memory for key in toy.table]
    programs = sum(each["code"] for each in memory) + max(each["temp"] for each in memory)
    cache = 4 * 128 * 2 * 2 * 2 * 8 * 4
    monkeypatch.setattr(module, "free_bytes", lambda device: beside + programs + cache // 2)
    with pytest.raises(MemoryShortage, match="context=48, the largest that fits 4 slots"):
        toy.servable()
    monkeypatch.setattr(module, "free_bytes", lambda device: 1000)
    with pytest.raises(MemoryShortage, match="fewer slots"):
        toy.servable()
    monkeypatch.setattr(module, "free_bytes", lambda device: beside + programs + cache)
    toy.servable().close()


def test_what_is_dropped_without_close_frees_its_memory():
    import gc
    import weakref

    servable = toys.llama().servable()
    servable.generate([1], FREE)
    engine = weakref.ref(servable.engine)
    del servable
    gc.collect()
    assert engine() is None


def test_a_network_without_a_cache_generates_what_it_computes_step_by_step():
    """The tutorial's GPT, whose position table is no longer than the context."""
    from flax import nnx

    from servax.zoo.gpt import GPT, GPTConfig

    net = GPT(GPTConfig(context=64, width=32, layers=2, heads=2), rngs=nnx.Rngs(3))
    net.tokens.embedding[...] = net.tokens.embedding[...] * 30
    toy = toys.compiled(net, context=64, chunks=(8, 32), batches=(2,), slots=2, vocabulary=256)
    assert toy.model.spec.recomputes
    with toy.servable() as servable:
        for length in (1, 7, 30):
            prompt = [token % 256 for token in toys.prompt(length, length)]
            tokens = ids(servable.generate(prompt, temperature=0, max_tokens=64 - length, ignore_eos=True))
            assert toys.agrees(tokens, *toys.greedy(net, prompt, 64 - length, length=64))
