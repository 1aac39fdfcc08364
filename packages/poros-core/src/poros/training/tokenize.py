"""From text to `input_ids` and `labels`.

Each row is tokenised once, as one text: tokenising a prompt and its completion apart gives other tokens at the seam
than the model will see. The tokenizer says which characters each token covers, and a token is trained if it covers a
trained character. Token ids decide nothing: the padding token is often the end token as well, and a mask by id would
then unteach the end.

The start token: exactly one where the tokenizer has it, whether its post-processor adds it or its chat template writes
it, and none elsewhere. The end token: appended once to completions and texts, if the tokenizer has one; conversations
end as their template ends them. Rows are cut afterwards, so the end token of a row that is too long goes first: a text
that was cut short doesn't teach the model to stop there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from poros.errors import DataError
from poros.training.rows import Chat, Completion, RowSkipped, Text
from poros.training.spans import ChatTemplate, Span, Tokenizer

IGNORED = -100
"""The label of a token that is read but not trained, as torch's cross entropy has it."""


@dataclass(frozen=True)
class Encoder:
    """Turns examples into token ids and labels.

    Attributes:
        tokenizer: A fast tokenizer; it is not changed.
        template: Source of a chat template to use in place of the tokenizer's own.
    """

    tokenizer: Tokenizer
    template: str | None = None

    def __post_init__(self) -> None:
        if not getattr(self.tokenizer, "is_fast", False):
            raise DataError(
                f"{type(self.tokenizer).__name__} can't say which characters its tokens cover",
                "use a fast tokenizer, one with a tokenizer.json",
            )

    @cached_property
    def chat(self) -> ChatTemplate:
        """The chat template.

        Raises:
            DataError: there is none, or it isn't Jinja.
        """
        try:
            source = self.tokenizer.get_chat_template(self.template)
        except ValueError as error:
            raise DataError(
                "the rows are conversations, and the tokenizer has no chat template",
                "set data.chat_template to a Jinja file, or use the tokenizer of the instruction-tuned model",
            ) from error
        template = ChatTemplate(self.tokenizer, source)
        template.check()
        return template

    def encode(self, example: Chat | Completion | Text) -> tuple[list[int], list[int]]:
        """The whole row: `input_ids`, and labels that are an id where the token is trained and `IGNORED` elsewhere.

        Raises:
            RowSkipped: the row can't be used.
            DataError: there is no chat template for a conversation.
        """
        if isinstance(example, Chat):
            text, spans = self.chat.find(example)
            return self._tokenise(text, spans)
        if isinstance(example, Completion):
            text = example.prompt + example.completion
            return self._ended(*self._tokenise(text, [(len(example.prompt), len(text))]))
        ids, _ = self._tokenise(example.text, ())
        return self._ended(ids, list(ids))

    def _tokenise(self, text: str, spans: Sequence[Span]) -> tuple[list[int], list[int]]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowSkipped("not valid Unicode (half of a surrogate pair)") from error
        encoded = self.tokenizer(text, return_offsets_mapping=True, verbose=False)
        # Tokens of no sequence were added by the post-processor: what leads is the start token, what trails is dropped.
        own = [place for place, sequence in enumerate(encoded.sequence_ids(0)) if sequence is not None]
        if not own:
            raise RowSkipped("no tokens")
        first, last = own[0], own[-1] + 1
        start, ids = encoded["input_ids"][:first], encoded["input_ids"][first:last]
        trained = _covered(encoded["offset_mapping"][first:last], spans)
        labels = [token if hit else IGNORED for token, hit in zip(ids, trained, strict=True)]
        start = start or self._written_start
        if ids[: len(start)] == start:
            start = []  # the template wrote it already
        return start + ids, [IGNORED] * len(start) + labels

    @cached_property
    def _written_start(self) -> list[int]:
        """The start token if only the chat template writes it: rows that it doesn't render need it as well."""
        own = self.tokenizer.chat_template or ""
        templates = [self.template or "", *([own] if isinstance(own, str) else own.values())]
        written = any("bos_token" in template for template in templates)
        return [self.tokenizer.bos_token_id] if written and self.tokenizer.bos_token is not None else []

    def _ended(self, ids: list[int], labels: list[int]) -> tuple[list[int], list[int]]:
        end = self.tokenizer.eos_token_id
        if end is None:
            return ids, labels
        # A row may have written it itself.
        return (ids, labels) if ids[-1] == end else ([*ids, end], [*labels, end])


def _covered(offsets: Sequence[Span], spans: Sequence[Span]) -> Iterator[bool]:
    """Whether each token covers a character of a span."""
    for start, end in offsets:
        # Some tokenizers trim white space from offsets, and nothing but the end is left of a token that is all blank.
        begin = start if start < end else end - 1
        yield any(begin < last and end > first for first, last in spans)
