"""Decoders as models: a language model is a `Model` whose functions write into slots of one cache.

`begin` puts a sequence into a slot, `copy` takes over another slot's cache, `exchange` has two slots change places,
`prefill` writes the keys and values of a chunk of its tokens at an offset, and `decode` draws the next tokens of the
first `batch` slots, several steps a call.
Shapes add and do not multiply: a few chunks, a few batches, and no program for a length.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import jax
import jax.numpy as jnp

from servax.core.errors import ModelError, UsageError
from servax.model.model import Model
from servax.model.sampling import ROW_INPUTS, STOPS, TOP, Rows, draw
from servax.model.texts import LanguageTexts, SpecialTokens, TextSource, read_text

BEGIN, COPY, EXCHANGE, PREFILL, DECODE = "begin", "copy", "exchange", "prefill", "decode"

Weights = Literal["float32", "bfloat16", "int8"]
"""How parameters are kept. `int8`: matrices of 8 bits, and inputs of products brought to 8 bits as they come (W8A8)."""

MOST_BIASES = 300
"""Most entries of a request's `logit_bias`, as the OpenAI API has it."""

Cache = Mapping[str, Any]
"""Arrays by name, `[slots, ...]` each."""

State = Mapping[str, Any]

_TOLD = {"steps": (1, 2), "live": (1, 1), "limit": (2**20, 2**30), "start": (0, 0)}
"""Of the inputs of parity's samples. Rows run and go on, two steps at most, since op by op each costs all layers.

A chunk begins its sequence: behind a cache of zeros a trained network is outside of all that it has seen, and rounding
in bfloat16 grows from layer to layer without bound.
"""


@runtime_checkable
class Decoder(Protocol):
    """What a network offers to be generated with; all of it pure and traceable.

    Attributes:
      vocabulary: number of token ids.
    """

    vocabulary: int

    def cache(self, slots: int, length: int) -> Mapping[str, str]:
        """Specs of the cache by name, such as `"bfloat16[16, 3, 2176, 64]"`: slots first, `length` tokens or more."""
        ...

    def prefill(self, cache: Cache, tokens: jax.Array, slot: jax.Array, start: jax.Array) -> Cache:
        """The cache with a chunk of a sequence in it.

        Args:
          cache: as `cache` says.
          tokens: int32 `[chunk]`; what is filled up on the right is overwritten later, and read by nothing before.
          slot: int32 `[]`, the sequence's row.
          start: int32 `[]`, position of the first token; `start + chunk` does not exceed the cache's length.
        """
        ...

    def decode(
        self, cache: Cache, tokens: jax.Array, positions: jax.Array, running: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """The cache with one more token in each running row, and the logits of the next, float32 `[batch, vocabulary]`.

        Args:
          cache: as `cache` says; row `i` of the batch is slot `i`.
          tokens: int32 `[batch]`.
          positions: int32 `[batch]`, of the tokens.
          running: bool `[batch]`; other rows write nothing, and their logits are not read.
        """
        ...


@dataclass(frozen=True, slots=True)
class LanguageSpec:
    """What the engine must know of a language model beside its functions.

    Attributes:
      slots: sequences that the cache holds.
      context: longest sequence, prompt and answer, in tokens.
      burst: most tokens a row gets in one call of `decode`.
      vocabulary: number of token ids.
      end: ids that end an answer.
      recomputes: whether every token costs the whole sequence, because the network has no cache.
    """

    slots: int
    context: int
    burst: int
    vocabulary: int
    end: tuple[int, ...] = ()
    recomputes: bool = False


class LanguageModel(Model):
    """A `Model` that generates text.

    Args:
      source: a module that is a `Decoder`, or a factory of one. A module that only maps tokens, int32 `[batch,
        length]`, to logits, `[batch, length, vocabulary]`, is generated with as well, by computing the whole sequence
        again for every token; `vocabulary` must then be given, and `spec.recomputes` says so. A factory that takes
        `weights` can be built in each kind of `Weights`.
      slots: sequences that the cache holds; also the largest batch.
      context: longest sequence, prompt and answer, in tokens.
      chunks: sizes of the pieces that prompts are written in.
      batches: sizes of `decode`; the largest is `slots`.
      burst: most tokens a row gets in one call of `decode`.
      end: ids that end an answer.
      vocabulary: where the module does not say it.
      tokenizer: Hugging Face's `tokenizer.json`: a path, relative ones from the model's source file, or a function that
        gives its text. None: prompts are token ids.
      template: the chat template, likewise; a text with a brace in it is the template itself.
      special: tokens that the template may name, such as `{"bos_token": "<s>"}`, or a function that gives them.
      name: of the model.

    Raises:
      ModelError: the module is no decoder, or the sizes contradict one another.

    Attributes:
      spec: what the engine must know.
      weights: how its parameters are kept, where that was said.
    """

    def __init__(
        self,
        source: Any,
        *,
        slots: int = 16,
        context: int = 2048,
        chunks: Sequence[int] = (32, 128, 512),
        batches: Sequence[int] = (1, 2, 4, 8, 16),
        burst: int = 8,
        end: Sequence[int] = (),
        vocabulary: int | None = None,
        tokenizer: TextSource | None = None,
        template: TextSource | None = None,
        special: SpecialTokens | None = None,
        name: str | None = None,
    ) -> None:
        self.weights: Weights | None = None
        self._source = source
        self._given: dict[str, Any] = {
            "slots": slots,
            "context": context,
            "chunks": chunks,
            "batches": batches,
            "burst": burst,
            "end": end,
            "vocabulary": vocabulary,
            "tokenizer": tokenizer,
            "template": template,
            "special": special,
        }
        chunks = sorted(chunk for chunk in set(chunks) if chunk <= context) or [context]
        batches = sorted({*(batch for batch in batches if batch < slots), slots})
        rows = max(slots, 2)  # with one, `decode` could be traced at one size only
        cache, known, recomputes = _describe(source, rows, context + chunks[0], vocabulary)
        self.spec = LanguageSpec(slots, context, burst, known, tuple(end), recomputes)
        row = {
            "tokens": f"int32[{rows}]",
            "positions": f"int32[{rows}]",
            "done": f"bool[{rows}]",
            "counts": f"int32[{rows}, {known}]",
            "bias": f"float32[{rows}, {known}]",
        }
        super().__init__(source, batch=None, state={"cache": dict(cache), "slot": row}, name=name)
        decoder = _Recompute(context, chunks, known) if recomputes else None
        for function, inputs, buckets in (
            (_begin(self.spec), _begin_inputs(self.spec), {}),
            (_copy, {"source": "int32[]", "target": "int32[]", "n": "int32[]"}, {}),
            (_exchange, {"one": "int32[]", "other": "int32[]"}, {}),
            (_prefill(decoder), {"tokens": "int32[chunk]", "slot": "int32[]", "start": "int32[]"}, {"chunk": chunks}),
            (_decode(self.spec, decoder), _decode_inputs(self.spec), {"batch": batches}),
        ):
            declared = function.__name__.strip("_")
            self.function(inputs=inputs, buckets=buckets, stateful=True, name=declared)(function)
            told = {key: values for key, values in _TOLD.items() if key in inputs}
            self.functions[declared] = replace(self.functions[declared], told=told)

    def texts(self) -> LanguageTexts:
        """Its tokenizer and chat template, read now.

        Raises:
          UsageError: a file is not there.
        """
        folder = None if self.source_file is None else self.source_file.parent
        template: TextSource | None = self._given["template"]
        special: SpecialTokens = self._given["special"] or {}
        written = template if isinstance(template, str) and "{" in template else None
        return LanguageTexts(
            read_text(self._given["tokenizer"], folder, "tokenizer"),
            written or read_text(template, folder, "chat template"),
            special() if callable(special) else special,
        )

    def with_weights(self, weights: str) -> LanguageModel:
        """The model with its parameters kept as `weights` says.

        Raises:
          UsageError: there is no such kind, or 8 bits are asked of a network that does not offer them.
        """
        if weights not in get_args(Weights):
            raise UsageError("there are no such weights", seen=weights, expected=" or ".join(get_args(Weights)))
        takes = callable(self._source) and "weights" in _parameters_of(self._source)
        if not takes and weights == "int8":
            raise UsageError(
                f"{self.name} does not offer weights of 8 bits",
                expected="a factory that takes weights=; of int8, each matrix is int8 with a float32 scale beside it",
                remedy="build it in bfloat16, or give its factory the argument",
            )
        source = functools.partial(self._source, weights=weights) if takes else self._source
        made = LanguageModel(source, **self._given, name=self.name)
        made.reference, made.module, made.source_file = self.reference, self.module, self.source_file
        made.weights = cast("Weights", weights)
        return made


def _begin_inputs(spec: LanguageSpec) -> dict[str, str]:
    return {
        "slot": "int32[]",
        "token": "int32[]",
        "position": "int32[]",
        "prompt": f"int32[{spec.context}]",
        "bias_ids": f"int32[{MOST_BIASES}]",
        "bias_values": f"float32[{MOST_BIASES}]",
    }


def _decode_inputs(spec: LanguageSpec) -> dict[str, str]:
    return {
        "steps": "int32[]",
        "live": "bool[batch]",
        "limit": "int32[batch]",
        "stops": f"int32[batch, {STOPS}]",
        "forced": f"int32[batch, {spec.burst}]",
        "mask": f"uint32[batch, {-(-spec.vocabulary // 32)}]",
        **{name: f"{dtype}[batch]" for name, dtype in ROW_INPUTS.items()},
    }


def _begin(spec: LanguageSpec) -> Callable[..., Any]:
    def begin(
        net: Any,
        state: State,
        *,
        slot: jax.Array,
        token: jax.Array,
        position: jax.Array,
        prompt: jax.Array,
        bias_ids: jax.Array,
        bias_values: jax.Array,
    ) -> tuple[State, Mapping[str, jax.Array]]:
        """Puts a sequence into a slot: the last token of its prompt is `token`, at `position`.

        `prompt` and `bias_ids` are filled up with -1.
        """
        slot = jnp.clip(slot, 0, spec.slots - 1)
        position = jnp.clip(position, 0, spec.context - 1)
        row = dict(state["slot"])
        counts = jnp.zeros(spec.vocabulary, jnp.int32)
        counts = counts.at[jnp.where(prompt < 0, spec.vocabulary, prompt)].set(1, mode="drop")
        bias = jnp.zeros(spec.vocabulary, jnp.float32)
        bias = bias.at[jnp.where(bias_ids < 0, spec.vocabulary, bias_ids)].set(bias_values, mode="drop")
        row["tokens"] = row["tokens"].at[slot].set(token)
        row["positions"] = row["positions"].at[slot].set(position)
        row["done"] = row["done"].at[slot].set(False)
        row["counts"] = row["counts"].at[slot].set(counts)
        row["bias"] = row["bias"].at[slot].set(bias)
        return {"cache": state["cache"], "slot": row}, {"position": position}

    return begin


def _copy(
    net: Any, state: State, *, source: jax.Array, target: jax.Array, n: jax.Array
) -> tuple[State, Mapping[str, jax.Array]]:
    """Copies all of one slot into another; of `n` tokens, which is given back."""

    def copied(leaf: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_index_in_dim(leaf, source, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(leaf, row, target, axis=0)

    return jax.tree.map(copied, {"cache": dict(state["cache"]), "slot": dict(state["slot"])}), {"n": n}


def _exchange(net: Any, state: State, *, one: jax.Array, other: jax.Array) -> tuple[State, Mapping[str, jax.Array]]:
    """Has two slots change places; gives back the first."""

    def exchanged(leaf: jax.Array) -> jax.Array:
        rows = [jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False) for index in (one, other)]
        leaf = jax.lax.dynamic_update_index_in_dim(leaf, rows[1], one, axis=0)
        return jax.lax.dynamic_update_index_in_dim(leaf, rows[0], other, axis=0)

    return jax.tree.map(exchanged, {"cache": dict(state["cache"]), "slot": dict(state["slot"])}), {"one": one}


def _prefill(decoder: _Recompute | None) -> Callable[..., Any]:
    def prefill(
        net: Any, state: State, *, tokens: jax.Array, slot: jax.Array, start: jax.Array
    ) -> tuple[State, Mapping[str, jax.Array]]:
        """Writes the keys and values of `tokens` into a slot from `start` on."""
        run = net.prefill if decoder is None else decoder.prefill
        cache = run(state["cache"], tokens, slot, start)
        return {"cache": dict(cache), "slot": state["slot"]}, {"start": start}

    return prefill


def _decode(spec: LanguageSpec, decoder: _Recompute | None) -> Callable[..., Any]:
    def decode(
        net: Any,
        state: State,
        *,
        steps: jax.Array,
        live: jax.Array,
        limit: jax.Array,
        stops: jax.Array,
        forced: jax.Array,
        mask: jax.Array,
        **rows: jax.Array,
    ) -> tuple[State, Mapping[str, jax.Array]]:
        """Draws up to `steps` tokens for each live row; a row is done at an id of `stops` or at position `limit`."""
        batch = live.shape[0]
        every = jnp.arange(batch)

        def running(slot: Mapping[str, jax.Array]) -> jax.Array:
            return live & ~slot["done"][:batch]

        def goes_on(carry: Any) -> jax.Array:
            step, state, _ = carry
            return (step < jnp.clip(steps, 0, spec.burst)) & jnp.any(running(state["slot"]))

        def body(carry: Any) -> Any:
            step, state, outputs = carry
            slot = dict(state["slot"])
            run = running(slot)
            positions = slot["positions"][:batch]
            arguments = (state["cache"], slot["tokens"][:batch], positions, run)
            cache, logits = net.decode(*arguments) if decoder is None else decoder.decode(net, *arguments)
            given = Rows(
                **rows,
                stops=stops,
                forced=jax.lax.dynamic_index_in_dim(forced, step, axis=1, keepdims=False),
                mask=mask,
                bias=slot["bias"],
                counts=slot["counts"],
                positions=positions + 1,
            )
            drawn = draw(logits, given)
            ends = jnp.any(drawn.tokens[:, None] == stops, axis=1) | (positions + 2 >= limit)
            slot["tokens"] = slot["tokens"].at[:batch].set(jnp.where(run, drawn.tokens, slot["tokens"][:batch]))
            slot["positions"] = slot["positions"].at[:batch].add(run.astype(jnp.int32))
            slot["done"] = slot["done"].at[:batch].set(slot["done"][:batch] | (run & ends))
            slot["counts"] = slot["counts"].at[every, drawn.tokens].add(jnp.where(run, 2, 0), mode="drop")
            return step + 1, {"cache": dict(cache), "slot": slot}, _written(outputs, step, run, drawn)

        outputs = {
            "tokens": jnp.full((batch, spec.burst), -1, jnp.int32),
            "logprobs": jnp.zeros((batch, spec.burst), jnp.float32),
            "top_tokens": jnp.zeros((batch, spec.burst, min(TOP, spec.vocabulary)), jnp.int32),
            "top_logprobs": jnp.zeros((batch, spec.burst, min(TOP, spec.vocabulary)), jnp.float32),
        }
        start = {"cache": dict(state["cache"]), "slot": dict(state["slot"])}
        _, after, outputs = jax.lax.while_loop(goes_on, body, (jnp.int32(0), start, outputs))
        return after, {**outputs, "done": after["slot"]["done"][:batch]}

    return decode


def _written(outputs: Mapping[str, jax.Array], step: jax.Array, run: jax.Array, drawn: Any) -> dict[str, jax.Array]:
    """The outputs with one step's in them; rows that do not run keep what stands there."""

    def put(name: str, value: jax.Array) -> jax.Array:
        whole = outputs[name]
        old = jax.lax.dynamic_index_in_dim(whole, step, axis=1, keepdims=False)
        kept = jnp.where(run.reshape((-1,) + (1,) * (value.ndim - 1)), value, old)
        return jax.lax.dynamic_update_index_in_dim(whole, kept, step, axis=1)

    values = {
        "tokens": drawn.tokens,
        "logprobs": drawn.logprobs,
        "top_tokens": drawn.top_tokens,
        "top_logprobs": drawn.top_logprobs,
    }
    return {name: put(name, value) for name, value in values.items()}


class _Recompute:
    """A decoder around a network without a cache: what it keeps of a sequence is its tokens."""

    def __init__(self, context: int, sizes: Sequence[int], vocabulary: int) -> None:
        self._sizes = [*(size for size in sizes if size < context), context]
        self._vocabulary = vocabulary

    def prefill(self, cache: Cache, tokens: jax.Array, slot: jax.Array, start: jax.Array) -> Cache:
        return {"tokens": jax.lax.dynamic_update_slice(cache["tokens"], tokens[None], (slot, start))}

    def decode(
        self, net: Any, cache: Cache, tokens: jax.Array, positions: jax.Array, running: jax.Array
    ) -> tuple[Cache, jax.Array]:
        rows = jnp.arange(tokens.shape[0])
        kept = cache["tokens"]
        kept = kept.at[rows, jnp.where(running, positions, kept.shape[1])].set(tokens, mode="drop")

        def at(size: int) -> Callable[[], jax.Array]:
            def run() -> jax.Array:
                logits = net(kept[: tokens.shape[0], :size])
                last = jnp.clip(positions, 0, size - 1)[:, None, None]
                return jnp.take_along_axis(logits, last, axis=1)[:, 0].astype(jnp.float32)

            return run

        longest = jnp.max(jnp.where(running, positions, 0))
        chosen = jnp.sum(longest >= jnp.array(self._sizes[:-1], jnp.int32)) if len(self._sizes) > 1 else 0
        return {"tokens": kept}, jax.lax.switch(chosen, [at(size) for size in self._sizes])


def _parameters_of(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return {}


def _is_factory(source: Any) -> bool:
    """Whether it is called with nothing to make a network; a live network is called with tokens."""
    if not callable(source) or isinstance(source, Decoder):
        return False
    return all(
        each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in _parameters_of(source).values()
    )


def _describe(source: Any, slots: int, length: int, vocabulary: int | None) -> tuple[Mapping[str, str], int, bool]:
    """Specs of the cache, the vocabulary, and whether the network has to recompute; nothing is allocated."""
    found: list[tuple[Mapping[str, str], int, bool]] = []

    def look() -> int:
        net = source() if _is_factory(source) else source
        if isinstance(net, Decoder):
            found.append((net.cache(slots, length), net.vocabulary, False))
        elif callable(net) and vocabulary is not None:
            found.append(({"tokens": f"int32[{slots}, {length}]"}, vocabulary, True))
        return 0

    jax.eval_shape(look)
    if not found:
        raise ModelError(
            "the module is no decoder",
            seen=type(source).__name__,
            expected="methods cache, prefill and decode, and vocabulary (servax.model.language.Decoder)",
            remedy="Give it these, or pass vocabulary=, and it is generated with by computing every sequence anew.",
        )
    return found[0]
