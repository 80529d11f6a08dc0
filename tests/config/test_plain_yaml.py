"""YAML without its traps: everything is a plain value or one line that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gnnlm.config import plain_yaml
from gnnlm.config.plain_yaml import dump_yaml, parse_yaml, read_yaml
from gnnlm.errors import ConfigError

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: !!int x", "line 1: tags such as !!int are not supported; write the plain value"),
        ("run: x\nseed: " + "9" * 5000, "line 2: a number of 5,000 characters; write a shorter one"),
        ("seed: 0x" + "f" * 5000, "line 1: a number of 5,002 characters"),
        ("[" * 100_000, "line 1: values are nested more than 20 deep"),
        ("{a: " * 50_000, "line 1: values are nested more than 20 deep"),
        ("a: 1\nb: &b 2\nc: *b", "line 2: anchors and aliases .* are not supported"),
        (
            "gnn:\n  layers: 2\n  heads: 4\n  layers: 3",
            r"line 4: gnn.layers is given twice \(first on line 2\); keep one",
        ),
        ("a: {b: 1, b: 1}", "a.b is given twice"),
        ("? [1, 2]\n: 3", "line 1: expected the name of a field before the colon"),
        ("a: 1\n---\nb: 2", r"line 2: a second document starts here \(---\); expected one"),
        ("a:\n\t- b", "line 2: not valid YAML .* check indentation, brackets and quotes"),
        ("a: [1", "not valid YAML"),
        ("a: 'b", "not valid YAML"),
        ("a: @b", "not valid YAML"),
        ('a: "\\UFFFFFFFF"', "not valid YAML"),
        (f"%YAML {'9' * 5000}.1\n---\na: 1", "not valid YAML"),
        ("a: 1\nb: \x00", r"line 2: the character U\+0000 is not allowed"),
        ("a: 0x_", "'0x_' is not a number; put text in quotes"),
        ("- 1\n" * 20_000, "more than 10,000 values"),
    ],
)
def test_traps(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^a.yaml, .*{message}"):
        parse_yaml(text, "a.yaml")


def test_an_alias_bomb_is_refused_at_once() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    with pytest.raises(ConfigError, match="anchors and aliases"):
        parse_yaml("\n".join(lines), "a.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# only words", None),
        ("run: 2020-01-01", {"run": "2020-01-01"}),  # a date is text
        ("run: 2020-99-99", {"run": "2020-99-99"}),
        ("a: =", {"a": "="}),
        ("on: off", {"on": False}),  # a key is text
        ("1: 2", {"1": 2}),
        ("<<: {a: 1}", {"<<": {"a": 1}}),
        ("\ufeffa: 1", {"a": 1}),
        ("a: .inf", {"a": float("inf")}),
        ('a: "\\ud83d\\ude00"', {"a": "\N{GRINNING FACE}"}),  # as JSON writes it
        ("a: [1, 2.5, 1.0e-3, x, 'y', null, ~, true]", {"a": [1, 2.5, 1e-3, "x", "y", None, None, True]}),
    ],
)
def test_plain_values(text: str, value: Any) -> None:
    assert parse_yaml(text, "a.yaml") == value


@given(PLAIN)
@example({"\x85": ["\u2028", "\u2029 ", "\ufeff", "\N{GRINNING FACE}", "2020-01-01", "1e-3"]})
def test_what_is_written_is_read(value: Any) -> None:
    assert parse_yaml(dump_yaml(value), "a.yaml") == value
    printable = json.dumps(value)
    if "Infinity" not in printable and "e+" not in printable and "e-" not in printable:  # YAML 1.1 wants 1.0e+5
        assert parse_yaml(printable, "a.yaml") == value


@given(st.text(alphabet="ab:-{}[],&*!|>'\"%@#?~ \n\t\\0x_.1e\ud800\x00\x85", max_size=40))
def test_any_text_is_a_value_or_one_line(text: str) -> None:
    for lines, start in ((True, "a.yaml, line "), (False, "a.yaml: ")):
        message = None
        try:
            parse_yaml(text, "a.yaml", lines)
        except ConfigError as error:
            message = str(error)
        assert message is None or (message.startswith(start) and "\n" not in message)


def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("run: x", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"a.yaml is not UTF-8 text \(byte 0xff at offset 0\); save it as UTF-8"):
        read_yaml(file)
    file.write_text("run: x")
    assert read_yaml(file) == {"run": "x"}
    monkeypatch.setattr(plain_yaml, "MAX_BYTES", 5)
    with pytest.raises(ConfigError, match="is larger than 0 KB"):
        read_yaml(file)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)
