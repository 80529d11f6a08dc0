"""Score test once, and write the report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from gnnlm.artifact import Artifact, Draft, write_json
from gnnlm.config import EvalConfig
from gnnlm.corpus.stream import SPLITS, Stream
from gnnlm.engine import Spread, here
from gnnlm.evaluate.mix_weight import sample_text
from gnnlm.evaluate.passage_rows import PassageInputs, compare_passages
from gnnlm.evaluate.plots import plot_rows, plot_training
from gnnlm.evaluate.report import (
    CacheFacts,
    CodecFacts,
    IndexFacts,
    LmFacts,
    Report,
    ReportScores,
    TrainingFacts,
    WeightRow,
)
from gnnlm.evaluate.report_tables import markdown
from gnnlm.evaluate.speeds import seconds_each, speeds
from gnnlm.predict.knn import Mix
from gnnlm.predict.predictor import MIXED, STATE_OF, Predictor
from gnnlm.predict.split_scoring import SearchedText, SplitScores, score_surely


@dataclass(frozen=True)
class Evaluation:
    """A finished predictor, the test split, and the artifacts that the report describes."""

    predictor: Predictor
    text: SearchedText
    stream: Stream
    corpus: Artifact
    encoded: Artifact
    indexed: Artifact
    searched: Artifact
    codec: Artifact
    tuned: Artifact
    model: str
    lm: Artifact | None = None
    training: Artifact | None = None
    cache: Artifact | None = None
    passages: PassageInputs | None = None


def build_report(
    draft: Draft, evaluation: Evaluation, config: EvalConfig, ngram: int, seed: int, spread: Spread = here
) -> Artifact:
    """Score test under every predictor; write the table, the JSON, the Markdown, the figures and the scores."""
    names = evaluation.predictor.names
    gated = tuple(evaluation.tuned.facts.get("variants", ()))  # the states whose confidence a gate reads
    scored = score_surely(
        evaluation.predictor, evaluation.text, config.block, "score test", names, gated, draft=draft, spread=spread
    )
    scores = scored.log_probs
    seconds = seconds_each(scored.seconds, names)
    seconds["encode"] = evaluation.encoded.facts["seconds"]["test"]
    seconds["search"] = evaluation.searched.facts["seconds"]["test"]
    corpus = evaluation.corpus.facts
    stream = evaluation.stream
    tokens = stream.token_count
    test = ReportScores(
        scores,
        stream.document_of(np.flatnonzero(np.asarray(stream.tokens) >= 0)),
        stream.names,
        corpus["test"]["whitespace_words"],
        corpus["test"]["bytes"],
        speeds(names, seconds, tokens),
    )
    passages = None
    if evaluation.passages is not None:
        passages, passage_scores = compare_passages(evaluation.passages, evaluation.predictor, test, config, seed)
        scores = {**scores, **passage_scores}
    report = Report(
        rows=test.rows(config.bootstrap, seed),
        documents=test.documents(),
        test_tokens=tokens,
        test_documents=len(stream.names),
        split_documents={split: corpus[split]["documents"] for split in SPLITS},
        cut_to={split: corpus[split]["cut_to"] for split in SPLITS if "cut_to" in corpus[split]},
        store_tokens=corpus["train"]["tokens"],
        model=evaluation.model,
        mix=evaluation.tuned.facts["mix"],
        weights=_weights(evaluation, scored),
        lm=LmFacts(**_facts(evaluation.lm)),
        overlap={split: corpus[split]["overlap"] for split in SPLITS},
        overlap_ngram=ngram,
        training=None if evaluation.training is None else TrainingFacts(**evaluation.training.facts),
        codec=CodecFacts(**evaluation.codec.facts),
        index=IndexFacts(**evaluation.indexed.facts),
        cache=None if evaluation.cache is None else CacheFacts(**evaluation.cache.facts),
        seconds=seconds,
        passages=passages,
    )
    for name, values in scores.items():
        draft.save(f"{name}.log_probs.npy", values.astype(np.float32))
    write_json(draft.file("report.json"), report.as_json())
    draft.write_text("report.md", markdown(report))
    plot_rows(report, draft.file("rows.png"))
    if evaluation.training is not None:
        history = json.loads(evaluation.training.text("history.json"))
        plot_training(history, evaluation.training.facts["best_step"], draft.file("training.png"))
    return draft.finish({"predictors": list(names)})


def _weights(evaluation: Evaluation, scored: SplitScores) -> dict[str, dict[str, WeightRow]]:
    """The test tokens with one weight, with buckets and with a gate, by predictor; empty without a gate."""
    store = evaluation.predictor.graphs.store
    variants = evaluation.tuned.facts.get("variants", {})
    rows: dict[str, dict[str, WeightRow]] = {}
    for name in evaluation.predictor.names:
        state = STATE_OF[name]
        if name not in MIXED or state not in variants:
            continue
        rows[name] = {}
        without = scored.log_probs[state]
        for variant, fitted in variants[state].items():
            chosen = fitted["mix"] == evaluation.tuned.facts["mix"][state]
            scores = scored.log_probs[name]
            if not chosen:
                mix = Mix.of(fitted["mix"])
                confidence = None if mix.gate is None else scored.sure[state]
                scores = sample_text(evaluation.text, store, without, mix, confidence).log_probs(mix).numpy()
            rows[name][variant] = WeightRow.of(scores, without, fitted["valid_loss"], chosen)
    return rows


def _facts(artifact: Artifact | None) -> dict[str, Any]:
    return {} if artifact is None else artifact.facts
