"""Tasks of lm-eval in local files, one of each kind, and what they should give: shared by every way to evaluate a book.

write_tasks(folder, book, "gnn_knn")           # three YAML tasks and their data
numbers(results)                               # {"gnnlm_choice acc": 0.5, ...} of what simple_evaluate returned
expected_numbers(book, "gnn_knn", folder)      # the same by plain loops over Book.score and Book.generate
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gnnlm.book import Book

CHOICE, ROLLING, WRITING = TASKS = ("gnnlm_choice", "gnnlm_rolling", "gnnlm_writing")
PROMPTS = ("ban dor kisha", "lun mev", "kito", "", "dov bar luto men", "besha dor ban kin lur. mev ban")
CHOICES = (" ban", " lusha mer.", " ki", "kin dov")
MOST = 12  # tokens to write
STOP = "."


def write_tasks(folder: Path, book: Book, predictor: str) -> Path:
    """Three tasks; half the targets of the last are what the predictor writes."""
    rng = np.random.default_rng(1)
    data: dict[str, list[dict[str, Any]]] = {
        CHOICE: [{"prompt": prompt, "gold": int(rng.integers(len(CHOICES)))} for prompt in PROMPTS for _ in range(2)],
        ROLLING: [{"text": " ".join(PROMPTS[: count + 1]) + "\n" + " ".join(CHOICES * count)} for count in range(5)],
        WRITING: [
            {"prompt": prompt, "target": _written(book, predictor, prompt) if number % 2 else "none of this"}
            for number, prompt in enumerate(filter(None, PROMPTS))  # stock clients cannot write on from nothing
        ],
    }
    about: dict[str, dict[str, Any]] = {
        CHOICE: {
            "output_type": "multiple_choice",
            "doc_to_text": "{{prompt}}",
            "doc_to_choice": list(CHOICES),
            "doc_to_target": "gold",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "brier_score"}],
        },
        ROLLING: {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        WRITING: {
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{target}}",
            "generation_kwargs": {"until": [STOP], "max_gen_toks": MOST, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in data.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        files = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "datasets")}
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **about[name]}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    return folder


def numbers(results: dict[str, Any]) -> dict[str, float]:
    """Every metric by task and name, without the errors."""
    return {
        f"{task} {key.split(',')[0]}": float(value)
        for task, values in results["results"].items()
        for key, value in values.items()
        if "," in key and "_stderr" not in key
    }


def expected_numbers(book: Book, predictor: str, folder: Path) -> dict[str, float]:
    """What lm-eval should report, by its definitions."""
    found: dict[str, list[float]] = {"acc": [], "acc_norm": [], "brier_score": [], "exact_match": []}
    for line in _lines(folder, CHOICE):
        lls = np.array([_sum(book, predictor, line["prompt"], choice) for choice in CHOICES])
        found["acc"].append(float(lls.argmax() == line["gold"]))
        lengths = [len(choice) for choice in CHOICES]
        found["acc_norm"].append(float((lls / lengths).argmax() == line["gold"]))
        probs = np.exp(lls - lls.max()) / np.exp(lls - lls.max()).sum()
        found["brier_score"].append(float(((probs - np.eye(len(CHOICES))[line["gold"]]) ** 2).sum()))
    total, words, size = 0.0, 0, 0
    for line in _lines(folder, ROLLING):
        total += float(book.score(line["text"], predictors=[predictor]).log_probs[predictor].sum())
        words += len(re.split(r"\s+", line["text"]))
        size += len(line["text"].encode())
    for line in _lines(folder, WRITING):
        found["exact_match"].append(float(_written(book, predictor, line["prompt"]) == line["target"]))
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return {
        **{f"{CHOICE} {name}": means[name] for name in ("acc", "acc_norm", "brier_score")},
        f"{ROLLING} word_perplexity": math.exp(-total / words),
        f"{ROLLING} bits_per_byte": -total / size / math.log(2),
        f"{WRITING} exact_match": means["exact_match"],
    }


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def _sum(book: Book, predictor: str, context: str, continuation: str) -> float:
    return float(book.score((context, continuation), predictors=[predictor]).log_probs[predictor].sum())


def _written(book: Book, predictor: str, prompt: str) -> str:
    return book.generate(prompt, predictor=predictor, max_tokens=MOST, stop=[STOP], draft=False).text
