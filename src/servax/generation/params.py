"""How an answer is drawn and when it ends."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from servax.core.errors import InvalidInput
from servax.model.language import MOST_BIASES, LanguageSpec
from servax.model.sampling import STOPS, TOP

MOST_STOPS = 16
"""Most stop strings of a request."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, named as vLLM and the OpenAI API name them.

    Attributes:
      max_tokens: most tokens of the answer; None: as many as the context holds.
      min_tokens: tokens before which neither an end id nor a stop id ends it.
      temperature: 0: the likeliest token each time.
      top_k: how many of the likeliest tokens are drawn from; 0: all.
      top_p: the share of probability that is drawn from, of the likeliest tokens; 1: all.
      min_p: tokens less likely than this share of the likeliest are not drawn; 0: off.
      presence_penalty: subtracted from the logits of tokens that the answer has.
      frequency_penalty: subtracted once for each time.
      repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and answer; 1: off.
      logit_bias: token id -> what is added to its logit.
      seed: same seed, same text; None: drawn anew for each request.
      stop: texts that end the answer, which does not contain them.
      stop_token_ids: ids that end it, beside the model's own.
      ignore_eos: whether the model's own end ids do not end it.
      logprobs: how many alternatives' log probabilities are given beside each token's own; None: not even that.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def ends(self, spec: LanguageSpec) -> tuple[int, ...]:
        """Ids that end the answer: the model's own, unless they are ignored, and those given."""
        return tuple(dict.fromkeys((*(() if self.ignore_eos else spec.end), *self.stop_token_ids)))

    def __post_init__(self) -> None:
        """Raises InvalidInput, naming the parameter, for a value that has no meaning."""
        _require("max_tokens", self.max_tokens, self.max_tokens is None or self.max_tokens >= 1, "at least 1")
        _require("min_tokens", self.min_tokens, self.min_tokens >= 0, "at least 0")
        if self.max_tokens is not None:
            _require("min_tokens", self.min_tokens, self.min_tokens <= self.max_tokens, f"at most {self.max_tokens}")
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "0 to 100")
        _require("top_k", self.top_k, -1 <= self.top_k < 2**31, "a number of tokens, or 0 for all")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0, at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1")
        _require("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "-2 to 2")
        _require("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "-2 to 2")
        _require("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty <= 100, "0 to 100")
        _require("logit_bias", len(self.logit_bias), len(self.logit_bias) <= MOST_BIASES, f"{MOST_BIASES} at most")
        for value in self.logit_bias.values():
            _require("logit_bias", value, -100 <= value <= 100 or value == -math.inf, "values from -100 to 100")
        _require("stop", len(self.stop), len(self.stop) <= MOST_STOPS, f"{MOST_STOPS} texts at most")
        _require("stop", self.stop, all(self.stop), "texts of at least one character")
        _require("stop_token_ids", self.stop_token_ids, len(self.stop_token_ids) <= STOPS, f"{STOPS} ids at most")
        _require("logprobs", self.logprobs, self.logprobs is None or 0 <= self.logprobs <= TOP, f"0 to {TOP}")


def _require(name: str, seen: Any, holds: bool, expected: str) -> None:
    if not holds:  # a NaN holds nothing
        raise InvalidInput(f"{name} has no such value", where=name, seen=str(seen)[:100], expected=expected)
