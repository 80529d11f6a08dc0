"""Reading text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gnnlm.corpus.document import Document
from gnnlm.corpus.sources import read_documents, source_fingerprint
from gnnlm.errors import CorpusError


def test_folder_of_everything(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md").write_text("# A\r\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"bee"))
    (tmp_path / "c.jsonl").write_text(
        json.dumps({"text": "one", "title": "first"}) + "\n\n" + json.dumps({"text": "two"})
    )
    (tmp_path / "empty.rst").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert read_documents(str(tmp_path)) == [
        Document("b.txt.gz", "bee"),
        Document("c.jsonl:first", "one"),
        Document("c.jsonl:3", "two"),
        Document("sub/a.md", "# A\n"),
    ]


def test_single_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffhello", encoding="utf-8")
    assert read_documents(str(tmp_path / "a.txt")) == [Document("a.txt", "hello")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not json", 'c.jsonl:1: expected a JSON object with a "text" field'),
        (b"[1]", "c.jsonl:1: expected"),
        (b'{"text": 3}', r'"text" to be a string \(got int\)'),
    ],
)
def test_bad_json_lines(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "c.jsonl").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        read_documents(str(tmp_path))


def test_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_text("fine")
    with pytest.raises(CorpusError, match=r"a\.txt is not utf-8: byte 0xe9 at offset 3"):
        read_documents(str(tmp_path))
    assert [d.name for d in read_documents(str(tmp_path), skip_unreadable=True)] == ["b.txt"]
    assert read_documents(str(tmp_path), encoding="latin-1")[0].text == "café"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="does not exist"):
        read_documents(str(tmp_path / "no"))
    with pytest.raises(CorpusError, match="holds no file ending in"):
        read_documents(str(tmp_path))
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(CorpusError, match="holds no text"):
        read_documents(str(tmp_path))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 100)[:-9])
    with pytest.raises(CorpusError, match="not a whole gzip file"):
        read_documents(str(tmp_path))


def test_json_lines_end_at_newlines_only(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text('{"text": "one\u2028two"}\n', encoding="utf-8")
    assert read_documents(str(tmp_path))[0].text == "one\u2028two"
    (tmp_path / "c.jsonl").write_text('{"text": "\\ud800"}\n', encoding="utf-8")
    with pytest.raises(CorpusError, match="half of a surrogate pair"):
        read_documents(str(tmp_path))


def test_hidden_folders_and_the_run_directory_are_not_text(tmp_path: Path) -> None:
    for name in ("a.txt", ".git/b.txt", "runs/x/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("words")
    assert [d.name for d in read_documents(str(tmp_path), leave_out=tmp_path / "runs" / "x")] == ["a.txt"]


def test_fingerprint_follows_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    before = source_fingerprint(str(tmp_path))
    assert source_fingerprint(str(tmp_path)) == before
    (tmp_path / "a.txt").write_text("two")
    assert source_fingerprint(str(tmp_path)) != before


def test_python_docs() -> None:
    documents = {d.name: d.text for d in read_documents("python-docs")}
    assert "add_argument" in documents["argparse"]
    assert len(documents["topics/assert"]) > 200
    assert sum(map(len, documents.values())) > 1_000_000
    assert not any(name.startswith(("test.", "idlelib")) for name in documents)
    assert not any("Character Mapping Codec" in text for text in documents.values())  # one sentence, dozens of times
