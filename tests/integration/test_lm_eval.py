"""lm-evaluation-harness with a book: the adapter, stock HFLM around the model class and the command give one number."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gnnlm
from gnnlm.book import Book
from gnnlm.errors import GnnlmError
from gnnlm.run import Run
from tests.cli import error_line
from tests.cli import gnnlm as command
from tests.integration.tasks import TASKS, expected_numbers, numbers, write_tasks

pytestmark = pytest.mark.integration
PREDICTORS = ("base", "gnn_knn")


@pytest.fixture(scope="module")
def book(tiny_run: Run) -> Book:
    return gnnlm.open(tiny_run.root)


@pytest.fixture(scope="module")
def folder(book: Book, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"), book, "gnn_knn")


def evaluated(folder: Path, **options: Any) -> dict[str, float]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return numbers(lm_eval.simple_evaluate(tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, **options))


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=args) for args in arguments]


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_the_adapter_gives_what_the_book_does(tiny_run: Run, book: Book, folder: Path, predictor: str) -> None:
    import gnnlm.integrations.lm_eval  # noqa: F401  # registers the name

    found = evaluated(folder, model="gnnlm", model_args=f"run={tiny_run.root},predictor={predictor}", batch_size=2)
    assert found == pytest.approx(expected_numbers(book, predictor, folder), rel=1e-5, abs=1e-4)
    assert 0.0 < expected_numbers(book, "gnn_knn", folder)["gnnlm_writing exact_match"] < 1.0


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_stock_hflm_gives_the_same(book: Book, folder: Path, predictor: str) -> None:
    from lm_eval.models.huggingface import HFLM

    from gnnlm.integrations.transformers import OpenBookForCausalLM

    model = OpenBookForCausalLM.from_book(book, predictor=predictor)
    found = evaluated(folder, model=HFLM(pretrained=model, tokenizer=model.tokenizer, batch_size=3))
    assert found == pytest.approx(expected_numbers(book, predictor, folder), rel=1e-3, abs=1e-3)


def test_the_predictors_differ(book: Book, folder: Path) -> None:
    """Or the tests above could not tell one from the other."""
    base, best = (expected_numbers(book, name, folder)["gnnlm_rolling word_perplexity"] for name in PREDICTORS)
    assert abs(base - best) > 0.1


def test_rolling_log_likelihoods_are_those_of_gnnlm_eval(tiny_run: Run, book: Book) -> None:
    from gnnlm.integrations.lm_eval import OpenBookLM

    stream, scored = tiny_run.snapshot.streams["test"], tiny_run.artifact("eval")
    tokens = np.asarray(stream.tokens)
    document = stream.document_of(np.flatnonzero(tokens >= 0))
    texts = [document.text for document in stream.documents]
    assert max(len(book.model.lm.tokenize(text)[0]) for text in texts) > 2 * book.model.reading.window
    for name in book.predictors:
        found = OpenBookLM(book, name).loglikelihood_rolling(requests(*((text,) for text in texts)))
        evaluated_ = np.asarray(scored.array(f"{name}.log_probs.npy"), dtype=np.float64)
        expected = [evaluated_[document == number].sum() for number in range(len(texts))]
        assert found == pytest.approx(expected, rel=1e-4)


def test_requests_of_all_kinds(book: Book) -> None:
    from gnnlm.integrations.lm_eval import OpenBookLM

    lm, prompt = OpenBookLM(book), "ban dor kisha"
    best = book.next(prompt).pieces["gnn_knn"][0][0]
    pairs = requests((prompt, best), (prompt, "zzz"), ("", "ban"), ("ban ", "dor"))
    answers = lm.loglikelihood(pairs)
    assert [greedy for _, greedy in answers][:2] == [True, False]
    assert answers[0][0] == pytest.approx(float(book.score((prompt, best)).gnn_knn.sum()), abs=1e-5)
    assert answers[2][0] == pytest.approx(float(book.score("ban").gnn_knn.sum()), abs=1e-5)
    assert answers[3][0] == pytest.approx(float(book.score(("ban", " dor")).gnn_knn.sum()), abs=1e-5)
    turned = lm.loglikelihood(pairs[::-1])
    assert [ll for ll, _ in turned] == pytest.approx([ll for ll, _ in answers[::-1]], abs=1e-5)
    assert lm.loglikelihood_rolling(requests(("",), ("ban",))) == pytest.approx([0.0, answers[2][0]])
    sampled = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 1.0}
    greedy = {"until": "a", "max_new_tokens": 8}
    written = lm.generate_until(requests((prompt, sampled), (prompt, greedy), (prompt, sampled), ("", greedy)))
    assert written[0] == book.generate(prompt, temperature=1.0, max_tokens=8).text
    assert written[2] == book.generate(prompt, temperature=1.0, seed=1, max_tokens=8).text != written[0]
    assert written[1] == book.generate(prompt, stop="a", max_tokens=8).text
    assert written[3] == book.generate("", stop="a", max_tokens=8).text
    name = book.documents[0].name
    narrow = OpenBookLM(book, "knn", only=name).loglikelihood(pairs[:1])
    assert narrow[0][0] == pytest.approx(float(book.score((prompt, best), only=name).knn.sum()), abs=1e-5)


def test_bad_requests(book: Book, tmp_path: Path) -> None:
    from gnnlm.integrations.lm_eval import OpenBookLM

    for message, options in {
        "name a finished run": {},
        "no predictor named 'gnm'": {"run": book, "predictor": "gnm"},
        "expected a config file or a run directory": {"run": tmp_path / "none"},
        "no document of the store is named 'x'": {"run": book, "only": "x"},
        "expected a whole number from 1 on": {"run": book, "batch_size": "0"},
        "this book is on cpu": {"run": book, "device": "cuda:0"},
    }.items():
        with pytest.raises(GnnlmError, match=message):
            OpenBookLM(**options)
    with pytest.raises(GnnlmError, match="no option named 'typical_p'"):
        OpenBookLM(book).generate_until(requests(("ban", {"typical_p": 0.5})))
    with pytest.raises(GnnlmError, match="no chat template"):
        OpenBookLM(book).apply_chat_template([{"role": "user", "content": "ban"}])


def test_the_command(tiny_run: Run, book: Book, folder: Path, tmp_path: Path) -> None:
    asked = ("eval-harness", tiny_run.root, "--include-path", folder, "--predictor", "knn")
    file, cache = tmp_path / "results.json", tmp_path / "cache"
    done = command(*asked, "--tasks", ",".join(TASKS), "--json", "--output", file, "--cache", cache)
    last = json.loads(done.stdout.splitlines()[-1])
    assert last == json.loads(file.read_text())
    assert last["predictor"] == "knn"
    assert numbers(last) == pytest.approx(expected_numbers(book, "knn", folder), rel=1e-5, abs=1e-4)
    for word in (*TASKS, "brier_score", "word_perplexity", f"{numbers(last)['gnnlm_choice acc']:.4f}"):
        assert word in done.stdout
    assert "expected a number above 0" in error_line(*asked, "--tasks", TASKS[0], "--limit", "-1")


def test_tasks_by_name(book: Book, folder: Path, tmp_path: Path) -> None:
    from gnnlm.integrations.lm_eval import OpenBookLM, evaluate

    lm = OpenBookLM(book)
    few = evaluate(lm, TASKS[:1], folder, limit=2, num_fewshot=0, cache=tmp_path / "cache")
    assert few["n-samples"][TASKS[0]]["effective"] == 2
    asked: list[Any] = []
    lm.book = Listening(book, asked)
    again = evaluate(lm, TASKS[:1], folder, limit=2, num_fewshot=0, cache=tmp_path / "cache")
    assert again["results"] == few["results"]
    assert not asked  # all answers were kept
    with pytest.raises(GnnlmError, match="lm-eval has no task named nonsense"):
        evaluate(lm, [TASKS[0], "nonsense"], folder)
    with pytest.raises(GnnlmError, match="expected a folder with YAML tasks"):
        evaluate(lm, TASKS, tmp_path / "none")
    broken = "task: broken\ndataset_path: json\ndataset_kwargs: {data_files: nowhere.json}\ntest_split: train\n"
    (tmp_path / "broken.yaml").write_text(broken)
    with pytest.raises(GnnlmError, match="lm-eval cannot load the task"):
        evaluate(lm, ["broken"], tmp_path)


class Listening(Book):
    """Keeps what it is asked to score."""

    def __init__(self, book: Book, asked: list[Any]) -> None:
        super().__init__(book.model, book.origin)
        self.asked = asked

    def score(self, texts: Any, **options: Any) -> Any:
        self.asked.append(texts)
        return super().score(texts, **options)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tiny_run: Run) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "gnnlm.integrations.lm_eval", raising=False)
    with pytest.raises(GnnlmError, match=r"pip install 'gnnlm\[eval-harness\]'"):
        import gnnlm.integrations.lm_eval  # noqa: F401
