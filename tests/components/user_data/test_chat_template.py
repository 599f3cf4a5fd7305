"""Conversations have the tokens of transformers, and answers are where its {% generation %} blocks are."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from transformers import AutoTokenizer

from torchtitan_npu.components.corpus import ASSETS
from torchtitan_npu.components.user_data.documents import ChatEncoder, load_chat_template
from torchtitan_npu.components.user_data.files import BadRecord
from torchtitan_npu.errors import UsageError

TOKENIZER = HuggingFaceTokenizer(str(ASSETS / "tokenizer"))
CHATS = [json.loads(line)["messages"] for line in (ASSETS / "chat/chat.jsonl").read_text().splitlines()[:60]]
CHATS += [
    [{"role": "user", "content": " spaces "}, {"role": "assistant", "content": "  ünï\ncödé \n"}],
    [{"role": "user", "content": "same"}, {"role": "assistant", "content": "same"}] * 3,
]

# Answers are marked by <<...>>, which becomes {% generation %}...{% endgeneration %} or nothing.
TEMPLATES = {
    "im_end": """
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}<<{{- message.content + '<|im_end|>' }}>>{{- '\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
    "trimmed": """
{{- bos_token }}
{%- for message in messages %}
{{- '[' + message.role + ']\\n\\n' }}
{%- if message.role == 'assistant' %}<<{{- message.content | trim + eos_token }}>>
{%- else %}{{- message.content | trim + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]\\n\\n' }}{% endif %}""",
    # the last answer has a reasoning block that earlier ones have not, as in Qwen3's template
    "reasoning": """
{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}<<
{%- if loop.index0 > last.user %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content.strip() + '<|im_end|>' }}>>{{- '\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
}
MARKS = {"<<": "{% generation %}", ">>": "{% endgeneration %}"}


def assets(folder: Path, template: str | list[dict[str, str]] | None) -> str:
    """Return a folder with the shipped tokenizer and a chat template in its configuration."""
    shutil.copytree(ASSETS / "tokenizer", folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": template} if template else config)
    )
    return str(folder)


def encoder(folder: str, path: str = "") -> ChatEncoder:
    return ChatEncoder(TOKENIZER, "messages", load_chat_template(folder, path))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("is_marked", [True, False], ids=["generation", "prompts"])
def test_tokens_and_answers_are_those_of_transformers(tmp_path: Path, name: str, is_marked: bool) -> None:
    marked = re.sub("<<|>>", lambda mark: MARKS[mark[0]], TEMPLATES[name])
    plain = re.sub("<<|>>", "", TEMPLATES[name])
    of_transformers = AutoTokenizer.from_pretrained(assets(tmp_path / "transformers", marked))
    chat_encoder = encoder(assets(tmp_path / "encoder", marked if is_marked else plain))
    for messages in CHATS:
        expected = of_transformers.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        tokens, is_learned = chat_encoder.encode({"messages": messages})
        assert tokens.tolist() == expected["input_ids"]
        assert is_learned is not None and is_learned.astype(int).tolist() == expected["assistant_masks"]


def test_tools_are_rendered(tmp_path: Path) -> None:
    template = (
        "{{ tools | tojson }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    folder = assets(tmp_path, template)
    record: dict[str, Any] = {"messages": [{"role": "assistant", "content": "<a>"}], "tools": [{"name": "<é>"}]}
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        record["messages"], tools=record["tools"], return_dict=True
    )
    assert encoder(folder).encode(record).tokens.tolist() == expected["input_ids"]


def test_where_a_template_is_found(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    def text(folder: str, path: str = "") -> str:
        return load_chat_template(folder, path).render(chat)[0]

    def template(name: str) -> str:
        return name + "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"

    with pytest.raises(UsageError, match=r"hf_assets_path .* has no chat template.*set data\.chat_template"):
        text(assets(tmp_path, None))
    assert text(assets(tmp_path, template("config "))) == "config ab"
    several = [{"name": "tool_use", "template": template("tool ")}, {"name": "default", "template": template("list ")}]
    assert text(assets(tmp_path, several)) == "list ab"
    (tmp_path / "chat_template.jinja").write_text(template("file "))
    assert text(str(tmp_path)) == "file ab"
    (tmp_path / "mine.jinja").write_text(template("mine "))
    assert text(str(tmp_path), str(tmp_path / "mine.jinja")) == "mine ab"
    with pytest.raises(UsageError, match=r"data\.chat_template .*nowhere"):
        text(str(tmp_path), str(tmp_path / "nowhere"))
    (tmp_path / "mine.jinja").write_text("{% for %}")
    with pytest.raises(UsageError, match=r"mine\.jinja: not a chat template"):
        text(str(tmp_path), str(tmp_path / "mine.jinja"))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "no messages"}, 'no list of messages under "messages"'),
        ({"messages": []}, 'no list of messages under "messages"'),
        ({"messages": ["hello"]}, "has no role: 'hello'"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no answer"),
        ({"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "a"}]}, "template.jinja: "),
        ({"messages": [{"role": "user"}, {"role": "assistant", "content": "a"}]}, "template.jinja: "),
        ({"messages": [{"role": "assistant", "content": "\ufdd0"}]}, r"reserves, of U\+FDD0 to U\+FDD2"),
    ],
)
def test_a_conversation_that_cannot_be_used(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord, match=reason):
        encoder(str(ASSETS / "tokenizer"), str(ASSETS / "chat/template.jinja")).encode(record)


def test_a_template_whose_answers_cannot_be_found(tmp_path: Path) -> None:
    reverse = "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(BadRecord, match=r"before message 2 is not the prompt .* with {% generation %}"):
        encoder(assets(tmp_path, reverse)).encode({"messages": chat})


def test_a_template_cannot_reach_the_program(tmp_path: Path) -> None:
    escape = "{{ messages.__class__.__mro__ }}"
    with pytest.raises(BadRecord, match=r"access to attribute '__class__' .* is unsafe"):
        encoder(assets(tmp_path, escape)).encode({"messages": CHATS[0]})


def test_a_template_can_be_sent_to_a_worker() -> None:
    template = load_chat_template(str(ASSETS / "tokenizer"), str(ASSETS / "chat/template.jinja"))
    assert pickle.loads(pickle.dumps(template)).render(CHATS[0]) == template.render(CHATS[0])
