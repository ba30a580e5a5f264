"""Answers of `POST /v1/chat/completions`."""

from __future__ import annotations

from servax.generation.servable import Part
from servax.protocols.openai.answers import Collected, Message, Shown, Tokens, finite


class ChatForm:
    """Words answers as the assistant's messages.

    Args:
      shown: of tokens.
      logprobs: alternatives beside each token; None: no log probabilities.
    """

    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, shown: Shown, logprobs: int | None) -> None:
        self._shown = shown
        self._logprobs = logprobs
        self._begun: set[int] = set()

    def chunks(self, number: int, part: Part) -> list[Message]:
        found: list[Message] = []
        if number not in self._begun:
            self._begun.add(number)
            found.append(_choice(number, {"role": "assistant", "content": ""}))
        tokens = self._shown.content(part.tokens, part.finish) if self._logprobs is not None else ()
        if part.text or tokens:
            found.append(_choice(number, {"content": part.text}, logprobs=self._told(tokens)))
        if part.finish is not None:
            found.append(_choice(number, {}, finish=part.finish))
        return found

    def whole(self, number: int, answer: Collected) -> Message:
        return {
            "index": number,
            "message": {"role": "assistant", "content": "".join(answer.texts), "refusal": None},
            "logprobs": self._told(self._shown.content(answer.tokens, answer.finish)),
            "finish_reason": answer.finish,
        }

    def _told(self, tokens: Tokens) -> Message | None:
        if self._logprobs is None:
            return None
        return {
            "content": [
                {
                    **self._one(token.id, token.logprob),
                    "top_logprobs": [self._one(each, value) for each, value in token.top],
                }
                for token, _, _ in tokens
            ],
            "refusal": None,
        }

    def _one(self, token: int, logprob: float) -> Message:
        return {
            "token": self._shown.text(token),
            "logprob": finite(logprob),
            "bytes": list(self._shown.bytes(token)),
        }


def _choice(number: int, delta: Message, *, logprobs: Message | None = None, finish: str | None = None) -> Message:
    return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
