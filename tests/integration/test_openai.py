"""The real openai client: whole answers, streams, async, and errors as its own types."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from gnnlm.book import Book
from tests.integration.conftest import KEY

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.integration
PROMPT = "ban dor kisha luto mev. "


@pytest.fixture
def client(open_address: str) -> Any:
    return openai.OpenAI(base_url=f"{open_address}/v1", api_key="unused", max_retries=0)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()][:2] == ["tiny", "tiny:base"]
    assert client.models.retrieve("tiny:knn").id == "tiny:knn"


def test_a_completion_with_what_we_add(client: Any, served_book: Book) -> None:
    got = client.completions.create(
        model="tiny:knn", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=2, extra_body={"sources": 2}
    )
    want = served_book.generate(PROMPT, predictor="knn", max_tokens=12)
    choice = got.choices[0]
    assert choice.text == want.text
    assert choice.logprobs.tokens == [token.text for token in want.tokens]
    assert choice.logprobs.token_logprobs == pytest.approx([token.log_prob for token in want.tokens], abs=1e-3)
    assert got.usage.completion_tokens == 12
    assert choice.gnnlm["tokens"][0]["sources"][0]["document"] == want.tokens[0].sources[0].document
    only = client.completions.create(
        model="tiny:knn", prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"only": ["doc0*"]}
    )
    assert only.choices[0].text == served_book.generate(PROMPT, predictor="knn", max_tokens=12, only=["doc0*"]).text


def test_a_stream(client: Any, served_book: Book) -> None:
    stream = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == served_book.generate(PROMPT, max_tokens=20).text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-2].choices[0].finish_reason == "length"


def test_async_and_many(open_address: str, served_book: Book) -> None:
    async def all_() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{open_address}/v1", api_key="x", max_retries=0) as client:

            async def one(seed: int) -> str:
                stream = await client.completions.create(
                    model="tiny", prompt=PROMPT, max_tokens=15, seed=seed, temperature=1.0, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(seed) for seed in range(8)))

    got = asyncio.run(all_())
    want = [served_book.generate(PROMPT, max_tokens=15, seed=seed, temperature=1.0).text for seed in range(8)]
    assert got == want


def test_chat(client: Any, served_book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "system", "content": "ban"}, {"role": "user", "content": "dor"}]
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        client.chat.completions.create(model="tiny", messages=messages)
    lm: Any = served_book.model.lm
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    monkeypatch.setattr(lm.tokenizer, "chat_template", template)
    want = served_book.generate("system: ban\nuser: dor\nassistant: ", max_tokens=10).text
    got = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=10, temperature=0, logprobs=True, top_logprobs=1
    )
    assert got.choices[0].message.content == want
    assert len(got.choices[0].logprobs.content) == 10
    stream = client.chat.completions.create(
        model="tiny", messages=messages, max_completion_tokens=10, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == want


def test_errors_are_the_clients_own(client: Any, locked_address: str) -> None:
    given = {"model": "tiny", "prompt": "a", "max_tokens": 3}
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(**{**given, "model": "gpt"})
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.BadRequestError, match="suffix: not supported"):
        client.completions.create(**given, suffix="b")
    with pytest.raises(openai.BadRequestError, match="does not exist"):
        client.completions.create(**given, extra_body={"foo": 1})
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{locked_address}/v1", api_key="wrong", max_retries=0).models.list()
    good = openai.OpenAI(base_url=f"{locked_address}/v1", api_key=KEY, max_retries=0)
    with pytest.raises(openai.BadRequestError) as caught:
        good.completions.create(model="tiny", prompt="a" * 301)
    assert caught.value.code == "context_length_exceeded"


def test_a_full_queue_is_a_rate_limit_and_retrying_helps(locked_address: str) -> None:
    base = f"{locked_address}/v1"
    refused: list[Exception] = []

    def write(retries: int, tokens: int) -> None:
        try:
            openai.OpenAI(base_url=base, api_key=KEY, max_retries=retries).completions.create(
                model="tiny", prompt="a", max_tokens=tokens, extra_body={"draft": False}
            )
        except Exception as error:
            refused.append(error)

    threads = [threading.Thread(target=write, args=(0, 1500)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused
    assert all(isinstance(error, openai.RateLimitError) for error in refused)
    refused.clear()
    write(5, 3)
    assert not refused
