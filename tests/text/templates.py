"""Model directories with SmolLM2's tokenizer and small chat templates of the kinds that are met in the field."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from honed.model.load import prepare
from honed.text import Renderer, load_renderer

CHATML = """\
{%- if tools %}<|im_start|>system
{%- if messages[0].role == 'system' %}
{{ messages[0].content }}
{%- endif %}
# Tools
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'assistant') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# One newline after a header where the real template has two: SmolLM2's tokenizer splits two before a word.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n' }}{% endif %}
"""

ALTERNATING = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user, assistant') }}
{%- endif %}
{%- if message.role not in ('user', 'assistant') %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

THINKING = """\
{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and loop.index0 < last.user %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

KINDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "chatml": (CHATML, "<|im_end|>", ()),
    "llama3": (LLAMA3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "alternating": (ALTERNATING, "<|im_end|>", ()),
    "thinking": (THINKING, "<|im_end|>", ()),
}
"""Template, end-of-sequence token, and special tokens that SmolLM2's tokenizer has not."""


def smollm2() -> Renderer:
    """The real model's renderer."""
    return load_renderer(prepare("smollm2").directory)


def write_model(kind: str, folder: Path) -> Path:
    """Writes a model directory (no weights) and returns it."""
    template, end, tokens = KINDS[kind]
    tokenizer = Tokenizer.from_file(str(prepare("smollm2").directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|endoftext|>", "eos_token": {"content": end}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
