"""Fuzzed configs, corpora, manifests and HTTP bodies: one line that says what is wrong, and nothing half-written.

Each kind is drawn by the seed and its number, which a failure prints.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import string
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gnnlm.artifact import Artifact, fingerprint, state_of
from gnnlm.artifact.ownership import damage, settle
from gnnlm.config import load_config
from gnnlm.errors import ArtifactError, ConfigError
from gnnlm.generation import Generation, RefittedArtifact, SegmentRecord, commit, current_number, read_current
from tests.faults.fault import command
from tests.faults.scenarios import World

CONFIGS, CORPORA, MANIFESTS, RECORDS, BODIES, CHANGES = 120, 48, 120, 60, 120, 60

Value = Any
ODD: list[Value] = [
    None, True, False, 0, -1, 1e308, -1e-308, float("nan"), float("inf"), 2**70, "", " ", "\0", "\n", "é" * 300,
    "../..", "NaN", "null", [], {}, [[]], [None], {"": ""}, {"a": {"b": {"c": 1}}}, "x" * 10_000, "\ud83d",
    [1] * 1000, "$RUN",
]  # fmt: skip


def test_there_are_enough_kinds() -> None:
    assert CONFIGS + CORPORA + MANIFESTS + BODIES >= 300


def mutated(value: Value, chance: random.Random) -> Value:
    """The same nested value with one thing in it changed, added or removed."""
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key, kind = chance.choice(list(value)), chance.random()
        if kind < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if kind < 0.2:
            return {**value, "".join(chance.choices(string.printable, k=5)): chance.choice(ODD)}
        return {**value, key: mutated(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.5:
        place = chance.randrange(len(value))
        return [*value[:place], mutated(value[place], chance), *value[place + 1 :]]
    return chance.choice(ODD)


def garbled(data: bytes, chance: random.Random) -> bytes:
    """Bytes with some of them changed, doubled or cut."""
    place, kind = chance.randrange(len(data)), chance.randrange(4)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]
    if kind == 2:
        return data[:place] + chance.randbytes(chance.randrange(1, 9)) + data[place:]
    return data[:place] * 2 + data[place:]


# -- configs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(CONFIGS))
def test_configs(world: World, tmp_path: Path, seed: int, number: int) -> None:
    chance = random.Random(f"{seed} config {number}")
    values = world.values("plain", tmp_path / "run")
    file = tmp_path / "config.yaml"
    if number % 3:
        for _ in range(chance.randrange(1, 4)):
            values = mutated(values, chance)
        text = yaml.safe_dump(values, allow_unicode=True).encode("utf-8", "replace")
    else:
        text = garbled(yaml.safe_dump(values).encode(), chance)
    file.write_bytes(text)
    said = "fine"
    try:
        load_config(file)
    except ConfigError as error:
        said = str(error)
    assert said.strip()
    assert len(said) < 3000
    assert not (tmp_path / "run").exists()


# -- corpora -----------------------------------------------------------------------------------------------------------


def nothing(folder: Path, chance: random.Random) -> None:
    pass


def random_bytes(folder: Path, chance: random.Random) -> None:
    (folder / "bytes.txt").write_bytes(chance.randbytes(chance.randrange(1, 5000)))


def a_giant_line(folder: Path, chance: random.Random) -> None:
    (folder / "line.txt").write_text("word " * chance.randrange(10_000, 30_000))


def many_empty_lines(folder: Path, chance: random.Random) -> None:
    (folder / "lines.txt").write_text("\n" * chance.randrange(1, 100_000))


def nested_gz(folder: Path, chance: random.Random) -> None:
    (folder / "twice.txt.gz").write_bytes(gzip.compress(gzip.compress(b"some text " * 50)))
    (folder / "once.jsonl.gz").write_bytes(gzip.compress(b'{"text": "some text"}\n'))


def a_cut_gz(folder: Path, chance: random.Random) -> None:
    (folder / "cut.txt.gz").write_bytes(gzip.compress(b"some text " * 500)[:-9])
    (folder / "no.jsonl.gz").write_bytes(b"\x1f\x8b and no more")


def symlink_loops(folder: Path, chance: random.Random) -> None:
    (folder / "again").symlink_to(folder)
    (folder / "up").symlink_to(folder.parent)
    (folder / "self.txt").symlink_to(folder / "self.txt")
    (folder / "gone.txt").symlink_to(folder / "nowhere.txt")


def fifos(folder: Path, chance: random.Random) -> None:
    os.mkfifo(folder / "fifo.txt")
    os.mkfifo(folder / "fifo.jsonl")


def names_with_newlines(folder: Path, chance: random.Random) -> None:
    (folder / "two\nlines.txt").write_text("some text in a file with an odd name. " * 9)
    (folder / "tab\tand\x07bell.txt").write_text("more text in a file with an odd name. " * 9)
    os.mkdir(os.fsencode(folder) + b"/\xff\xfe")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe/\x80.txt")).write_text("bytes that are no name. " * 9)


def odd_jsonl(folder: Path, chance: random.Random) -> None:
    rows: list[Any] = [{"text": "fine " * 20, "name": "a"}, {"text": None}, {"text": 3}, [], {"no": "text"}, "words"]
    lines = [json.dumps(row) for row in chance.sample(rows, 4)] + ['{"text": "cut', "", "\0", "[" * 5000]
    (folder / "rows.jsonl").write_text("\n".join(chance.sample(lines, 5)))


def directories_named_as_files(folder: Path, chance: random.Random) -> None:
    (folder / "folder.txt").mkdir()
    (folder / "folder.txt" / "inner.txt").write_text("text inside. " * 20)
    (folder / "folder.jsonl.gz").mkdir()


def marks_and_surrogates(folder: Path, chance: random.Random) -> None:
    (folder / "mark.txt").write_bytes(b"\xef\xbb\xbftext with a mark. " * 20)
    (folder / "wide.txt").write_bytes("text in another encoding. ".encode("utf-16") * 5)
    (folder / "half.txt").write_bytes(b"\xed\xa0\x80 half a pair")


KINDS: list[Callable[[Path, random.Random], None]] = [
    nothing, random_bytes, a_giant_line, many_empty_lines, nested_gz, a_cut_gz, symlink_loops, fifos,
    names_with_newlines, odd_jsonl, directories_named_as_files, marks_and_surrogates,
]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", range(CORPORA))
def test_corpora(world: World, tmp_path: Path, seed: int, number: int) -> None:
    """Each kind alone, with text that is fine, and with others."""
    chance, text = random.Random(f"{seed} corpus {number}"), tmp_path / "text"
    world.values("plain", tmp_path / "run")
    text.mkdir()
    kinds = [KINDS[number % len(KINDS)]]
    if number >= len(KINDS):
        shutil.copytree(world.folder / "text", text, dirs_exist_ok=True)
    if number >= 2 * len(KINDS):
        kinds += chance.sample(KINDS, 2)
    for kind in dict.fromkeys(kinds):
        kind(text, chance)
    print(f"seed {seed}: {[kind.__name__ for kind in kinds]}")
    config, run = world.write_config("plain", tmp_path / "run"), tmp_path / "run"
    ended = command(run, "corpus", config, "--set", f"corpus.source={json.dumps(str(text))}")
    assert "Traceback" not in ended.errors
    if ended.code == 0:
        Artifact.open(run / "corpus").verify(trust=False)
        return
    assert ended.code == 1, ended.errors
    assert "this is a bug" not in ended.error
    assert not (run / "corpus").exists()
    mended = command(run, "corpus", config)
    assert mended.code == 0, mended.errors


# -- manifests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(MANIFESTS))
def test_manifests(world: World, tmp_path: Path, seed: int, number: int) -> None:
    """Of an artifact with parts, or of a part; also with a checksum that fits."""
    from gnnlm.artifact.json_record import sealed

    chance = random.Random(f"{seed} manifest {number}")
    run = tmp_path / "run"
    shutil.copytree(world.straight("plain"), run, ignore=shutil.ignore_patterns("tensorboard", "report", "search"))
    file = chance.choice([run / "store", run / "segments" / "0000" / "states"]) / "manifest.json"
    manifest = json.loads(file.read_text())
    inputs = manifest["inputs"]
    if number % 3 == 0:
        file.write_bytes(garbled(file.read_bytes(), chance))
    else:
        del manifest["checksum"]
        for _ in range(chance.randrange(1, 3)):
            manifest = mutated(manifest, chance)
        if number % 3 == 1 and isinstance(manifest, dict):
            with suppress(UnicodeEncodeError):
                manifest = sealed(manifest)
        file.write_text(json.dumps(manifest), "utf-8", "surrogatepass")
    before = {path for path in run.rglob("*")}
    for look in (look_at, lambda path, inputs: settle(path)):
        with suppress(ArtifactError):
            look(run / "store", inputs)
    assert {path for path in run.rglob("*")} == before


def look_at(path: Path, inputs: dict[str, Any]) -> None:
    assert state_of(path, inputs) in ("done", "stale", "damaged")
    damage(path)
    Artifact.open(path).verify(trust=False)


@pytest.mark.parametrize("number", range(RECORDS))
def test_records_of_generations(tmp_path: Path, seed: int, number: int) -> None:
    """One that is read has all that readers rely on; any other is refused by name."""
    chance = random.Random(f"{seed} record {number}")
    place = {"states": "refitted/0001/segments/0000/states"} if number % 2 else {}
    segment = SegmentRecord(
        "added/0001.0", {"text": "ab", "states": "cd"}, 3, 90, (1,), 30, {"t": (0, 2)}, (2,), place, (0,)
    )
    refits = {"tune": RefittedArtifact("refitted/0001/tune", "ab")} if number % 2 else {}
    commit(tmp_path, Generation(1, (segment,), {"corpus": "ef"}, "2026", "add", 3, 1, frozenset({"12"}), refits))
    file = tmp_path / "generations" / "1.json"
    record = json.loads(file.read_text())
    if number % 3 == 0:
        file.write_bytes(garbled(file.read_bytes(), chance))
    else:
        del record["checksum"]
        for _ in range(chance.randrange(1, 3)):
            record = mutated(record, chance)
        if isinstance(record, dict):
            with suppress(UnicodeEncodeError):
                record["checksum"] = fingerprint(record)
        file.write_text(json.dumps(record), "utf-8", "surrogatepass")
    try:
        found = read_current(tmp_path)
    except ArtifactError as error:
        found, said = None, str(error)
    if found is None:
        assert str(file) in said
        return
    assert found.documents + found.rows + len(json.dumps(found.as_json())) + len(found.summary()) > 0
    assert all(one.is_added or one.name.startswith("segments/") for one in found.segments)
    own = [each.path for each in found.refitted.values()]
    own += [path for one in found.segments for path in one.places.values()]
    assert all(".." not in Path(path).parts and not Path(path).is_absolute() for path in own)


# -- HTTP bodies -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(tiny_run: Any) -> Iterator[str]:
    from gnnlm.serve.runs import open_runs
    from tests.serve.conftest import serving

    with serving(open_runs([tiny_run.root])) as (address, _):
        yield address


BODY: dict[str, Any] = {
    "model": "tiny", "prompt": "ban dor", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 1, "echo": False,
    "logprobs": 1, "stop": ["."], "seed": 3, "stream": False, "gnnlm": {"only": ["doc00.txt"]},
}  # fmt: skip
PATHS = (
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/v1/score",
    "/v1/neighbors",
    "/v1/next",
    "/v1/attention",
    "/v1/chat/completions",
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", range(BODIES))
def test_bodies(address: str, seed: int, number: int) -> None:
    chance = random.Random(f"{seed} body {number}")
    body: Any = BODY
    for _ in range(chance.randrange(1, 4)):
        body = mutated(body, chance)
    text = json.dumps(body).encode()
    data = garbled(text, chance) if number % 3 == 0 else text
    path = "/v1/completions" if number % 2 else chance.choice(PATHS)
    kind = chance.choice(["application/json", "text/plain", "application/json; charset=latin-1"])
    answer = httpx.post(address + path, content=data, headers={"content-type": kind}, timeout=50)
    assert answer.status_code in (200, 400, 401, 404, 405, 413, 415, 422), answer.text
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, answer.text
        assert "\n" not in answer.json()["error"]["message"]
    assert httpx.get(f"{address}/healthz", timeout=10).status_code == 200


# -- HTTP bodies that change documents ---------------------------------------------------------------------------------

KEY = {"Authorization": "Bearer a-good-long-key"}


@pytest.fixture(scope="module")
def changing(tiny_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    from gnnlm.serve.runs import open_runs
    from tests.serve.conftest import serving

    root = Path(shutil.copytree(tiny_run.root, tmp_path_factory.mktemp("changing") / "tiny"))
    with serving(open_runs([root]), keys=(KEY["Authorization"].split()[1],)) as (address, _):
        yield address, root


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(CHANGES))
def test_bodies_that_change_documents(changing: tuple[str, Path], seed: int, number: int) -> None:
    """The store is as it was, or has one more generation, which opens."""
    from gnnlm.library.library import Library

    address, root = changing
    chance = random.Random(f"{seed} change {number}")
    text = " ".join(chance.choices(["ban", "dor", "gal", "pomo", "sip"], k=30)) + "."
    names = {"model": "tiny", "names": chance.choice([[f"n{number - 1}"], "n*", ["nothing"], "tag:t"])}
    documents = [{"name": f"n{chance.choice([number, number - 1])}", "text": text}]
    method, path, body = chance.choice(
        [
            ("POST", "/v1/documents", {"model": "tiny", "documents": documents, "tags": ["t"]}),
            ("PUT", "/v1/documents", {"model": "tiny", "documents": documents}),
            ("POST", "/v1/documents/remove", names),
        ]
    )
    given: Any = body
    for _ in range(chance.randrange(0, 3)):
        given = mutated(given, chance)
    data = garbled(json.dumps(given).encode(), chance) if number % 5 == 0 else json.dumps(given).encode()
    before = current_number(root)
    headers = {**KEY, "content-type": "application/json"}
    answer = httpx.request(method, address + path, content=data, headers=headers, timeout=100)
    assert answer.status_code in (200, 400, 404, 409, 413, 422), answer.text
    if answer.status_code == 200:
        assert current_number(root) == answer.json()["generation"] in (before, before + 1)
    else:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, answer.text
        assert "\n" not in answer.json()["error"]["message"]
        assert current_number(root) == before
    found = Library(root).documents()
    listed = httpx.get(f"{address}/v1/documents", params={"limit": 100}, headers=KEY, timeout=50).json()
    assert {each["name"] for each in listed["data"]} == {each.name for each in found}
