"""What a request has generated: every answer to every prompt, part by part, as one stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from servax.core.errors import ExecutionError, InvalidInput, TooLarge
from servax.generation.constraints import GrammarConstraint
from servax.generation.params import SamplingParams
from servax.generation.servable import LanguageServable, Part
from servax.protocols.openai.errors import ContextLengthExceeded

Parts = AsyncGenerator[tuple[int, Part]]
"""Parts of answers, each with the number of its answer."""


@dataclass(frozen=True, slots=True)
class Work:
    """Prompts that are answered alike.

    Attributes:
      servable: answers them.
      prompts: token ids.
      where: the field they came in.
      choices: answers of each; the first prompt's come first.
      params: of each answer; the second of a prompt has the next seed, and so on.
      grammar: that each follows; None: none.
      priority: higher runs earlier.
      deadline: on `time.monotonic`'s clock; None: none.
    """

    servable: LanguageServable
    prompts: Sequence[Sequence[int]]
    where: str
    choices: int
    params: SamplingParams
    grammar: str | None
    priority: int
    deadline: float | None

    def check(self) -> None:
        """Raises ContextLengthExceeded or InvalidInput for a prompt that cannot be answered."""
        for prompt in self.prompts:
            try:
                self.servable.engine.check(len(prompt), self.params)
            except TooLarge:
                answer = 1 if self.params.max_tokens is None else self.params.max_tokens
                context = self.servable.spec.context
                raise ContextLengthExceeded.of(context, len(prompt), answer, self.where) from None

    def run(self) -> Parts:
        """All answers; closing it ends them. Errors come before the first part where they can be known by then."""
        answers = [self._answer(prompt, number) for prompt in self.prompts for number in range(self.choices)]
        return _numbered(answers[0]) if len(answers) == 1 else _merged(answers)

    async def _answer(self, prompt: Sequence[int], number: int) -> AsyncGenerator[Part]:
        params = self.params
        if params.seed is not None and number:
            params = replace(params, seed=params.seed + number)
        constraint = await self._constraint()
        stream = self.servable.stream(
            prompt, params, priority=self.priority, deadline=self.deadline, constraint=constraint
        )
        async with contextlib.aclosing(stream) as parts:
            async for part in parts:
                if part.finish is not None and constraint is not None and constraint.broken is not None:
                    raise ExecutionError("the answer got lost in its grammar", seen=constraint.broken)
                yield part

    async def _constraint(self) -> GrammarConstraint | None:
        if self.grammar is None:
            return None
        if (grammars := self.servable.grammars) is None:
            raise InvalidInput("a model without a tokenizer follows no grammar", where="response_format")
        return await grammars.constraint_async(self.grammar)


async def _numbered(answer: AsyncGenerator[Part]) -> Parts:
    async with contextlib.aclosing(answer) as parts:
        async for part in parts:
            yield 0, part


async def _merged(answers: Sequence[AsyncGenerator[Part]]) -> Parts:
    """Parts as they come; an error of one answer ends all."""
    arrived: asyncio.Queue[tuple[int, Part] | Exception] = asyncio.Queue()

    async def read(number: int, answer: AsyncGenerator[Part]) -> None:
        try:
            async with contextlib.aclosing(answer) as parts:
                async for part in parts:
                    arrived.put_nowait((number, part))
        except Exception as error:  # raised where all are read
            arrived.put_nowait(error)

    readers = [asyncio.create_task(read(number, answer)) for number, answer in enumerate(answers)]
    try:
        left = len(readers)
        while left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            left -= item[1].finish is not None
            yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
