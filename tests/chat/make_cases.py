#!/usr/bin/env python3
"""Writes cases.json: what Jinja2, set up as Transformers sets it up, renders from the templates beside this file.

    python3 -m venv venv && venv/bin/pip install jinja2 && venv/bin/python tests/chat/make_cases.py
"""
import datetime
import json
import pathlib

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

here = pathlib.Path(__file__).parent


class Generation(Extension):
    """{% generation %} prints its body in a scope of its own."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("body"), [], [], body).set_lineno(line)

    def body(self, caller):
        return caller()


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
env.filters["tojson"] = to_json
env.globals["raise_exception"] = raise_exception
env.globals["strftime_now"] = lambda fmt: datetime.datetime(2024, 7, 26).strftime(fmt)

chat = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Where is it?\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIn the sea."},
    {"role": "user", "content": "Thanks"},
]
calls = [
    {"role": "user", "content": "What's 2 < 3?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "less", "arguments": {"b": 2, "a": "<3é"}}}],
    },
    {"role": "tool", "content": "yes"},
    {"role": "tool", "content": "sure"},
    {"role": "skip", "content": "no"},
    {"role": "assistant", "content": "<think>so</think>Yes."},
]
tools = [{"name": "less", "parameters": {"b": "int", "a": "int"}}]

cases = []
for name, messages, prompt, given_tools in [
    ("chatml", chat, False, None),
    ("chatml", chat[1:], True, None),
    ("llama", chat, False, None),
    ("llama", chat[1:], True, tools),
    ("qwen", chat, True, None),
    ("qwen", calls, False, None),
    ("qwen", calls + [{"role": "stop", "content": "x"}, chat[1]], True, None),
    ("plain", chat[1:], False, None),
]:
    template = env.from_string((here / f"{name}.jinja").read_text())
    text = template.render(
        messages=messages,
        tools=given_tools,
        documents=None,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    cases.append(dict(template=name, messages=messages, add_generation_prompt=prompt, tools=given_tools, text=text))
(here / "cases.json").write_text(json.dumps(cases, ensure_ascii=False, indent=1) + "\n")
