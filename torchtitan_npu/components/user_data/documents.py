"""Turn a record into the tokens of a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from torchtitan_npu.components.user_data.chat_template import ChatTemplate
from torchtitan_npu.components.user_data.files import BadRecord, Record
from torchtitan_npu.errors import shown


class Document(NamedTuple):
    """The tokens of a document, and which of them the model learns to predict; ``None`` is all."""

    tokens: npt.NDArray[np.int32]
    is_learned: npt.NDArray[np.bool_] | None = None


class Encoder(Protocol):
    """Turns records into documents. Both methods raise :class:`BadRecord`."""

    @property
    def fields(self) -> Sequence[str]:
        """Return the fields of a record that are read; the first must exist."""

    def length(self, record: Record) -> int:
        """Return the characters of a record."""

    def encode(self, record: Record) -> Document:
        """Return the tokens of a record."""


class TextEncoder:
    """One string a record, between the tokenizer's tokens for the begin and the end of a text, as in TorchTitan."""

    def __init__(self, tokenizer: BaseTokenizer, field: str) -> None:
        self.tokenizer, self.field, self.fields = tokenizer, field, (field,)

    def length(self, record: Record) -> int:
        return len(self._text(record))

    def encode(self, record: Record) -> Document:
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
