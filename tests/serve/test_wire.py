"""What is written over HTTP is what the book writes, in OpenAI's wire format."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from gnnlm.book import Book
from gnnlm.predict.predictor import PREDICTORS
from tests.serve.conftest import error_of

PROMPT = "ban dor kisha luto mev. "


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(client: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream; it must end with [DONE]."""
    given = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "stream": True, **body}
    with client.stream("POST", path, json=given) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_a_model_is_a_predictor(client: httpx.Client, book: Book, predictor: str) -> None:
    got = complete(client, model=f"tiny:{predictor}", max_tokens=12)
    want = book.generate(PROMPT, predictor=predictor, max_tokens=12)
    assert got["object"] == "text_completion"
    assert got["model"] == f"tiny:{predictor}"
    assert got["choices"] == [{"index": 0, "text": want.text, "finish_reason": "length", "logprobs": None}]
    tokens = len(book.model.lm.tokenize(PROMPT)[0])
    assert got["usage"] == {"prompt_tokens": tokens, "completion_tokens": 12, "total_tokens": tokens + 12}


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"temperature": 1.1, "top_k": 4, "min_p": 0.02, "seed": 6, "draft": False},
        {"repetition_penalty": 1.3},
        {"only": "doc0*"},
        {"exclude": ["doc0[1-5].txt"]},
    ],
)
def test_every_option_reaches_the_loop(client: httpx.Client, book: Book, options: dict[str, Any]) -> None:
    got = complete(client, max_tokens=15, **options)["choices"][0]["text"]
    assert got == book.generate(PROMPT, max_tokens=15, **options).text


def test_many_at_once_are_what_they_are_alone(client: httpx.Client, book: Book) -> None:
    """Different models, seeds, lengths, stop strings and filters in flight together, and more than the batch holds."""
    asked = [
        {
            "model": f"tiny:{PREDICTORS[n % 4]}",
            "prompt": PROMPT[: 3 + n],
            "max_tokens": 5 + 3 * n,
            "temperature": 0.8 * (n % 3),
            "seed": n,
            **({"stop": ["an"]} if n % 2 else {}),
            **({"only": ["doc0*"]} if n % 5 == 0 else {}),
            "stream": n % 3 == 0,
        }
        for n in range(16)
    ]

    def one(body: dict[str, Any]) -> str:
        if body["stream"]:
            return "".join(chunk["choices"][0]["text"] for chunk in streamed(client, **body))
        text: str = complete(client, **body)["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(one, asked))
    for body, text in zip(asked, got, strict=True):
        options = {name: value for name, value in body.items() if name not in ("model", "prompt", "stream")}
        want = book.generate(body["prompt"], predictor=str(body["model"]).partition(":")[2], **options)
        assert text == want.text


def test_prompts_of_every_kind(client: httpx.Client, book: Book) -> None:
    ids = book.model.lm.tokenize(PROMPT)[0]
    text = complete(client, max_tokens=6)["choices"][0]["text"]
    assert complete(client, prompt=ids, max_tokens=6)["choices"][0]["text"] == text
    several = complete(client, prompt=[PROMPT, "", "mev"], n=2, max_tokens=6, temperature=1, seed=3)["choices"]
    want = book.generate([PROMPT, "", "mev"], n=2, max_tokens=6, temperature=1.0, seed=3)
    assert [choice["index"] for choice in several] == list(range(6))
    assert [choice["text"] for choice in several] == [one.text for one in want]
    lists = complete(client, prompt=[ids, ids[:3], []], max_tokens=6)["choices"]
    assert [choice["text"] for choice in lists] == [one.text for one in book.generate([ids, ids[:3], []], max_tokens=6)]
    long = complete(client, prompt=PROMPT * 20, max_tokens=3)  # beyond the window of 48
    assert long["choices"][0]["text"] == book.generate(PROMPT * 20, max_tokens=3).text


def test_a_start_token_is_not_read_twice(client: httpx.Client, book: Book) -> None:
    ids, start = book.model.lm.tokenize(PROMPT)[0], book.model.lm.start_token
    with_start = complete(client, prompt=[start, *ids], max_tokens=6, echo=True, logprobs=1)["choices"][0]
    assert with_start["text"].endswith(book.generate(PROMPT, max_tokens=6).text)
    found = with_start["logprobs"]["token_logprobs"]
    assert found[0] is None
    np.testing.assert_allclose(found[1 : len(ids) + 1], book.score(PROMPT).gnn_knn, atol=1e-3)


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_what_lm_eval_asks_for(client: httpx.Client, book: Book, predictor: str) -> None:
    """Echo, one token, log-probabilities: null first, exactly one entry past the prompt, the maximum in the top."""
    texts = [PROMPT, PROMPT * 15, "ba"]
    ids = [book.model.lm.tokenize(text)[0] for text in texts]
    got = complete(client, model=f"tiny:{predictor}", prompt=ids, echo=True, logprobs=1, max_tokens=1, seed=1234)
    for choice, text, tokens in zip(got["choices"], texts, ids, strict=True):
        found = choice["logprobs"]
        assert {len(values) for values in found.values()} == {len(tokens) + 1}
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        scores = book.score(text, predictors=[predictor])
        np.testing.assert_allclose(found["token_logprobs"][1:-1], scores.log_probs[predictor][1:], atol=1e-3)
        greedy = [
            value == max(top.values())
            for value, top in zip(found["token_logprobs"][1:-1], found["top_logprobs"][1:-1], strict=True)
        ]
        assert greedy == scores.top1[predictor][1:].tolist()
        assert "".join(found["tokens"]) == choice["text"]
        assert found["text_offset"] == [sum(map(len, found["tokens"][:n])) for n in range(len(tokens) + 1)]


def test_an_end_token_counts_as_the_one_past_the_prompt(
    client: httpx.Client, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = book.model.lm.tokenize(PROMPT)[0]
    end = book.generate(PROMPT, max_tokens=1).ids[0]
    monkeypatch.setitem(vars(book.model.lm), "end_tokens", frozenset({end}))
    choice = complete(client, prompt=ids, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 1
    assert choice["text"] == PROMPT


def test_log_probabilities_without_echo(client: httpx.Client, book: Book) -> None:
    choice = complete(client, max_tokens=8, logprobs=3)["choices"][0]
    want = book.generate(PROMPT, max_tokens=8)
    found = choice["logprobs"]
    np.testing.assert_allclose(found["token_logprobs"], [token.log_prob for token in want.tokens], atol=1e-4)
    assert found["text_offset"][0] == 0  # from the prompt's end
    assert found["tokens"] == [token.text for token in want.tokens]
    assert all(len(top) in (3, 4) for top in found["top_logprobs"])
    assert complete(client, max_tokens=2, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None


def test_echo_alone_and_reading_alone(client: httpx.Client) -> None:
    assert complete(client, max_tokens=0, echo=True)["choices"][0]["text"] == PROMPT
    nothing = complete(client, max_tokens=0)
    assert nothing["choices"][0] == {"index": 0, "text": "", "finish_reason": "length", "logprobs": None}
    assert nothing["usage"]["completion_tokens"] == 0


def test_best_of_returns_the_likeliest(client: httpx.Client, book: Book) -> None:
    given = {"max_tokens": 8, "temperature": 1.0, "seed": 9}
    all_ = book.generate([PROMPT], n=6, **given)
    means = [float(np.mean([token.log_prob for token in one.tokens])) for one in all_]
    best = [all_[number].text for number in np.argsort(means)[::-1][:2]]
    got = complete(client, n=2, best_of=6, **given)
    assert [choice["text"] for choice in got["choices"]] == best
    assert got["usage"]["completion_tokens"] == 48


def test_stop_strings_are_left_out_also_of_streams(client: httpx.Client, book: Book) -> None:
    whole = book.generate(PROMPT, max_tokens=40).text
    stop = whole[7:10]
    want = whole[: whole.index(stop)]
    choice = complete(client, max_tokens=40, stop=[stop, "never"], logprobs=1)["choices"][0]
    assert choice["text"] == want
    assert choice["finish_reason"] == "stop"
    assert "".join(choice["logprobs"]["tokens"]) == want
    chunks = streamed(client, max_tokens=40, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == want
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stream(client: httpx.Client, book: Book) -> None:
    """Many chunks of one id; the last has empty lists and the reason; usage comes in a chunk of its own."""
    chunks = streamed(client, max_tokens=20, logprobs=1, stream_options={"include_usage": True})
    want = book.generate(PROMPT, max_tokens=20)
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    *parts, last, usage = chunks
    assert len(parts) > 5
    assert "".join(part["choices"][0]["text"] for part in parts) == want.text
    assert all(part["choices"][0]["finish_reason"] is None and part["usage"] is None for part in parts)
    assert [value for part in parts for value in part["choices"][0]["logprobs"]["token_logprobs"]] == pytest.approx(
        [token.log_prob for token in want.tokens], abs=1e-4
    )
    assert [value for part in parts for value in part["choices"][0]["logprobs"]["text_offset"]] == [
        len("".join(token.text for token in want.tokens[:n])) for n in range(20)
    ]
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["choices"][0]["text"] == ""
    assert last["choices"][0]["logprobs"] == {
        "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
    }  # fmt: skip
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 20
    assert all("usage" not in chunk for chunk in streamed(client, max_tokens=2))


def test_a_stream_of_several_texts_with_echo(client: httpx.Client, book: Book) -> None:
    given = {"prompt": [PROMPT, "mev"], "n": 2, "max_tokens": 9, "temperature": 1.0, "seed": 2}
    texts = ["", "", "", ""]
    for chunk in streamed(client, **given, echo=True):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    want = book.generate(given["prompt"], n=2, max_tokens=9, temperature=1.0, seed=2)
    assert texts == [prompt + one.text for prompt, one in zip([PROMPT, PROMPT, "mev", "mev"], want, strict=True)]


def test_streams_give_whole_characters(client: httpx.Client, book: Book) -> None:
    """The tiny model writes bytes at random; the pieces add up to the text, and none ends inside a character."""
    given = {"model": "tiny:base", "max_tokens": 80, "temperature": 1.5, "seed": 4, "sources": 0}
    pieces = [chunk["choices"][0] for chunk in streamed(client, **given)]
    want = book.generate(PROMPT, predictor="base", max_tokens=80, temperature=1.5, seed=4)
    assert "".join(piece["text"] for piece in pieces) == want.text
    tokens = [token for piece in pieces for token in piece["gnnlm"]["tokens"]]
    assert [token["text"] for token in tokens] == [token.text for token in want.tokens]


def test_details_of_an_open_book(client: httpx.Client, book: Book) -> None:
    """Shares, sources and spans, whole and streamed; nothing without `sources`."""
    want = json.loads(json.dumps(book.generate(PROMPT, predictor="knn", max_tokens=25, sources=2).as_json()))
    whole = complete(client, model="tiny:knn", max_tokens=25, sources=2)["choices"][0]["gnnlm"]
    chunks = [c["choices"][0]["gnnlm"] for c in streamed(client, model="tiny:knn", max_tokens=25, sources=2)]
    tokens = [token for chunk in chunks for token in chunk["tokens"]]
    for got, spans in ((whole["tokens"], whole["spans"]), (tokens, chunks[-1]["spans"])):
        assert [token["text"] for token in got] == [token["text"] for token in want["tokens"]]
        for one, other in zip(got, want["tokens"], strict=True):
            assert set(one) == set(other)
            for name in ("log_prob", "base_log_prob", "book"):
                assert math.isclose(one[name], other[name], abs_tol=1e-3)
            assert [s["position"] for s in one["sources"]] == [s["position"] for s in other["sources"]]
            assert len(one["sources"]) <= 2
        assert [(s["document"], s["start"], s["end"], s["text"]) for s in spans] == [
            (s["document"], s["start"], s["end"], s["text"]) for s in want["spans"]
        ]
    assert want["spans"]
    for name in ("steps", "drafted", "accepted", "searches", "seconds"):  # so far, in every chunk
        counts = [chunk[name] for chunk in chunks]
        assert counts == sorted(counts)
    assert chunks[0]["searches"] < chunks[-1]["searches"]
    assert "gnnlm" not in complete(client, max_tokens=2)["choices"][0]


def test_no_seed_is_a_new_one_and_negative_seeds_are_seeds(client: httpx.Client) -> None:
    texts = {complete(client, max_tokens=12, temperature=1.2)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1
    given = {"max_tokens": 12, "temperature": 1.2, "seed": -7}
    assert complete(client, **given)["choices"] == complete(client, **given)["choices"]


CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def test_chat(client: httpx.Client, book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "ban dor"}], "temperature": 0, "max_tokens": 9}
    assert "no chat template" in error_of(client.post("/v1/chat/completions", json=body), 400)["message"]
    lm: Any = book.model.lm
    monkeypatch.setattr(lm.tokenizer, "chat_template", CHAT)
    want = book.generate("<user>ban dor<assistant>", max_tokens=9)
    got = client.post("/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 2}).json()
    assert got["object"] == "chat.completion"
    choice = got["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(
        [token.log_prob for token in want.tokens], abs=1e-4
    )
    assert all(len(one["top_logprobs"]) == 2 for one in choice["logprobs"]["content"])
    assert bytes(byte for one in choice["logprobs"]["content"] for byte in one["bytes"]).decode() == want.text
    parts = {"role": "user", "content": [{"type": "text", "text": "ban "}, {"type": "text", "text": "dor"}]}
    with client.stream(
        "POST", "/v1/chat/completions", json={**body, "messages": [parts], "stream": True, "max_completion_tokens": 9}
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-1]]
    assert chunks[0]["delta"]["role"] == "assistant"
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == want.text
    assert chunks[-1]["delta"] == {}
    assert chunks[-1]["finish_reason"] == "length"
