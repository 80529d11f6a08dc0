"""Files as they are found in the wild: other kinds, other encodings, damaged, odd names, pipes and loops."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from gnnlm.config import CorpusConfig
from gnnlm.corpus import text_writer
from gnnlm.corpus.build import read_splits, text_fingerprint
from gnnlm.corpus.document import TokenizedDocument
from gnnlm.corpus.python_docs import _docstrings
from gnnlm.corpus.sources import check_text, read_documents, source_fingerprint
from gnnlm.corpus.text_files import cited, find_files, list_files
from gnnlm.corpus.text_writer import SplitWriter
from gnnlm.corpus.vocabulary import ByteVocabulary, WordVocabulary, load_vocabulary
from gnnlm.errors import CorpusError, ModelError


def names(folder: Path, **settings: object) -> list[str]:
    return [document.name for document in read_documents(str(folder), **settings)]  # type: ignore[arg-type]


# -- kinds of files -------------------------------------------------------------------------------------------------


def test_suffixes_in_upper_case(tmp_path: Path) -> None:
    (tmp_path / "A.TXT").write_text("a")
    (tmp_path / "B.Md").write_text("b")
    (tmp_path / "C.JSONL").write_text(json.dumps({"text": "c"}))
    (tmp_path / "D.TXT.GZ").write_bytes(gzip.compress(b"d"))
    (tmp_path / "E.adoc").write_text("e")
    assert [d.text for d in read_documents(str(tmp_path))] == ["a", "b", "c", "d", "e"]
    assert names(tmp_path / "A.TXT") == ["A.TXT"]


def test_files_of_other_kinds_are_counted(tmp_path: Path, logged: Callable[[], str]) -> None:
    for name in ("a.txt", "b.png", "c.PNG", "d.py", "Makefile", ".hidden", "x.tar.gz"):
        (tmp_path / name).write_text("words")
    assert names(tmp_path) == ["a.txt"]
    told = logged()
    assert "text files: 1; not read: 5 files of other kinds (2 .png, 1 " in told
    for kind in ("1 .py", "1 without a suffix", "1 .tar"):
        assert kind in told
    assert "corpus.suffixes" in told
    (tmp_path / "a.txt").unlink()
    with pytest.raises(CorpusError, match=r"holds no file ending in \.txt.* only 5 files of other kinds \(2 \.png"):
        read_documents(str(tmp_path))


def test_nothing_is_said_where_nothing_is_left_out(tmp_path: Path, logged: Callable[[], str]) -> None:
    (tmp_path / "a.txt").write_text("words")
    read_documents(str(tmp_path))
    assert logged() == ""


def test_many_kinds_are_summed_up(tmp_path: Path) -> None:
    for n in range(9):
        (tmp_path / f"a.x{n}").write_text("")
    (tmp_path / "a.txt").write_text("words")
    assert "9 files of other kinds" in find_files(tmp_path).left_out()
    assert find_files(tmp_path).left_out().endswith(", 4 more kinds)")


def test_suffixes_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "a.tex").write_text("one")
    (tmp_path / "b.PY").write_text("two")
    (tmp_path / "c.txt").write_text("three")
    (tmp_path / "d.html").write_text("<p>four</p>")
    assert names(tmp_path, suffixes=(".TEX", ".py")) == ["a.tex", "b.PY"]
    assert [d.text for d in read_documents(str(tmp_path), suffixes=(".html",))] == ["four\n"]
    with pytest.raises(CorpusError, match=r"a\.tex: expected a file ending in .* set corpus\.suffixes"):
        read_documents(str(tmp_path / "a.tex"))
    assert names(tmp_path / "a.tex", suffixes=(".tex",)) == ["a.tex"]


def test_suffixes_of_a_config_are_read_and_fingerprinted(tmp_path: Path) -> None:
    for n in range(3):
        (tmp_path / f"{n}.tex").write_text(f"words {n}")
    config = CorpusConfig(source=str(tmp_path), suffixes=(".tex",))
    splits = read_splits(config, 0, tmp_path / "run")
    assert sorted(document.name for split in splits.values() for document in split) == ["0.tex", "1.tex", "2.tex"]
    before = text_fingerprint(config, tmp_path / "run")
    (tmp_path / "c.txt").write_text("not read")
    assert text_fingerprint(config, tmp_path / "run") == before
    (tmp_path / "0.tex").write_text("other words")
    assert text_fingerprint(config, tmp_path / "run") != before


# -- damage ---------------------------------------------------------------------------------------------------------


def damaged_gzip() -> bytes:
    """A whole header and nonsense after it: zlib refuses it, with an error of its own."""
    data = bytearray(gzip.compress(b"words and words" * 50, mtime=0))
    data[10] = 0xFF
    with pytest.raises(zlib.error):
        gzip.decompress(bytes(data))
    return bytes(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (damaged_gzip(), "is not a whole gzip file"),
        (b"plain", "is not a whole gzip file"),
        (gzip.compress(b"x" * 100, mtime=0)[:-9], "is not a whole gzip file"),
        (gzip.compress(b"\xff\xff", mtime=0), "is not utf-8: byte 0xff at offset 0"),
    ],
)
def test_damaged_gzip(tmp_path: Path, content: bytes, message: str, logged: Callable[[], str]) -> None:
    (tmp_path / "a.txt.gz").write_bytes(content)
    (tmp_path / "b.txt").write_text("fine")
    with pytest.raises(CorpusError, match=rf"a\.txt\.gz {message}.*corpus.skip_unreadable"):
        read_documents(str(tmp_path))
    assert names(tmp_path, skip_unreadable=True) == ["b.txt"]
    assert message in logged()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("/proc/self/mem")  # a regular file, and every read at its start fails
    (tmp_path / "b.txt").write_text("fine")
    with pytest.raises(CorpusError, match=r"a\.txt cannot be read \(Input/output error\)"):
        read_documents(str(tmp_path))
    assert names(tmp_path, skip_unreadable=True) == ["b.txt"]
    before = source_fingerprint(str(tmp_path))
    (tmp_path / "b.txt").write_text("other")
    assert source_fingerprint(str(tmp_path)) != before


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").write_text("words")
    real = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(CorpusError, match=r"the folder .*closed cannot be read: Permission denied; check its perm"):
        list_files(tmp_path)


# -- encodings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("plain words".encode(encoding))
    (tmp_path / "b.txt").write_text("fine")
    with pytest.raises(CorpusError, match=r"(?i)a\.txt .*utf-16.*set corpus\.encoding"):
        read_documents(str(tmp_path))
    assert names(tmp_path, skip_unreadable=True) == ["b.txt"]
    assert read_documents(str(tmp_path / "a.txt"), encoding=encoding)[0].text == "plain words"


@pytest.mark.parametrize("encoding", ["hex", "rot13", "no-such", "utf-8\0", "undefined"])
def test_encodings_that_are_not(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(CorpusError, match=r"expected a text encoding such as utf-8 \(got '"):
        read_documents(str(tmp_path), encoding=encoding)


def test_a_half_surrogate_pair_in_an_encoding_that_can_spell_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab+2AA-")
    with pytest.raises(CorpusError, match=r"a\.txt: character 2 is half of a surrogate pair \(U\+D800\)"):
        read_documents(str(tmp_path), encoding="utf-7")


def test_check_text() -> None:
    check_text("caf\u00e9 \N{GRINNING FACE}", "the text")
    with pytest.raises(CorpusError, match=r"^the text: character 1 is half of a surrogate pair \(U\+D800\); expected"):
        check_text("a\ud800", "the text")


def test_docstrings_are_whole_characters(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Half a pair: \\ud800."""')
    assert list(_docstrings(tmp_path / "a.py")) == ["Half a pair: ?."]


# -- names ----------------------------------------------------------------------------------------------------------


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(folder)
    for name in (b"n\xff.txt", b"b.txt", b"c.\xfe"):
        with open(folder + b"/" + name, "w") as file:
            file.write("words")
    assert names(tmp_path) == ["caf\\xe9/b.txt", "caf\\xe9/n\\xff.txt"]
    assert find_files(tmp_path).left_out() == "1 file of other kinds (1 .\\xfe)"
    assert source_fingerprint(str(tmp_path)) == source_fingerprint(str(tmp_path))
    with open(folder + b"/n\xff.txt", "wb") as file:
        file.write(b"\xff")
    with pytest.raises(CorpusError, match=r"n\\xff\.txt is not utf-8") as caught:
        read_documents(str(tmp_path))
    str(caught.value).encode("utf-8")


def test_cited() -> None:
    assert cited(Path("a/\udcff.txt")) == "a/\\xff.txt"
    assert cited("\ud800") == "\\ud800"
    assert cited("caf\u00e9") == "caf\u00e9"


@pytest.mark.parametrize("source", ["a\0b", "x" * 5000, "\ud800"])
def test_names_that_no_file_can_have(source: str) -> None:
    with pytest.raises(CorpusError, match=r"cannot be read: .*; check the path$"):
        read_documents(source)


# -- what is not a file ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(30)
def test_pipes_devices_loops_and_folders_named_like_files(tmp_path: Path, logged: Callable[[], str]) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "null.txt").symlink_to("/dev/zero")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "self.txt").symlink_to(tmp_path / "self.txt")
    (tmp_path / "x.txt").mkdir()
    (tmp_path / "x.txt" / "real.txt").write_text("words")
    (tmp_path / "x.txt" / "loop").symlink_to(tmp_path)
    assert names(tmp_path) == ["x.txt/real.txt"]
    told = logged()
    assert "4 special files (pipes, devices or broken links) and 1 linked folder" in told
    source_fingerprint(str(tmp_path))
    for name in ("pipe.txt", "null.txt"):
        with pytest.raises(CorpusError, match="is a pipe or a device; expected a file or a folder"):
            read_documents(str(tmp_path / name))
    with pytest.raises(CorpusError, match="cannot be read: Too many levels of symbolic links"):
        read_documents(str(tmp_path / "self.txt"))
    with pytest.raises(CorpusError, match="does not exist"):
        read_documents(str(tmp_path / "gone.txt"))


def test_a_linked_file_is_read_but_not_from_the_run_directory(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "made.txt").write_text("made")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("words")
    (tmp_path / "text" / "b.txt").symlink_to(tmp_path / "text" / "a.txt")
    (tmp_path / "text" / "c.txt").symlink_to(tmp_path / "run" / "made.txt")
    assert names(tmp_path / "text", leave_out=tmp_path / "run") == ["a.txt", "b.txt"]
    (tmp_path / "knot").symlink_to(tmp_path / "knot")
    assert names(tmp_path / "text", leave_out=tmp_path / "knot") == ["a.txt", "b.txt", "c.txt"]


# -- JSON lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ' + "[" * 100_000, "c.jsonl:1: expected a JSON object"),
        ('{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "c.jsonl:1: expected a JSON object"),
        ('{"text": ' + "9" * 5000 + "}", "c.jsonl:1: expected"),
        ('{"text": "a", "name": "\\ud800"}', r"c.jsonl:1, name: character 0 is half of a surrogate pair \(U\+D800\)"),
        ('{"text": "ab\\udfff"}', r"c.jsonl:1, text: character 2 is half of a surrogate pair"),
        ("null", "c.jsonl:1: expected"),
        ('{"text": null}', r'expected "text" to be a string \(got NoneType\)'),
    ],
)
def test_bad_json(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "c.jsonl").write_text(line)
    with pytest.raises(CorpusError, match=message):
        read_documents(str(tmp_path))


def test_what_a_record_is_cited_by(tmp_path: Path) -> None:
    records = [
        {"name": "n", "id": 1},
        {"title": "t"},
        {"id": 0},
        {"id": 7.5},
        {"id": [1]},
        {"name": ""},
        {"name": None},
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps({"text": "a", **record}) for record in records))
    assert [name.partition(":")[2] for name in names(tmp_path)] == ["n", "t", "0", "7.5", "5", "6", "7"]


def test_a_jsonl_that_is_not_one(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl.txt").write_text("plain words")
    assert read_documents(str(tmp_path))[0].text == "plain words"


# -- what is made of them -------------------------------------------------------------------------------------------


def test_a_document_too_long_for_its_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gnnlm.artifact import Draft

    monkeypatch.setattr(text_writer, "LONGEST", 3)
    with Draft(tmp_path / "corpus", "corpus", {}) as draft:
        writer = SplitWriter(draft, "train", 10)
        writer.add(TokenizedDocument("a", "abc", [1], [0]))
        with pytest.raises(CorpusError, match="b has 4 characters; expected at most 3 in a document"):
            writer.add(TokenizedDocument("b", "abcd", [1], [0]))


def test_vocabularies_keep_every_byte_and_refuse_nonsense(tmp_path: Path) -> None:
    WordVocabulary(["<eos>", "<unk>", "a\udcff"]).save(tmp_path)
    found = load_vocabulary(tmp_path)
    assert isinstance(found, WordVocabulary)
    assert found.words == ["<eos>", "<unk>", "a\udcff"]
    ByteVocabulary([10, 255]).save(tmp_path)
    assert isinstance(load_vocabulary(tmp_path), ByteVocabulary)
    for line in ("256", "9" * 5000, "-1", "x"):
        (tmp_path / "vocabulary.txt").write_text(f"bytes\n10\n{line}\n")
        with pytest.raises(ModelError, match="expected a vocabulary that gnnlm wrote"):
            load_vocabulary(tmp_path)
