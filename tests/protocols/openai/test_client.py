"""The official `openai` client, unchanged."""

import asyncio
import json
import re
from typing import Literal

import openai
import pydantic
import pytest

MESSAGES = [{"role": "user", "content": "spell"}]


class Paint(pydantic.BaseModel):
    kind: Literal["gloss", "matt"]
    dry: bool


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(model="speller", messages=MESSAGES, temperature=0, logprobs=True)
    assert answer.choices[0].message.content == "Hi 😀!"
    assert bytes(byte for token in answer.choices[0].logprobs.content for byte in token.bytes) == "Hi 😀!".encode()
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_chat_streamed(client):
    stream = client.chat.completions.create(
        model="speller", messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == "Hi 😀!"
    assert chunks[-1].usage.completion_tokens == 9


def test_the_clients_own_stream_helper(client):
    with client.chat.completions.stream(model="speller", messages=MESSAGES, temperature=0) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "Hi 😀!"


def test_completions(client):
    answer = client.completions.create(model="speller", prompt=["a:", "b:"], temperature=0, logprobs=2)
    assert [each.text for each in answer.choices] == ["Hi 😀!"] * 2
    assert answer.choices[0].logprobs.tokens[:2] == ["H", "i"]


def test_completions_streamed(client):
    stream = client.completions.create(model="speller", prompt="a:", temperature=0, stream=True)
    assert "".join(each.choices[0].text for each in stream) == "Hi 😀!"


def test_async(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            create = client.chat.completions.create
            answers = await asyncio.gather(
                *(create(model="rambler", messages=MESSAGES, seed=seed, max_tokens=10) for seed in range(8))
            )
            stream = await create(model="speller", messages=MESSAGES, temperature=0, stream=True)
            return answers, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    answers, text = asyncio.run(ask())
    assert len(answers) == 8
    assert text == "Hi 😀!"


def test_structured_output_is_parsed(client):
    answer = client.chat.completions.parse(
        model="rambler", messages=MESSAGES, response_format=Paint, seed=1, max_tokens=60
    )
    assert isinstance(answer.choices[0].message.parsed, Paint)


def test_structured_output_that_is_cut_off(client):
    with pytest.raises(openai.LengthFinishReasonError) as cut:
        client.chat.completions.parse(model="rambler", messages=MESSAGES, response_format=Paint, max_tokens=15)
    assert cut.value.completion.choices[0].message.content.startswith('{"kind": "')


def test_structured_output_that_ends(client):
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["red", "blue"]}, "ready": {"type": "boolean"}},
        "required": ["kind", "ready"],
        "additionalProperties": False,
    }
    for stream in (False, True):
        given = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        answer = client.chat.completions.create(
            model="rambler", messages=MESSAGES, response_format=given, max_tokens=60, n=2, stream=stream
        )
        if stream:
            texts = ["", ""]
            for chunk in answer:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        else:
            texts = [each.message.content for each in answer.choices]
        for text in texts:
            value = json.loads(text)
            assert (value["kind"] in ("red", "blue"), type(value["ready"])) == (True, bool)


def test_rows_without_a_grammar_are_not_touched_by_those_with_one(server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            create = client.completions.create
            free = {"model": "rambler", "prompt": "abc", "seed": 3, "max_tokens": 30}
            alone = (await create(**free)).choices[0].text
            bound = {"extra_body": {"guided_regex": "[a-f ]{20,30}"}, "max_tokens": 40}
            both = await asyncio.gather(create(**free), create(model="rambler", prompt="xyz", **bound))
            return alone, *(each.choices[0].text for each in both)

    alone, free, bound = asyncio.run(ask())
    assert free == alone
    assert re.fullmatch("[a-f ]{20,30}", bound)


def test_embeddings(client):
    answer = client.embeddings.create(model="embedder", input=["one two", "seven"])  # base64, by the client's choice
    assert [each.embedding for each in answer.data] == [[3.0, 2.0, 0.5], [7.0, 1.0, 0.5]]
    assert answer.usage.prompt_tokens == 3


def test_models(client):
    assert [each.id for each in client.models.list()] == ["embedder", "rambler", "speller"]
    assert client.models.retrieve("speller").owned_by == "servax"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_errors_are_the_clients_classes(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="speller", prompt="x" * 80)
    assert long.value.code == "context_length_exceeded"
