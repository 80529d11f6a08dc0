"""The text of HTML."""

from __future__ import annotations

import gzip
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnlm.corpus.markup import html_text
from gnnlm.corpus.text_files import read_text
from gnnlm.errors import CorpusError


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("", ""),
        ("plain", "plain\n"),
        ("<p>one\n two</p><p>three</p>", "one two\n\nthree\n"),
        ("<h1>Title</h1>text<div>more</div>end", "Title\n\ntext\nmore\nend\n"),
        ("a<br>b<br/><br>c", "a\nb\n\nc\n"),
        ("<ul><li>one</li>\n<li>two <b>three</b></li></ul>", "one\ntwo three\n"),
        ("<table><tr><td>a</td><td>b</td></tr><tr><th>c</th></tr></table>", "a b\nc\n"),
        ("a<script>if (x < 1) { '<p>no</p>' }</script>b<style>p { }</style>c", "abc\n"),
        ("a<!-- no --><?no?><!DOCTYPE html>b", "ab\n"),
        ("&lt;b&gt; &amp; caf&eacute; &#233; &nbsp; x", "<b> & caf\u00e9 \u00e9 x\n"),
        ("<pre>\n  def f():\n      return 1\n</pre>after", "  def f():\n      return 1\n\nafter\n"),
        ("<P>upper</P><p>never closed", "upper\n\nnever closed\n"),
        ("wo<b>rd</b>s are <i>not</i> cut", "words are not cut\n"),
        ("<title>T</title><body>b", "T\n\nb\n"),
        ("</script></pre></p>stray", "stray\n"),
        ("1 < 2 and 3 > 2", "1 < 2 and 3 > 2\n"),
    ],
)
def test_text_of_html(markup: str, text: str) -> None:
    assert html_text(markup) == text


@pytest.mark.parametrize("part", ["<a ", "<a x='", "<!--", "<![CDATA[", "<a<", "<", "</"])
def test_malformed_markup_is_bounded(part: str) -> None:
    """Where html.parser takes quadratic time, which would reach the time limit of all tests."""
    for end in ("", ">", "'>", "-->", "]]>"):
        with suppress(ValueError):
            html_text(part * 50_000 + end)


@given(st.text(alphabet="<>/!?-[]&;#\"'= \npresciptyl&x0", max_size=60))
def test_any_markup_is_text_or_refused(markup: str) -> None:
    for start in ("", "<![", "<!", "<p "):
        try:
            found = html_text(start + markup)
        except ValueError:
            continue
        assert found == "" or found.endswith("\n")


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.HTM").write_text("<p>caf\u00e9", encoding="latin-1")
    assert read_text(tmp_path / "a.HTM", "latin-1") == "caf\u00e9\n"
    (tmp_path / "a.html.gz").write_bytes(gzip.compress(b"<p>one</p><p>two</p>"))
    assert read_text(tmp_path / "a.html.gz", "utf-8") == "one\n\ntwo\n"
    (tmp_path / "b.html").write_text(f"&#{'9' * 5000};")
    with pytest.raises(CorpusError, match=r"b\.html is not HTML that can be read \(malformed markup\)"):
        read_text(tmp_path / "b.html", "utf-8")
