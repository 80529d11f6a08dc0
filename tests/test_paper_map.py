"""docs/paper-map.md: the commands and files it names exist; its constants and formulas are the code's."""

from __future__ import annotations

import importlib
import itertools
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from gnnlm.cli.commands import app
from gnnlm.config import GnnConfig
from gnnlm.evaluate.analysis.analysis_parts import PARTS
from tests.gnn.graphs import random_graph
from tests.gnn.test_layer import EMBEDDINGS, make_model

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "paper-map.md").read_text(encoding="utf-8")
ROWS = PAGE.split("## Tables, figures and numbers")[1].split("\n## ")[0]
SPANS = re.findall(r"`([^`]+)`", ROWS)
COMMANDS = sorted({span for span in SPANS if span.startswith("gnnlm ")})


def test_every_row_has_a_command() -> None:
    rows = [line for line in ROWS.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 16
    for row in rows:
        assert "`gnnlm " in row or "`benchmarks/" in row, row


@pytest.mark.parametrize("line", COMMANDS)
def test_command_exists(line: str) -> None:
    words = shlex.split(line)[1:]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    options = {name: option for option in command.params for name in option.opts if name.startswith("--")}
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            assert word in options, f"{line}: {command.name} has no {word}"
            value = None if getattr(options[word], "is_flag", False) else words.pop(0)
            assert word != "--part" or value in PARTS, line
        elif word.endswith(".yaml"):
            assert (ROOT / word).is_file(), word


@pytest.mark.parametrize("file", [span for span in SPANS if span.startswith("benchmarks/")])
def test_benchmark_exists(file: str) -> None:
    assert (ROOT / file).is_file()


CONSTANTS = re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \| `([^`]+)\.py` \|$", PAGE, flags=re.MULTILINE)


def test_constants() -> None:
    assert len(CONSTANTS) >= 10
    for name, written, file in CONSTANTS:
        value = getattr(importlib.import_module(f"gnnlm.{file.replace('/', '.')}"), name)
        assert written.strip() == (", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else f"{value:g}")


def test_the_network_is_the_formulas_of_the_page() -> None:
    """Every product and sum as the page writes them, for one token at a time."""
    model = make_model(GnnConfig(heads=2, layers=2, context=4, dropout=0))
    graph, features = random_graph(), torch.nn.functional.layer_norm(EMBEDDINGS, (8,))
    tokens, windows = graph.windows.tokens_P, graph.windows
    e = torch.where(tokens[:, None] < 0, 0.0, features[tokens])
    y = torch.nn.functional.layer_norm(windows.states_PD, (8,))
    h_BTD = graph.context_BTD
    for layer in map(model.layer, range(2)):
        x_BTD, new_BTD = torch.nn.functional.layer_norm(h_BTD, (8,)), h_BTD.clone()
        for b, t in itertools.product(*map(range, h_BTD.shape[:2])):
            both = []
            for h in range(2):
                part = slice(4 * h, 4 * h + 4)
                query = layer.query[0][part] @ x_BTD[b, t]
                seen = [i for i in range(t + 1) if t - i < 4 and graph.document_BT[b, i] == graph.document_BT[b, t]]
                scores, values = [], []
                for i in seen:
                    key = layer.key[0][part] @ x_BTD[b, i]
                    scores.append(layer.mu[0, h] / math.sqrt(4) * key @ layer.attention_EHdd[0, h] @ query)
                    values.append(layer.feature_EHdd[0, h].T @ layer.value[0][part] @ x_BTD[b, i])
                intra = torch.stack(scores).softmax(0) @ torch.stack(values)
                scores, values = [], []
                for k, p in itertools.product(range(graph.rows_BTK.shape[2]), range(3)):
                    row, similarity = graph.rows_BTK[b, t, k], graph.similarity_BTK[b, t, k]
                    if graph.edge_BTK[b, t, k] and windows.slot_UW[row, p]:
                        j = windows.place_UW[row, p]
                        key = layer.key[1][part] @ y[j] + layer.token_key_DE[part] @ e[j]
                        value = layer.value[1][part] @ y[j] + layer.token_value_DE[part] @ e[j]
                        score = layer.mu[1, h] / math.sqrt(4) * key @ layer.attention_EHdd[1, h] @ query
                        scores.append(score + layer.slot_bias_HW[h, p] + layer.similarity_H[h] * similarity / 0.01)
                        values.append(layer.feature_EHdd[1, h].T @ value)
                inter = torch.stack(scores).softmax(0) @ torch.stack(values) if scores else torch.zeros_like(intra)
                nearest = graph.nearest_BT[b, t] if scores else torch.tensor(1.0)
                near = torch.sigmoid(layer.near_H[h] + layer.near_slope_H[h] * (nearest - 1) / 0.01)
                both.append(10 * layer.gate_H[h] * (intra + near * inter))
            new_BTD[b, t] += layer.output[0] @ torch.cat(both)
        h_BTD = new_BTD
    torch.testing.assert_close(model(graph)[0], h_BTD, rtol=1e-10, atol=1e-10)
