"""Which characters of a rendered conversation are trained.

Chat templates render a whole conversation; what the assistant said has to be found again in the text. A few templates
mark it with `{% generation %}`, no stock Qwen or Gemma template does, so the turns are found by rendering:

1. The conversation up to a turn, with the generation prompt, is what the model sees before it writes that turn. Where
   that text is a prefix of the whole text, the turn starts at its end.
2. The conversation up to and including the turn, likewise, gives the turn's end.
3. Some templates render a turn differently once others follow (they drop earlier reasoning, or move the system
   prompt), and then these are no prefixes. So the turn is rendered once more with its content replaced by a unique
   word: what surrounds the word must surround the content too, and what follows it is the terminator.
4. Where that fails as well the row is skipped. A guess would train the wrong tokens, and no loss curve would show it.

A turn's span holds the terminator (`<|im_end|>`, `<end_of_turn>`), because a model that never learns it never stops,
but not the white space behind it, which the model never has to write. If a template ignores the request for a
generation prompt, the role's header belongs to the turn: nobody else will write it.

Where a template has the marker, the marker says what is trained inside each turn; the turn's terminator always is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from poros.errors import DataError
from poros.training.rows import Chat, Message, RowSkipped

Tokenizer = Any
"""A fast tokenizer of transformers (`PreTrainedTokenizerFast`)."""

Span = tuple[int, int]
"""First character, and one past the last."""

GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

# What Python code inside a template raises on a conversation that it wasn't written for.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template together with the tokenizer whose special tokens it names."""

    tokenizer: Tokenizer
    source: str

    def check(self) -> None:
        """Raise a DataError if the template is no Jinja at all, which would otherwise be every row's fault."""
        try:
            self._render([{"role": "user", "content": "?"}])
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}",
                "check data.chat_template, or the chat_template of the tokenizer",
            ) from error
        except TEMPLATE_ERRORS:
            pass  # it may want other turns than these

    def find(self, chat: Chat) -> tuple[str, tuple[Span, ...]]:
        """The rendered conversation, and the spans in it that are trained.

        Raises:
            RowSkipped: the template rejects the conversation or drops a part of it, or a turn can't be found.
        """
        try:
            text = self._render(chat.messages)
        except TEMPLATE_ERRORS as error:
            raise RowSkipped(f"rejected by the chat template: {_short(error)}") from error
        for message in chat.messages:
            if message["role"] != "assistant" and message["content"].strip() not in text:
                raise RowSkipped(f"the chat template leaves out a {message['role']} turn")
        trained = [
            index
            for index, message in enumerate(chat.messages)
            if index >= chat.first and message["role"] == "assistant"
        ]
        if not GENERATION.search(self.source):
            return text, tuple(self._turn(text, chat.messages, index) for index in trained)
        marked = self._marked(chat.messages)
        try:
            turns = [self._turn(text, chat.messages, index) for index in trained]
        except RowSkipped:
            if chat.first:
                raise  # the marker doesn't say which turn it marks
            return text, tuple(marked)
        return text, tuple(span for turn in turns for span in _narrow(turn, marked))

    def _turn(self, text: str, messages: Sequence[Message], index: int) -> Span:
        """Where the turn `index` lies in the text of the whole conversation."""
        start = self._prefix(text, messages[:index], prompt=True)
        end = self._prefix(text, messages[: index + 1], prompt=False)
        if start is None or end is None:
            content_start, end = self._around(text, messages, index)
            start = content_start if start is None else start
        end = start + len(text[start:end].rstrip())
        if end <= start:
            raise RowSkipped("an assistant turn can't be found in the rendered conversation")
        return start, end

    def _prefix(self, text: str, messages: Sequence[Message], prompt: bool) -> int | None:
        """The length of the rendered messages, if they are a prefix of the text."""
        try:
            prefix = self._render(messages, prompt)
        except TEMPLATE_ERRORS:
            return None  # there may be no message yet, or a template may insist on a last turn of the assistant
        return len(prefix) if text.startswith(prefix) else None

    def _around(self, text: str, messages: Sequence[Message], index: int) -> Span:
        """Start of the content and end of the terminator of a turn, from what surrounds a word put in its place."""
        word = "Sentinel0"
        while word in text:
            word += "0"
        replaced = [*messages[:index], {**messages[index], "content": word}, *messages[index + 1 :]]
        try:
            whole, upto = self._render(replaced), self._render(replaced[: index + 1])
        except TEMPLATE_ERRORS as error:
            raise RowSkipped("an assistant turn can't be found in the rendered conversation") from error
        head, found, tail = whole.partition(word)
        terminator = upto.partition(word)[2].rstrip()
        if not (
            found
            and len(head) + len(tail) <= len(text)
            and text.startswith(head)
            and text.endswith(tail)
            and tail.startswith(terminator)
        ):
            raise RowSkipped("an assistant turn can't be found in the rendered conversation")
        return len(head), len(text) - len(tail) + len(terminator)

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        rendered = self.tokenizer.apply_chat_template(
            list(messages), chat_template=self.source, add_generation_prompt=prompt, tokenize=False
        )
        return str(rendered)

    def _marked(self, messages: Sequence[Message]) -> list[Span]:
        """The spans that the template marks, in characters of the text.

        The same as `apply_chat_template(return_assistant_tokens_mask=True)`, which gives tokens of its own tokenisation
        and so could not be compared with the turns.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        _, spans = render_jinja_template(
            conversations=[list(messages)],
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            add_generation_prompt=False,
            **self.tokenizer.special_tokens_map,
        )
        return [(start, end) for start, end in spans[0]]


def _narrow(turn: Span, marked: Sequence[Span]) -> list[Span]:
    """The marked parts of a turn, the last one stretched to the end of the turn: that is its terminator."""
    inside = [(max(start, turn[0]), min(end, turn[1])) for start, end in marked]
    inside = [(start, end) for start, end in inside if start < end]
    if inside:
        inside[-1] = (inside[-1][0], turn[1])
    return inside


def _short(error: Exception) -> str:
    line = " ".join(str(error).split())
    return f"{line[:97]}..." if len(line) > 100 else line
