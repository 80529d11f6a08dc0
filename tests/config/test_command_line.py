"""Bad input through the command line: exit code 1 and one line."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from tests.cli import error_line, gnnlm
from tests.conftest import WriteConfig, write_texts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: x\nseed: 2020-99-99", "seed: expected a whole number from 0 to 2,147,483,646 (got '2020-99-99')"),
        ("run: x\nseed: !!int x", "line 2: tags such as !!int are not supported"),
        ("run: x\nseed: " + "9" * 5000, "line 2: a number of 5,000 characters"),
        ("[" * 100_000, "line 1: values are nested more than 20 deep"),
        ("run: x\nrun: y", "line 2: run is given twice (first on line 1)"),
        ("a: &a [1]\nrun: *a", "line 1: anchors and aliases"),
        ("run: x\ntune: {temperatures: [.nan]}", "tune.temperatures.0: expected a number from 1e-09"),
        ("run: x\n# " + "x" * 300_000, "is larger than 256 KB"),
    ],
)
def test_config_files(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    line = error_line("status", tmp_path / "c.yaml")
    assert message in line
    assert "c.yaml" in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gnn.layers", "--set expects name=value, such as gnn.layers=2 (got 'gnn.layers')"),
        ("seed=!!int x", "--set seed: tags such as !!int are not supported"),
        ("seed=" + "9" * 5000, "--set seed: a number of 5,000 characters"),
        ("gnn={layers: 1, layers: 2}", "--set gnn: layers is given twice; keep one of them"),
        ("seed.x=1", "--set seed.x: seed is not a section of fields (it is 3)"),
        ("corpus.source=[a", "--set corpus.source: not valid YAML"),
        ("corpus.source=\udcff", "--set corpus.source: the character U+DCFF is not allowed"),
        ("eval.bootstrap=1", "eval.bootstrap: expected a whole number from 40 to 100,000 (got 1)"),
    ],
)
def test_overrides(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text("run: x\nseed: 3\n")
    assert message in error_line("status", tmp_path / "c.yaml", "--set", override)


def test_a_run_directory_with_a_name_that_is_not_utf_8(write_config: WriteConfig, tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/r\xff")
    (tmp_path / "r\udcff" / "config.yaml").write_bytes(write_config().read_bytes())
    assert "run: expected text that can be written as UTF-8" in error_line("status", tmp_path / "r\udcff")


def test_a_folder_of_odd_files(write_config: WriteConfig, tmp_path: Path) -> None:
    """Everything is told in one line, or read and counted."""
    texts = write_texts(tmp_path / "texts", documents=6)
    damaged = bytearray(gzip.compress(b"words"))
    damaged[10] = 0xFF
    (texts / "damaged.txt.gz").write_bytes(damaged)
    config = write_config(corpus={"source": str(texts)})
    assert "damaged.txt.gz is not a whole gzip file" in error_line("corpus", config)
    (texts / "picture.png").write_bytes(b"\xff")
    (texts / "PAGE.HTML").write_text("<p>bar ban kito lur</p><script>no</script>")
    os.mkfifo(texts / "pipe.txt")
    with open(os.fsencode(texts) + b"/n\xff.txt", "w") as file:
        file.write("dosha mer bav ban")
    done = gnnlm("corpus", write_config(corpus={"source": str(texts), "skip_unreadable": True}))
    assert "damaged.txt.gz is not a whole gzip file" in done.stderr
    assert "1 file of other kinds (1 .png) and 1 special file" in done.stderr
    made = "".join(file.read_text() for file in sorted((tmp_path / "run").rglob("*.jsonl")))
    assert '"name": "n\\\\xff.txt"' in made
    assert '"text": "bar ban kito lur\\n"' in made
    gnnlm("corpus", config, "--set", "corpus.skip_unreadable=true")  # done already: the fingerprint is stable
