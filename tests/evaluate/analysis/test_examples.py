"""Examples in the paper's form, and any test token by document and offset."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gnnlm.artifact import Artifact, Draft
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.corpus.stream import Passage, Stream
from gnnlm.corpus.text_writer import SplitWriter
from gnnlm.errors import CorpusError
from gnnlm.evaluate.analysis.analysis_page import page_of
from gnnlm.evaluate.analysis.gain_examples import COUNT, example_table, measure, show, token_at, token_example
from gnnlm.evaluate.analysis.section import AnalysisSection
from gnnlm.evaluate.examples import Example, draw_apart, flat, is_clear_gain, parts_of, probability, render_example
from gnnlm.evaluate.table import MarkedText
from gnnlm.run import Run
from tests.cli import error_line, gnnlm
from tests.evaluate.analysis.analysed import analysis_of


def test_gains_and_losses_drawn(tiny_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = analysis_of(tiny_run.root).subject
    rng = np.random.default_rng(0)
    base = np.log(rng.uniform(0.01, 0.99, len(subject.positions_N)))
    scores = {"base": base, "knn": base, "gnn": base, "gnn_knn": rng.permutation(base)}
    monkeypatch.setattr(subject, "scores", scores)
    found = measure(subject)
    assert found.gains > COUNT < found.losses
    documents = len(subject.snapshot.streams["test"].names)
    for side, drawn in (("gains", found.drawn_gains), ("losses", found.drawn_losses)):
        assert len(drawn) == min(COUNT, documents)
        assert len({example.query.document for example in drawn}) == len(drawn)
        for example in drawn:
            before, after = (np.log(example.probabilities[name]) for name in ("base", "gnn_knn"))
            assert is_clear_gain(before, after) if side == "gains" else is_clear_gain(after, before)
    section = show(found)
    assert [table.name for table in section.tables] == ["examples_gains", "examples_losses"]
    assert f"{found.losses:,} clear losses" in section.summary[0]


def test_no_two_of_one_document() -> None:
    document = np.array([0, 0, 0, 1, 1, 2])
    for seed in range(5):
        drawn = draw_apart(np.arange(6), document, 3, seed)
        assert sorted(document[drawn]) == [0, 1, 2]
    assert len({tuple(draw_apart(np.arange(6), document, 2, seed)) for seed in range(20)}) > 5


def test_every_character_leads_to_its_token(tiny_run: Run) -> None:
    subject = analysis_of(tiny_run.root).subject
    stream = subject.snapshot.streams["test"]
    for number in (0, len(stream.names) - 1):
        length = len(stream.documents[number].text)
        for character in (0, 1, length // 2, length - 1):
            token = token_at(subject, f"{stream.names[number]}:{character}")
            position = int(subject.positions_N[token])
            start, end = stream.characters(position)
            assert start <= character < end
            assert stream.document_of(position) == number


def test_offsets_of_odd_tokens(tmp_path: Path) -> None:
    """A character of several tokens leads to the last of them, and what comes before all tokens to the first."""
    with Draft(tmp_path / "corpus", "corpus", {}) as draft:
        writer = SplitWriter(draft, "test", 10)
        writer.add(TokenizedDocument("first", "xy", [1], [0]))
        writer.add(TokenizedDocument("odd", " aé b", [1, 2, 3, 4], [1, 2, 2, 3]))
        writer.finish()
        draft.finish({})
    stream = Stream(Artifact.open(tmp_path / "corpus"), "test")
    assert [stream.position_at(1, character) for character in range(5)] == [2, 2, 4, 5, 5]
    assert stream.position_at(0, 1) == 0
    assert stream.position_at(1, 5) is stream.position_at(1, -1) is None


def test_at_prints_the_token_with_all_predictors(tiny_run: Run) -> None:
    subject = analysis_of(tiny_run.root).subject
    stream = subject.snapshot.streams["test"]
    done = gnnlm("analyze", tiny_run.root, "--at", f"{stream.names[1]}:20", "--json")
    printed = json.loads(done.stdout.splitlines()[-1])
    token = token_at(subject, f"{stream.names[1]}:20")
    assert printed["query"] == vars(stream.passage(int(subject.positions_N[token]), 14, 0))
    for name, p in printed["probabilities"].items():
        assert np.log(p) == pytest.approx(subject.scores[name][token])
    near = subject.test.table.at(subject.positions_N[token : token + 1], 8)
    assert [found["similarity"] for found in printed["neighbours"]] == pytest.approx(near.similarity[0].tolist())
    rights = (subject.snapshot.store.tokens(near.positions[0]) == subject.targets_N[token]).tolist()
    assert [found["right"] for found in printed["neighbours"]] == rights
    for word in (
        "Input: ",
        "Extracted 8: ",
        f"+GNN+kNN {probability(printed['probabilities']['gnn_knn'])}]",
        f"[{stream.names[1]}, base ",
    ):
        assert word in done.stdout
    assert not (tiny_run.root / "analysis").exists()


def test_at_mistakes(tiny_run: Run) -> None:
    subject = analysis_of(tiny_run.root).subject
    stream = subject.snapshot.streams["test"]
    name, length = stream.names[0], len(stream.documents[0].text)
    with pytest.raises(CorpusError, match=rf"has {length} characters in test; .* \(got {length}\)"):
        token_at(subject, f"{name}:{length}")
    with pytest.raises(CorpusError, match=rf"no test document is named '{name[:-1]}'; there are .* such as .*{name}"):
        token_at(subject, f"{name[:-1]}:0")
    for wrong in (name, f"{name}:", f"{name}:-1", ":3", f"{name}:1.5"):
        with pytest.raises(CorpusError, match="expected DOCUMENT:CHARACTER"):
            token_at(subject, wrong)
    assert "leave out --part" in error_line("analyze", tiny_run.root, "--at", f"{name}:0", "--part", "recall")


def test_a_page_underlines_and_escapes(tiny_run: Run) -> None:
    subject = analysis_of(tiny_run.root).subject
    example = token_example(subject, 40)
    nearest, *others = example.neighbours
    nearest = replace(nearest, passage=replace(nearest.passage, before="in ", token=" & so", after=" on"))
    query = replace(example.query, before="<i>a ", token="<b", after="")
    example = replace(example, query=query, neighbours=[nearest, *others])
    table = example_table("t", "c", [example])
    page = page_of("run", None, [AnalysisSection([], [table], name="s", title="S")], [])
    assert "&lt;i&gt;a <b>&lt;b</b>" in page
    assert "in  <u>&amp; so</u> on" in page
    assert "in  _& so_ on" in table.csv()


def test_text_stays_on_its_line_and_without_control_characters() -> None:
    assert flat("a\nb\x1b[31m\udc80") == "a b\ufffd[31m\ufffd"
    assert parts_of(Passage("d", "x", "", "y")) == ("x", "(part of a character)", "y")
    assert parts_of(Passage("d", "x", "\t ", "y")) == ("x", "⇥␣", "y")
    example = Example(Passage("d\x1b", "a ", "b", ""), {"base": 0.5, "knn": 2e-5, "gnn": 0.1}, [])
    assert render_example(example).plain == "\nInput: a **b**   [d\ufffd, base 0.500, +kNN 2.0e-05, +GNN 0.100]"
    assert MarkedText("a ", "b", "", "_") == "a _b_"
