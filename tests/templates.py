"""Chat templates in the manner of public models: what they write of thoughts, tools and calls.

IN_TAGS is as Qwen3.5's, IN_JSON as Qwen3's. `folder_with` puts one beside the bundled weights.
"""

from __future__ import annotations

from pathlib import Path

TINY = Path(__file__).parents[1] / "examples" / "tiny"

_BEGIN = """{%- if messages[0].role == 'system' or tools %}
{{- '<|im_start|>system\\n' }}
{%- if tools %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\nCall one as <tool_call>CALL</tool_call>.' }}
{%- endif %}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
    {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
    {{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role == 'system' and loop.first %}
{%- elif message.role in ('user', 'assistant') %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {%- if message.content or not loop.first %}{{- '\\n' }}{% endif %}
        {{- '<tool_call>\\n' }}
"""
_END = """        {{- '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- else %}
    {{- raise_exception('a message of the role ' + message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
"""
IN_TAGS = (
    _BEGIN.replace("CALL", "<function=NAME>")
    + """        {{- '<function=' + call.function.name + '>\\n' }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>\\n' }}
            {{- value | tojson if value is mapping or value is iterable and value is not string
                else value | string }}
            {{- '\\n</parameter>\\n' }}
        {%- endfor %}
        {{- '</function>' }}
"""
    + _END
    + """{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- else %}
    {{- '<think>\\n' }}
{%- endif %}
{%- endif %}
"""
)
"""Thinks unless enable_thinking is false; the prompt itself begins the thought."""
IN_JSON = (
    _BEGIN.replace("CALL", '{"name": NAME, "arguments": {}}')
    + """        {{- '{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}' }}
"""
    + _END
    + """{%- if enable_thinking is defined and enable_thinking is false %}
    {{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""
)
"""Thinks unless enable_thinking is false; the model begins the thought."""


def folder_with(folder: Path, template: str) -> Path:
    """A folder with the bundled checkpoint and this chat template."""
    for file in TINY.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").write_text(template)
    return folder
