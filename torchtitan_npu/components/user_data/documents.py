"""A tokenizer's chat template: conversations as text, and where their answers are.

Templates are Jinja, as transformers defines them. They are code of the tokenizer's author, so they run in Jinja's
sandbox. The function ``strftime_now`` is missing on purpose: with today's date in it, data would change every day.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from torchtitan_npu.components.user_data.files import BadRecord, Record
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.errors import UsageError, shown

BEGIN, END, MARK = "\ufdd0", "\ufdd1", "\ufdd2"
"""Characters that Unicode reserves for use inside a program. They mark positions in a rendered text."""
Ranges = list[tuple[int, int]]
"""Begin and end of ranges of characters."""


class Generation(Extension):
    """The block ``{% generation %}``, with which a template marks an answer."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


class ChatTemplate:
    """Renders conversations.

    The answers are what ``{% generation %}`` blocks mark. In a template without them, an answer is what follows the
    conversation before it with its generation prompt, up to the end of the message without white space.
    """

    def __init__(self, source: str, special_tokens: dict[str, str], name: str) -> None:
        self.source, self.special_tokens, self.name = source, special_tokens, name
        try:
            self._template  # noqa: B018 - compiles it
        except TemplateError as error:
            raise UsageError(f"{name}: not a chat template: {error}") from error

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_template"}  # each worker compiles it

    @cached_property
    def _template(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        return environment.from_string(self.source)

    def render(self, messages: list[dict[str, Any]], tools: Any = None) -> tuple[str, Ranges]:
        """Return the text of a conversation and the ranges of its answers. Raise :class:`BadRecord` if it has none."""
        if any(mark in str(message.get("content")) for message in messages for mark in (BEGIN, END, MARK)):
            raise BadRecord("a message has a character that Unicode reserves, of U+FDD0 to U+FDD2")
        text = self._render(messages, tools)
        if BEGIN in text:
            return _without_marks(text)
        answers = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = self._render(messages[:number], tools, add_generation_prompt=True)
                if not text.startswith(prompt):
                    raise BadRecord(
                        f"{self.name}: the text before message {number + 1} is not the prompt of that message: mark "
                        "answers in the template with {% generation %}"
                    )
                answers.append((len(prompt), self._end(text, messages, number, tools)))
        return text, answers

    def _end(self, text: str, messages: list[dict[str, Any]], number: int, tools: Any) -> int:
        """Return where the message ``number`` ends in ``text``, the rendered ``messages``."""
        alone = text if number + 1 == len(messages) else self._render(messages[: number + 1], tools)
        if text.startswith(alone):
            return len(alone.rstrip())
        # The last message of a conversation is rendered in another way, for example with its reasoning. Find the end of
        # the content by a mark, and after it the text that ends a message.
        content = messages[number].get("content")
        if isinstance(content, str) and content.strip():
            marked = dict(messages[number], content=f"{content.rstrip()}{MARK}")
            position = self._render([*messages[:number], marked, *messages[number + 1 :]], tools).find(MARK)
            _, found, terminator = self._render([*messages[:number], marked], tools).partition(MARK)
            terminator = terminator.rstrip()
            if found and position >= 0 and text.startswith(terminator, position):
                return position + len(terminator)
        raise BadRecord(
            f"{self.name}: the end of message {number + 1} was not found: mark answers in the template with "
            "{% generation %}"
        )

    def _render(self, messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        # templates are programs: a wrong type in a record is any of these
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise BadRecord(f"{self.name}: {error}") from error


def _without_marks(text: str) -> tuple[str, Ranges]:
    """Remove BEGIN and END, and return the ranges between them."""
    pieces, answers, length = [], [], 0
    for number, part in enumerate(text.split(BEGIN)):
        answer, end, after = part.partition(END) if number else ("", "", part)
        answers += [(length, length + len(answer))] if end else []
        pieces.append(answer + after)
        length += len(answer) + len(after)
    return "".join(pieces), answers


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's filter escapes characters of HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    raise TemplateError(message)


def load_chat_template(assets: str, path: str) -> ChatTemplate:
    """Return the template in the file ``path``, or else that of the tokenizer in the folder ``assets``."""
    settings = Path(assets) / "tokenizer_config.json"
    try:
        config = json.loads(settings.read_text()) if settings.exists() else {}
    except (OSError, ValueError) as error:
        raise UsageError(f"{settings}: not JSON: {error}") from error
    config = config if isinstance(config, dict) else {}
    special_tokens = {}
    for key, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if key.endswith("_token") and isinstance(content, str):
            special_tokens[key] = content
    file = Path(shipped(path)).expanduser() if path else Path(assets) / "chat_template.jinja"
    if path or file.exists():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens, str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"data.chat_template {file}: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several templates, by name
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        raise UsageError(
            f"model.hf_assets_path {assets}: the tokenizer has no chat template, neither in chat_template.jinja nor in "
            "tokenizer_config.json: set data.chat_template to the file of one"
        )
    return ChatTemplate(source, special_tokens, "chat_template of tokenizer_config.json")


class Document(NamedTuple):
    """The tokens of a document, and which of them the model learns to predict; ``None`` is all."""

    tokens: npt.NDArray[np.int32]
    is_learned: npt.NDArray[np.bool_] | None = None


class TextEncoder:
    """One string a record, between the tokenizer's tokens for the begin and the end of a text, as in TorchTitan."""

    def __init__(self, tokenizer: BaseTokenizer, field: str) -> None:
        self.tokenizer, self.field, self.fields = tokenizer, field, (field,)
        """``fields`` of a record are read; the first must exist."""

    def length(self, record: Record) -> int:
        """Return the characters of a record. Raise :class:`BadRecord`."""
        return len(self._text(record))

    def encode(self, record: Record) -> Document:
        """Return the tokens of a record. Raise :class:`BadRecord`."""
        tokens = self.tokenizer.encode(self._text(record), add_bos=True, add_eos=True)
        return Document(np.array(tokens, dtype=np.int32))

    def _text(self, record: Record) -> str:
        if not isinstance(text := record.get(self.field), str):
            raise BadRecord(f'no string under "{self.field}"')
        return text


class ChatEncoder:
    """A list of messages a record, rendered by the chat template. The model learns the answers only."""

    def __init__(self, tokenizer: HuggingFaceTokenizer, field: str, template: ChatTemplate) -> None:
        self.tokenizer, self.field, self.template = tokenizer, field, template
        self.fields = (field, "tools")

    def length(self, record: Record) -> int:
        contents = (message.get("content") for message in self._messages(record))
        return sum(len(content) for content in contents if isinstance(content, str))

    def encode(self, record: Record) -> Document:
        text, answers = self.template.render(self._messages(record), record.get("tools"))
        encoding = self.tokenizer.tokenizer.encode(text, add_special_tokens=False)
        is_learned = np.zeros(len(encoding.ids), dtype=np.bool_)
        for first, end in answers:
            # a character without a token, such as a space that the tokenizer drops, has None
            tokens = (encoding.char_to_token(at) for at in range(first, end))
            last_tokens = (encoding.char_to_token(at) for at in reversed(range(first, end)))
            if (token := next((token for token in tokens if token is not None), None)) is not None:
                is_learned[token : next(last for last in last_tokens if last is not None) + 1] = True
        if not is_learned[1:].any():  # the first token is never predicted
            raise BadRecord("no answer: no token is of a message with the role assistant")
        return Document(np.array(encoding.ids, dtype=np.int32), is_learned)

    def _messages(self, record: Record) -> list[dict[str, Any]]:
        messages = record.get(self.field)
        if not isinstance(messages, list) or not messages:
            raise BadRecord(f'no list of messages under "{self.field}"')
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise BadRecord(f'a message under "{self.field}" has no role: {shown(message)}')
        return messages


Encoder = TextEncoder | ChatEncoder
