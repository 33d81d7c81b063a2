"""Chat templates: rendered as transformers renders them, and errors that are the template's own."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from outrider.model.chat import ChatTemplate
from outrider.model.config import ConfigError

TINY = Path(__file__).parents[2] / "examples" / "tiny"
TEMPLATE = """{%- set seen = namespace(users=0) %}
{%- if tools is not none or documents is not none %}
    {{- raise_exception('none were given') }}
{% endif %}
{{ strftime_now('%Y') }} {{ pad_token }}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('system comes first') }}
    {%- elif message.role == 'user' %}
        {%- set seen.users = seen.users + 1 %}
    {%- elif message.role == 'tool' %}
        {%- continue %}
    {%- endif %}
    {{ message | tojson }}{{ messages[:1] | tojson(indent=2, sort_keys=true) }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content.strip('\\n') }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{{ seen.users }}{{ dict(a=1) | tojson(separators=(',', ':')) }}
{%- if add_generation_prompt %}<|im_start|>assistant{% if thinking %} <think>{% endif %}{% endif %}
"""
MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Grüße, 日本 🦊\n"},
    {"role": "tool", "content": "skipped"},
    {"role": "assistant", "content": "\nYes.\n"},
    {"role": "user", "content": "</s>"},
]


def folder_with(folder: Path, template: str) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("values", [{}, {"thinking": True}])
def test_a_template_sees_what_it_sees_in_transformers(tmp_path: Path, values: dict) -> None:
    from transformers import AutoTokenizer

    folder = folder_with(tmp_path, TEMPLATE)
    oracle = AutoTokenizer.from_pretrained(folder)
    text = oracle.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True, **values
    )
    assert ChatTemplate(folder).render(MESSAGES, values) == text
    year = datetime.datetime.now().year
    for part in (f"{year} <|endoftext|>", "<brief> & 'kind'", "Grüße, 日本 🦊", "Yes.", '{"a":1}'):
        assert part in text
    assert "skipped" not in text


def test_the_bundled_template_and_the_one_in_tokenizer_config_are_the_same(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "")
    (folder / "chat_template.jinja").unlink()
    said = MESSAGES[1:2]
    assert ChatTemplate(folder).render(said, {}) == ChatTemplate(TINY).render(said, {})


def test_what_a_template_objects_to_is_its_error(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, TEMPLATE)
    with pytest.raises(ConfigError, match="the chat template refuses: system comes first"):
        ChatTemplate(folder).render(MESSAGES[1:2] + MESSAGES[:1], {})
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="the chat template cannot be read"):
        ChatTemplate(folder)


@pytest.mark.parametrize(
    "escape",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{{ dict.__subclasses__() }}",
    ],
)
def test_a_template_reaches_nothing_but_the_conversation(tmp_path: Path, escape: str) -> None:
    with pytest.raises(ConfigError, match=r"the chat template refuses: .*unsafe"):
        ChatTemplate(folder_with(tmp_path, escape)).render(MESSAGES, {})
