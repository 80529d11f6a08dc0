"""The model class of transformers, against the plain model and against the book itself."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)

import gnnlm
from gnnlm.book import Book
from gnnlm.config import parse_config
from gnnlm.errors import GnnlmError
from gnnlm.integrations.past_cache import OpenBookCache
from gnnlm.integrations.transformers import OpenBookConfig, OpenBookForCausalLM, drafted
from gnnlm.predict.knn import Mix
from gnnlm.predict.open_book import OpenBook
from gnnlm.run import Run
from tests.conftest import make_tokenizer, merge

START, END = 256, 257
TEXTS = ("ban dor kisha luto. mev", "bar", "doto kin lur mesha ban dor")
PADDING = 9  # an ordinary token: only the mask tells


@pytest.fixture(scope="module")
def run(tiny_values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with states in full precision, so that its base model is the plain one to the last digits."""
    values = merge(tiny_values, {"run": str(tmp_path_factory.mktemp("runs") / "full"), "store": {"dtype": "fp32"}})
    made = Run(parse_config(values))
    made.build_all()
    return made


@pytest.fixture(scope="module")
def book(run: Run) -> Book:
    return gnnlm.open(run.root)


def closed(book: Book) -> OpenBookForCausalLM:
    """The book's weight at zero, and no graph network: it searches, but predicts what the plain model does."""
    own = book.model
    mix = Mix(own.predictor.mixes["base"].k, own.predictor.mixes["base"].temperature, weight=0.0)
    predictor = replace(own.predictor, gnn=None, cache=None, mixes={"base": mix})
    return OpenBookForCausalLM.from_book(Book(OpenBook(own.lm, own.store, own.index, predictor, own.reading)))


@pytest.fixture(scope="module")
def plain(tiny_lm_dir: Path) -> LlamaForCausalLM:
    found = LlamaForCausalLM.from_pretrained(tiny_lm_dir).eval()
    found.generation_config.eos_token_id = [2, END]
    return found


@pytest.fixture(scope="module")
def ours(book: Book) -> OpenBookForCausalLM:
    """The best predictor."""
    return OpenBookForCausalLM.from_book(book)


def ids_of(text: str) -> list[int]:
    ids: list[int] = make_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def padded(rows: Sequence[Sequence[int]], left: bool) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    ids, mask = torch.full((len(rows), longest), PADDING), torch.zeros(len(rows), longest, dtype=torch.long)
    for line, row in enumerate(rows):
        place = slice(longest - len(row), longest) if left else slice(0, len(row))
        ids[line, place], mask[line, place] = torch.tensor(row), 1
    return ids, mask


def scored(book: Book, name: str, ids: Sequence[int]) -> Tensor:
    """The book's own log-probabilities after each token of a text, the start token included, in one pass."""
    with torch.inference_mode():
        prediction, _ = book.model.read([list(ids)], None, (name,))
        return prediction[0].log_probs((name,))[name].clone()


# -- the plain model -------------------------------------------------------------------------------------------------


@pytest.fixture(params=["base", "knn with weight 0"])
def shut(book: Book, request: pytest.FixtureRequest) -> OpenBookForCausalLM:
    return closed(book) if request.param != "base" else OpenBookForCausalLM.from_book(book, predictor="base")


@torch.no_grad()
def test_forward_is_that_of_the_plain_model(shut: OpenBookForCausalLM, plain: LlamaForCausalLM) -> None:
    ids, mask = padded([[START, *ids_of(text)] for text in TEXTS], left=False)
    theirs = plain(ids, attention_mask=mask).logits.log_softmax(-1)
    found = shut(ids, attention_mask=mask).logits
    assert torch.allclose(found[mask.bool()], theirs[mask.bool()], atol=1e-5)
    assert torch.allclose(shut(ids).logits, plain(ids).logits.log_softmax(-1), atol=1e-5)  # without a mask, as HFLM
    labels = ids.masked_fill(mask == 0, -100)
    loss, expected = (one(ids, attention_mask=mask, labels=labels).loss for one in (shut, plain))
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


@torch.no_grad()
def test_ids_without_the_start_token_predict_what_they_do_with_it(
    shut: OpenBookForCausalLM, plain: LlamaForCausalLM
) -> None:
    ids = torch.tensor([[START, *ids_of(TEXTS[0])]])
    assert torch.allclose(shut(ids[:, 1:]).logits, plain(ids).logits.log_softmax(-1)[:, 1:], atol=1e-5)


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "length penalty": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    "no cache": {"use_cache": False},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[32], [97, 110]], "min_new_tokens": 4},
    "in chunks": {"prefill_chunk_size": 7},
}


@pytest.mark.parametrize("way", WAYS)
def test_generate_is_that_of_the_plain_model(shut: OpenBookForCausalLM, plain: LlamaForCausalLM, way: str) -> None:
    ids, mask = padded([[START, *ids_of(text)] for text in TEXTS], left=True)
    found = []
    for one in (shut, plain):
        torch.manual_seed(5)
        found.append(one.generate(ids, attention_mask=mask, max_new_tokens=12, **WAYS[way]))
    assert torch.equal(*found)


def test_prompt_lookup_is_that_of_the_plain_model(shut: OpenBookForCausalLM, plain: LlamaForCausalLM) -> None:
    ids = torch.tensor([[START, *ids_of("ban dor ban dor ban do")]])
    found = [one.generate(ids, max_new_tokens=16, prompt_lookup_num_tokens=4) for one in (shut, plain)]
    assert torch.equal(*found)


# -- the book --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["knn", "gnn", "gnn_knn"])
def test_logits_are_the_books_log_probabilities(book: Book, name: str) -> None:
    """Also past the window, where the plain model would do something else."""
    model, text = OpenBookForCausalLM.from_book(book, predictor=name), ids_of(" ".join(TEXTS * 6))
    assert len(text) > 2 * book.model.reading.window
    expected = scored(book, name, text)
    with_start = model(torch.tensor([[START, *text]])).logits[0]
    assert torch.allclose(with_start, expected, atol=1e-5)
    assert torch.allclose(with_start.exp().sum(-1), torch.ones(len(text) + 1), atol=1e-4)
    own = book.score(" ".join(TEXTS * 6), predictors=[name]).log_probs[name]
    taken = with_start[:-1].gather(1, torch.tensor(text)[:, None])[:, 0]
    assert torch.allclose(taken, torch.from_numpy(own), atol=1e-5)
    loss = model(torch.tensor([[START, *text]]), labels=torch.tensor([[START, *text]])).loss
    assert loss.item() == pytest.approx(-own.mean(), abs=1e-5)


def test_a_row_without_tokens_is_a_text_that_begins(ours: OpenBookForCausalLM) -> None:
    ids, mask = padded([ids_of(TEXTS[0]), []], left=True)
    found = ours.generate(ids, attention_mask=mask, max_new_tokens=8, pad_token_id=PADDING)[1, ids.shape[1] :].tolist()
    expected = [token.id for token in ours.book.generate("", max_tokens=8).tokens]
    assert found == expected + [PADDING] * (len(found) - len(expected))


@given(data=st.data())
def test_padding_and_pieces_change_nothing(ours: OpenBookForCausalLM, data: st.DataObject) -> None:
    """Rows with padding anywhere, with and without the start token, read in pieces, predict what whole rows do."""
    rows = data.draw(st.lists(st.lists(st.integers(97, 122), min_size=1, max_size=20), min_size=1, max_size=3))
    begun = [[START, *row] if data.draw(st.booleans()) else row for row in rows]
    width = max(map(len, begun)) + data.draw(st.integers(0, 3))
    ids, mask = torch.full((len(rows), width), PADDING), torch.zeros(len(rows), width, dtype=torch.long)
    for line, row in enumerate(begun):
        places = sorted(data.draw(st.permutations(range(width)))[: len(row)])
        ids[line, places], mask[line, places] = torch.tensor(row), 1
    cuts = sorted({0, width, *data.draw(st.lists(st.integers(1, width), max_size=2))})
    cache, parts = OpenBookCache(), []
    for first, last in itertools.pairwise(cuts):
        out = ours(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache)
        assert out.past_key_values is cache
        parts.append(out.logits)
    found = torch.cat(parts, 1)
    assert cache.get_seq_length() == width
    for line, row in enumerate(rows):
        expected = scored(ours.book, "gnn_knn", row)[-len(begun[line]) :]
        assert torch.allclose(found[line][mask[line].bool()], expected, atol=1e-4)
    assert torch.allclose(found.exp().sum(-1), torch.ones(len(rows), width), atol=1e-4)


def test_a_later_token_changes_nothing_before_it(ours: OpenBookForCausalLM) -> None:
    ids = torch.tensor([[START, *ids_of(TEXTS[0])]])
    other = ids.clone()
    other[0, 9] = 120
    before, after = ours(ids).logits, ours(other).logits
    assert torch.allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert not torch.allclose(before[:, 9], after[:, 9], atol=1e-3)


def test_a_cache_crops_repeats_and_reorders(ours: OpenBookForCausalLM) -> None:
    ids, mask = padded([[START, *ids_of(TEXTS[0])], [START, *ids_of(TEXTS[1])]], left=True)
    step = torch.tensor([[100], [110]])
    cache = ours(ids, attention_mask=mask).past_key_values
    kept = copy.deepcopy(cache)
    ones = torch.ones(2, 1, dtype=torch.long)
    expected = ours(step, attention_mask=torch.cat([mask, ones], 1), past_key_values=cache).logits
    cache.crop(-1)
    assert cache.get_seq_length() == kept.get_seq_length() == ids.shape[1]
    again = ours(step, attention_mask=torch.cat([mask, ones], 1), past_key_values=cache).logits
    assert torch.allclose(expected, again, atol=1e-5)
    kept.batch_repeat_interleave(2)
    assert kept.batch_size == 4
    twice = copy.deepcopy(kept)
    many = ours(step.repeat_interleave(2, 0), past_key_values=kept).logits
    assert torch.allclose(many, expected.repeat_interleave(2, 0), atol=1e-5)
    twice.reorder_cache(torch.tensor([3, 0, 1, 1]))
    turned = ours(step[[1, 0, 0, 0]], past_key_values=twice).logits
    assert torch.allclose(turned, expected[[1, 0, 0, 0]], atol=1e-5)
    twice.batch_select_indices(torch.tensor([True, False, True, False]))
    assert twice.batch_size == 2
    twice.crop(-twice.get_seq_length())
    assert twice.past is None
    assert torch.allclose(
        ours(ids, attention_mask=mask, past_key_values=twice).logits, ours(ids, attention_mask=mask).logits, atol=1e-5
    )


@pytest.mark.parametrize("begins", [True, False])
def test_generate_is_that_of_the_book(ours: OpenBookForCausalLM, begins: bool) -> None:
    rows = [ids_of(text) for text in TEXTS]
    ids, mask = padded([[START, *row] if begins else row for row in rows], left=True)
    found = ours.generate(ids, attention_mask=mask, max_new_tokens=60, pad_token_id=PADDING)[:, ids.shape[1] :]
    for line, written in zip(found.tolist(), ours.book.generate(rows, max_tokens=60), strict=True):
        expected = [token.id for token in written.tokens]
        assert line == expected + [PADDING] * (len(line) - len(expected))


def test_drafts_change_nothing(ours: OpenBookForCausalLM) -> None:
    ids, mask = padded([[START, *ids_of(text)] for text in TEXTS], left=True)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 60, "pad_token_id": PADDING}
    expected = ours.generate(ids, **options)
    assert torch.equal(ours.generate(ids, custom_generate=drafted, **options), expected)
    whole = ours.generate(ids, custom_generate=drafted, return_dict_in_generate=True, **options)
    assert torch.equal(whole.sequences, expected)
    stops: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([SpaceCriterion(ids.shape[1])])}
    short = ours.generate(ids, **options, **stops)
    assert short.shape[1] < expected.shape[1]
    assert torch.equal(ours.generate(ids, custom_generate=drafted, **options, **stops), short)
    knn = ours.generate(ids, custom_generate=drafted, predictor="knn", **options)
    assert torch.equal(knn, ours.generate(ids, predictor="knn", **options))


class SpaceCriterion(StoppingCriteria):
    """Ends a row after its second space."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return (input_ids[:, self.first :] == ids_of(" ")[0]).sum(1) >= 2


class Forbid(LogitsProcessor):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([self.token]), -torch.inf)


def test_processors_streamers_and_scores(ours: OpenBookForCausalLM) -> None:
    ids = torch.tensor([[START, *ids_of(TEXTS[0])]])
    first = int(ours(ids).logits[0, -1].argmax())
    ours(ids).logits[0, 0] = 0.0  # some processors write in place
    out = ours.generate(
        ids,
        max_new_tokens=8,
        logits_processor=LogitsProcessorList([Forbid(first)]),
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
    )
    assert first not in out.sequences[0, ids.shape[1] :].tolist()
    assert int(out.logits[0].argmax()) == first
    again = ours(out.sequences[:, :-1]).logits[0, ids.shape[1] - 1 :]
    assert torch.allclose(torch.cat(out.logits), again, atol=1e-4)  # written is scored
    taken = ours.compute_transition_scores(out.sequences, out.scores)[0]
    assert torch.allclose(taken, again.gather(1, out.sequences[0, ids.shape[1] :, None])[:, 0], atol=1e-4)
    streamer = TextIteratorStreamer(ours.tokenizer, skip_prompt=True)
    written = ours.generate(ids, max_new_tokens=8, streamer=streamer)
    assert "".join(streamer) == ours.tokenizer.decode(written[0, ids.shape[1] :])


def test_generate_reads_on_from_a_cache(ours: OpenBookForCausalLM) -> None:
    ids = torch.tensor([[START, *ids_of(TEXTS[2])]])
    cache = ours(ids[:, :10]).past_key_values
    reused = ours.generate(ids, past_key_values=cache, max_new_tokens=8)
    assert torch.equal(reused, ours.generate(ids, max_new_tokens=8))


def test_filters_and_predictors_of_a_call(book: Book) -> None:
    model, text = OpenBookForCausalLM.from_book(book), ids_of(TEXTS[0])
    ids, name = torch.tensor([[START, *text]]), book.documents[0].name
    narrow = model(ids, only=name, predictor="knn").logits
    own = book.score(TEXTS[0], predictors=["knn"], only=name).knn
    taken = narrow[0, :-1].gather(1, torch.tensor(text)[:, None])[:, 0]
    assert torch.allclose(taken, torch.from_numpy(own), atol=1e-5)
    model.only, model.predictor = name, "knn"
    assert torch.equal(model(ids).logits, narrow)
    assert not torch.allclose(model(ids, only="*").logits, narrow)
    written = book.generate([text], predictor="knn", only=name, max_tokens=10)[0]
    again = OpenBookForCausalLM.from_book(book).generate(ids, predictor="knn", only=name, max_new_tokens=10)
    assert again[0, ids.shape[1] :].tolist() == [token.id for token in written.tokens]


# -- directories -----------------------------------------------------------------------------------------------------


def test_auto_classes_and_pipelines_open_a_run(run: Run, book: Book) -> None:
    model = AutoModelForCausalLM.from_pretrained(run.root, predictor="knn")
    tokenizer = AutoTokenizer.from_pretrained(run.root)
    assert isinstance(model, OpenBookForCausalLM)
    assert model.predictor == "knn"
    assert tokenizer("ban dor")["input_ids"] == model.tokenizer("ban dor")["input_ids"] == ids_of("ban dor")
    writes = pipeline("text-generation", str(run.root))
    (out,) = writes("ban dor", max_new_tokens=6, do_sample=False)
    assert out["generated_text"] == "ban dor" + book.generate("ban dor", max_tokens=6).text
    writes.tokenizer.pad_token = writes.tokenizer.eos_token
    batch = writes(["ban dor", "kisha luto me", ""], max_new_tokens=6, do_sample=False, batch_size=2)
    expected = [prompt + book.generate(prompt, max_tokens=6).text for prompt in ("ban dor", "kisha luto me", "")]
    assert [one[0]["generated_text"] for one in batch] == expected


def test_a_saved_model_opens_again(ours: OpenBookForCausalLM, run: Run, tmp_path: Path) -> None:
    ids = torch.tensor([[START, *ids_of(TEXTS[0])]])
    model = OpenBookForCausalLM.from_pretrained(run.root, predictor="knn", exclude=[ours.book.documents[0].name])
    model.generation_config.max_new_tokens = 3
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert (again.predictor, again.exclude) == ("knn", model.exclude)
    assert again.generate(ids).shape[1] == ids.shape[1] + 3
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("ban")["input_ids"] == ids_of("ban")
    assert gnnlm.open(tmp_path / "saved").score("ban").ids == ids_of("ban")
    again.save_pretrained(tmp_path / "saved")  # into its own directory: the settings alone
    with pytest.raises(GnnlmError, match="already exists"):
        again.save_pretrained(run.root.parent)
    with pytest.raises(GnnlmError, match="was not opened from a run"):
        closed(ours.book).save_pretrained(tmp_path / "none")


# -- bad input -------------------------------------------------------------------------------------------------------


def test_bad_directories(tmp_path: Path, write_config: Any, run: Run) -> None:
    with pytest.raises(GnnlmError, match=r"expected a run directory with a config\.yaml"):
        OpenBookForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(GnnlmError, match="expected a config file or a run directory"):
        OpenBookForCausalLM.from_pretrained("org/model")
    with pytest.raises(GnnlmError, match="no predictor named 'gnm'"):
        OpenBookForCausalLM.from_pretrained(run.root, predictor="gnm")
    with pytest.raises(GnnlmError, match="no option named 'predictr'"):
        OpenBookForCausalLM.from_pretrained(run.root, predictr="gnn")
    with pytest.raises(GnnlmError, match="float32"):
        OpenBookForCausalLM.from_pretrained(run.root, dtype=torch.bfloat16)
    with pytest.raises(GnnlmError, match="this book is on cpu"):
        OpenBookForCausalLM.from_pretrained(run.root, device_map="cuda:0")
    with pytest.raises(GnnlmError, match=r"from_pretrained\(RUN\)"):
        AutoModelForCausalLM.from_config(OpenBookConfig())


def test_bad_calls(ours: OpenBookForCausalLM, book: Book) -> None:
    ids = torch.tensor([[START, 5, 6]])
    calls: list[tuple[str, dict[str, Any]]] = [
        ("expected at least one token", {"input_ids": ids[:, :0]}),
        (r"got torch.float32", {"input_ids": ids.float()}),
        (r"got list", {"input_ids": [[1, 2]]}),
        (r"got int64 \[3\]|got torch.int64 \[3\]", {"input_ids": ids[0]}),
        (r"got NoneType", {}),
        (r"from 0 to 257, got 5 to 258", {"input_ids": torch.tensor([[START, 5, 258]])}),
        (r"got -1 to 5", {"input_ids": torch.tensor([[START, 5, -1]])}),
        (r"expected \[1, 3\] of 0 and 1, got \[1, 2\]", {"input_ids": ids, "attention_mask": ids[:, 1:]}),
        (r"labels: expected \[1, 3\], got \[1, 2\]", {"input_ids": ids, "labels": ids[:, 1:]}),
        (r"takes no inputs_embeds", {"input_ids": ids, "inputs_embeds": ids}),
        (r"takes no output_attentions", {"input_ids": ids, "output_attentions": True}),
        (r"no predictor named 'x'", {"input_ids": ids, "predictor": "x"}),
        (r"no document of the store is named 'x'", {"input_ids": ids, "only": "x"}),
        (r"got DynamicCache", {"input_ids": ids, "past_key_values": filled()}),
    ]
    for message, call in calls:
        with pytest.raises(GnnlmError, match=message):
            ours(**call)
    cache = ours(ids).past_key_values
    with pytest.raises(GnnlmError, match="holds 1 texts, input_ids has 2 rows"):
        ours(torch.tensor([[1], [2]]), past_key_values=cache)
    with pytest.raises(GnnlmError, match="was made with predictor gnn_knn"):
        ours(ids, past_key_values=cache, predictor="base")
    with pytest.raises(GnnlmError, match="cannot be masked"):
        ours(ids[:, :1], attention_mask=torch.tensor([[0, 1, 1, 1]]), past_key_values=cache)
    with pytest.raises(GnnlmError, match="needs a graph network"):
        OpenBookForCausalLM.from_book(closed(book).book, predictor="gnn")
    with pytest.raises(GnnlmError, match="cache of its own"):
        ours.generate(ids, cache_implementation="static", max_new_tokens=2)
    for name, value in {"do_sample": True, "num_beams": 2, "no_repeat_ngram_size": 2, "eos_token_id": 7}.items():
        with pytest.raises(GnnlmError, match="drafted: "):
            ours.generate(ids, custom_generate=drafted, max_new_tokens=2, **{name: value})


def filled() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), 0)
    return cache
