"""One model describes the options of writing; every caller has all of them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from gnnlm.cli.generate_command import generate
from gnnlm.errors import ConfigError
from gnnlm.serve.requests import ChatBody, CompletionBody
from gnnlm.write.generate_options import GenerateOptions, TextOptions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"top_p": 2.0}, "top_p: expected a number above 0 and at most 1, got 2.0"),
        ({"n": 0}, "n: expected a whole number from 1 to 1,024, got 0"),
        ({"max_tokens": True}, "max_tokens: expected a whole number from 1 to 1,000,000, got true"),
        ({"own_past": "yes"}, "own_past: expected true or false, got 'yes'"),
        ({"stop": ["a", ""]}, "stop: expected strings that are not empty, got ['a', '']"),
        ({"beams": 2}, "no option named 'beams'; there are draft, "),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerateOptions.checked(**wrong)
    assert str(caught.value).startswith(message)


def test_a_stop_string_may_stand_alone() -> None:
    assert GenerateOptions.checked(stop="\n").stop == ("\n",)
    assert GenerateOptions.checked(stop=["\n", "."]).stop == ("\n", ".")


def test_the_command_line_and_http_have_every_option() -> None:
    command = {name.removeprefix("no_") for name in inspect.signature(generate).parameters}
    assert command > GenerateOptions.model_fields.keys() - {"sources"}
    for body in (CompletionBody, ChatBody):
        assert body.model_fields.keys() > TextOptions.model_fields.keys()
