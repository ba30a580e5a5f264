"""Answers of `POST /v1/completions`."""

from __future__ import annotations

from servax.generation.sequence import Finish
from servax.generation.servable import Part
from servax.protocols.openai.answers import Collected, Message, Shown, Tokens, finite


class CompletionForm:
    """Words answers as completions.

    Args:
      shown: of tokens.
      logprobs: alternatives beside each token; None: no log probabilities.
    """

    kinds = ("text_completion", "text_completion")

    def __init__(self, shown: Shown, logprobs: int | None) -> None:
        self._shown = shown
        self._logprobs = logprobs

    def chunks(self, number: int, part: Part) -> list[Message]:
        if not part.text and part.finish is None and not (part.tokens and self._logprobs is not None):
            return []
        return [self._choice(number, part.text, part.tokens, part.finish)]

    def whole(self, number: int, answer: Collected) -> Message:
        return self._choice(number, "".join(answer.texts), answer.tokens, answer.finish)

    def _choice(self, number: int, text: str, tokens: Tokens, finish: Finish | None) -> Message:
        logprobs = None if self._logprobs is None else self._told(self._shown.content(tokens, finish))
        return {"text": text, "index": number, "logprobs": logprobs, "finish_reason": finish}

    def _told(self, tokens: Tokens) -> Message:
        return {
            "text_offset": [start for _, start, _ in tokens],
            "token_logprobs": [finite(token.logprob) for token, _, _ in tokens],
            "tokens": [self._shown.text(token.id) for token, _, _ in tokens],
            "top_logprobs": [self._top(token.id, token.logprob, token.top) for token, _, _ in tokens],
        }

    def _top(self, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> dict[str, float]:
        """The likeliest by their text, and the token itself; of several with one text the likeliest."""
        found: dict[str, float] = {}
        for each, value in top:
            found.setdefault(self._shown.text(each), finite(value))
        found.setdefault(self._shown.text(token), finite(logprob))
        return found
