"""Rows to token rows: reading, what is trained, and what is refused.

The tokenizers are built in memory. Most are byte-level with a few merges, so that decoding gives the text back and the
tests can say in words what is trained: `trained(row)` is the decoded text of each run of labelled tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from poros.config import DataConfig
from poros.errors import DataError
from poros.training.data import Prepared, Report, TokenRow, collator, prepare, render_report
from poros.training.rows import read_rows

QWEN = r"""{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- else %}
    {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant") %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

GEMMA = r"""{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

# Qwen3 without its tool branches: the last turn gets a think block, earlier turns lose theirs.
QWEN3 = r"""{%- set ns = namespace(last_query_index=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.open and message.role == "user" %}
        {%- set ns.open = false %}
        {%- set ns.last_query_index = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- else %}
        {%- set content = message.content %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""  # noqa: E501

# As models that always reason have it: the generation prompt opens the think block.
QWEN3_THINKING = QWEN3.replace(r"{{- '<|im_start|>assistant\n' }}", r"{{- '<|im_start|>assistant\n<think>\n' }}")

# In the manner of Gemma 4: the generation prompt holds an empty thought that no finished turn has, and finished turns
# lose their own.
GEMMA4 = r"""{{- bos_token }}
{%- for message in messages %}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
    {{- message.content.split('<channel|>')[-1] | trim }}
    {{- '<turn|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn>model\n' }}
    {%- if not enable_thinking | default(false) %}{{ '<|channel>thought\n<channel|>' }}{% endif %}
{%- endif %}"""

# As early Mistral models have it: no generation prompt, and the system prompt travels with the last user turn.
MISTRAL = r"""{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{% endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'user' and loop.index0 >= turns|length - 2 and system %}
        {{- '[INST] ' + system + '\n\n' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""

MARKED = r"""{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

# The author forgot the terminator, which is common.
MARKED_CONTENT = MARKED.replace(
    "{{ message.content + '<|im_end|>' }}{% endgeneration %}", "{{ message.content }}{% endgeneration %}<|im_end|>"
)
# The marker takes in the line end behind the terminator.
MARKED_LINE = MARKED.replace("'<|im_end|>' }}{% endgen", r"'<|im_end|>\n' }}{% endgen")

# An assistant turn that comes last ends in another way.
OTHER_END = r"""{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{{ '<final>' + message.content + '<|im_end|>\n' + ('\n' if loop.last else '') }}
{%- else %}{{ message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
GEMMA_SPECIALS = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")


def build(
    specials: tuple[str, ...],
    template: str | None = None,
    *,
    bos: str | None = None,
    eos: str | None = None,
    pad: str | None = None,
    start: bool = False,
    end: bool = False,
    trim: bool = False,
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with merges; `start` and `end` have the post-processor add these tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Hello there, what is the answer?\n\n The answer is 42.\n\n"] * 4, trainer)
    post: list[Any] = [processors.ByteLevel(trim_offsets=trim)]
    if start or end:
        single = f"{bos} $A" if start else "$A"
        single += f" {eos}" if end else ""
        known = [(token, tokenizer.token_to_id(token)) for token in {bos, eos} if token is not None]
        post.append(processors.TemplateProcessing(single=single, special_tokens=known))
    tokenizer.post_processor = processors.Sequence(post)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)
    fast.chat_template = template
    return fast


def qwen(template: str | None = QWEN, **more: Any) -> PreTrainedTokenizerFast:
    return build(QWEN_SPECIALS, template, eos="<|im_end|>", pad="<|endoftext|>", **more)


def gemma(template: str | None = GEMMA, **more: Any) -> PreTrainedTokenizerFast:
    return build(GEMMA_SPECIALS, template, bos="<bos>", eos="<eos>", pad="<pad>", **{"start": True, **more})


def gemma4() -> PreTrainedTokenizerFast:
    specials = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>")
    return build(specials, GEMMA4, bos="<bos>", eos="<eos>", pad="<pad>", start=True)


def mistral() -> PreTrainedTokenizerFast:
    # pad is eos, as many recipes set it.
    return build(("<s>", "</s>"), MISTRAL, bos="<s>", eos="</s>", pad="</s>", start=True)


def turns(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant in turn."""
    roles = itertools.cycle(("user", "assistant"))
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


Preparer = Callable[..., Prepared]


@pytest.fixture
def prepared(tmp_path: Path) -> Preparer:
    """Rows to token rows, through a file."""

    def make(rows: list[Any], tokenizer: Any, vocab_size: int | None = None, **config: Any) -> Prepared:
        path = tmp_path / "rows.jsonl"
        path.write_text(
            "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8"
        )
        size = len(tokenizer) if vocab_size is None else vocab_size
        return prepare(DataConfig(path=str(path), **config), tokenizer, vocab_size=size)

    return make


def trained(row: TokenRow, tokenizer: Any) -> list[str]:
    """The text of each run of labelled tokens. Labels are always the token itself."""
    assert all(label in (-100, token) for token, label in zip(row.input_ids, row.labels, strict=True))
    runs = itertools.groupby(row.labels, key=lambda label: label != -100)
    return [tokenizer.decode(list(run)) for labelled, run in runs if labelled]


def whole(row: TokenRow, tokenizer: Any) -> str:
    return tokenizer.decode(row.input_ids)


def skips(report: Report) -> dict[str, tuple[int, ...]]:
    return {finding.reason: finding.lines for finding in report.skipped}


GOOD = {"messages": turns("Hello", "there")}


class TestReading:
    def test_lines_that_are_no_rows_are_kept_account_of(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(
            b'\xef\xbb\xbf{"text": "one"}\n{"text": \n\n[1]\n{}\n"text"\n{"text": "\xff"}\r\n'
            b'{"text": "a\xe2\x80\xa8b"}\n\n'
        )
        read = read_rows(str(path))
        assert [(row.line, row.values) for row in read.rows] == [(1, {"text": "one"}), (8, {"text": "a\u2028b"})]
        assert read.skipped == (
            (2, "bad JSON"),
            (3, "empty row"),
            (4, "not a JSON object"),
            (5, "empty row"),
            (6, "not a JSON object"),
            (7, "not UTF-8"),
            (9, "empty row"),
        )
        assert read.unit == "line"

    def test_the_last_line_needs_no_line_end(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"text": "one"}\n{"text": "two"}', encoding="utf-8")
        assert [row.line for row in read_rows(str(path)).rows] == [1, 2]

    def test_a_line_nested_too_deeply_is_bad_json(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text("[" * 200_000 + '\n{"text": "one"}\n', encoding="utf-8")
        assert read_rows(str(path)).skipped == ((1, "bad JSON"),)

    @pytest.mark.parametrize(
        ("content", "unit", "numbers", "skipped"),
        [
            ('[\n  {"text": "a"},\n  {\n    "text": "b"\n  },\n  7\n]\n', "line", [2, 3], ((6, "not a JSON object"),)),
            ('[{"text": "a"}, {}, {"text": "b"}]', "row", [1, 3], ((2, "empty row"),)),
            (' [ {"text": "a"} ] ', "line", [1], ()),
            ('\ufeff[\n{"text": "a"}]', "line", [2], ()),
        ],
        ids=["over lines", "on one line", "a single row", "byte order mark"],
    )
    def test_arrays(self, tmp_path: Path, content: str, unit: str, numbers: list[int], skipped: Any) -> None:
        path = tmp_path / "rows.json"
        path.write_text(content, encoding="utf-8")
        read = read_rows(str(path))
        assert (read.unit, [row.line for row in read.rows], read.skipped) == (unit, numbers, skipped)

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ('{"text": "a"}\n{"text": "b"}\n', "line 1, column 1: expected an array"),
            ('[{"text": "a"},\n {"text" "b"}]', "line 2, column 10"),
            ('[{"text": "a"}\n {"text": "b"}]', "line 2, column 2: expected ','"),
            ('[{"text": "a"},\n]', "line 2, column 1: expected another row"),
            ('[{"text": "a"}', "line 1, column 15"),
            ('[{"text": "a"}]\n[]', "line 2, column 1: something follows"),
        ],
    )
    def test_a_broken_array_says_where(self, tmp_path: Path, content: str, says: str) -> None:
        path = tmp_path / "rows.json"
        path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=says) as caught:
            read_rows(str(path))
        assert ".jsonl" in caught.value.hint

    def test_an_array_that_is_not_utf8(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.json"
        path.write_bytes(b'[{"text": "a"},\n{"text": "\xff"}]')
        with pytest.raises(DataError, match="line 2: not UTF-8"):
            read_rows(str(path))

    @pytest.mark.parametrize(
        ("name", "content", "says"),
        [
            ("missing.jsonl", None, "can't read .*No such file"),
            ("empty.jsonl", "", "is empty"),
            ("empty.json", " \n", "is empty"),
            ("none.json", "[]", "is empty"),
            ("rows.csv", "text\na\n", "kind that Poros does not read"),
            (".", None, "is a folder"),
        ],
    )
    def test_files_that_cannot_be_read(self, tmp_path: Path, name: str, content: str | None, says: str) -> None:
        path = tmp_path / name
        if content is not None:
            path.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=says) as caught:
            read_rows(str(path))
        assert str(path) in caught.value.message
        assert caught.value.hint

    def test_an_unreadable_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text("{}", encoding="utf-8")

        def refuse(self: Path) -> bytes:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(DataError, match="Permission denied"):
            read_rows(str(path))

    def test_a_named_data_set(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        asked = []
        rows = [{"text": "a", "messages": None, "extra": 1}, {"text": None, "messages": turns("b", "c"), "extra": 2}]

        def load(name: str, *, split: str) -> datasets.Dataset:
            asked.append((name, split))
            return datasets.Dataset.from_list(rows)

        monkeypatch.setattr(datasets, "load_dataset", load)
        read = read_rows("someone/some-set", "train[:2]")
        assert asked == [("someone/some-set", "train[:2]")]
        assert read.unit == "row"
        assert [row.line for row in read.rows] == [1, 2]
        assert all("extra" not in row.values for row in read.rows)
        tokenizer = qwen()
        made = prepare(DataConfig(path="someone/some-set"), tokenizer, vocab_size=len(tokenizer))
        assert [trained(row, tokenizer) for row in made.rows] == [["a<|im_end|>"], ["c<|im_end|>"]]

    def test_a_named_data_set_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(DataError, match=r"someone/no-such-set.*split test") as caught:
            read_rows("someone/no-such-set", "test")
        assert "HF_HUB_OFFLINE" in caught.value.hint

    def test_an_empty_split(self, monkeypatch: pytest.MonkeyPatch) -> None:
        empty = datasets.Dataset.from_dict({"text": []})
        monkeypatch.setattr(datasets, "load_dataset", lambda name, split: empty)
        with pytest.raises(DataError, match="is empty"):
            read_rows("someone/some-set")


class TestShapes:
    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            (GOOD, ["there<|im_end|>"]),
            ({"messages": [turn("user", "Hello"), turn("model", "there")]}, ["there<|im_end|>"]),
            (
                {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "there"}]},
                ["there<|im_end|>"],
            ),
            ({"conversations": turns("Hello", "there")}, ["there<|im_end|>"]),
            (
                {
                    "conversations": [
                        {"from": "human", "value": "Hello", "role": None, "content": None},
                        {"from": None, "value": None, "role": "assistant", "content": "there", "name": None},
                    ]
                },
                ["there<|im_end|>"],
            ),
            (
                {
                    "prompt": turns("a", "b"),
                    "completion": [turn("user", "c"), turn("assistant", "d")],
                    "system": "be brief",
                },
                ["d<|im_end|>"],
            ),
            (
                {
                    "messages": [
                        turn("user", [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]),
                        turn("assistant", [{"type": "text", "text": "the"}, "re"]),
                    ]
                },
                ["there<|im_end|>"],
            ),
            ({"prompt": "Hello", "completion": " there"}, [" there<|im_end|>"]),
            ({"prompt": "", "completion": "there"}, ["there<|im_end|>"]),
            ({"instruction": "Hello", "input": "what", "output": "there"}, ["there<|im_end|>"]),
            ({"instruction": "Hello", "input": "", "output": "there", "text": "all of it"}, ["there<|im_end|>"]),
            ({"text": "Hello there"}, ["Hello there<|im_end|>"]),
            ({"messages": None, "prompt": None, "completion": None, "text": "Hello"}, ["Hello<|im_end|>"]),
            (
                {
                    "prompt": turns("a", "b", "c"),
                    "completion": [turn("assistant", "d"), turn("user", "e"), turn("assistant", "f")],
                },
                ["d<|im_end|>", "f<|im_end|>"],
            ),
            (
                {"prompt": turns("a", "b", "c"), "completion": [turn("assistant", "d")], "system": "be brief"},
                ["d<|im_end|>"],
            ),
        ],
    )
    def test_what_is_trained(self, prepared: Preparer, row: Any, expected: list[str]) -> None:
        tokenizer = qwen()
        made = prepared([row], tokenizer)
        assert [trained(row, tokenizer) for row in made.rows] == [expected]
        assert made.report.kept == 1
        assert not made.report.skipped
        assert not made.report.repaired

    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"instruction": "A", "input": "B", "output": "C"}, "A\n\nB\n\nC<|im_end|>"),
            ({"instruction": "A", "input": None, "output": "C"}, "A\n\nC<|im_end|>"),
            ({"system": "S", "instruction": "A", "output": "C"}, "S\n\nA\n\nC<|im_end|>"),
            ({"prompt": "A", "completion": "C"}, "AC<|im_end|>"),
            (
                {"conversations": [{"from": "human", "value": "A"}, {"from": "gpt", "value": "C"}], "system": "S"},
                "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nC<|im_end|>\n",
            ),
            (
                {"messages": turns("A", "C", system="own"), "system": "beside"},
                "<|im_start|>system\nown<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nC<|im_end|>\n",
            ),
        ],
    )
    def test_what_is_read(self, prepared: Preparer, row: Any, expected: str) -> None:
        tokenizer = qwen()
        assert whole(prepared([row], tokenizer).rows[0], tokenizer) == expected

    @pytest.mark.parametrize(
        ("row", "reason"),
        [
            ({"messages": []}, "empty conversation"),
            ({"messages": None}, "empty conversation"),
            ({"messages": "Hello"}, "the conversation is not a list of turns"),
            ({"messages": ["Hello"]}, "a turn is not an object"),
            ({"messages": [{"content": "Hello"}]}, "a turn has no role"),
            ({"messages": [turn("user", "Hello")]}, "no assistant turn"),
            ({"messages": [turn("user", "Hello"), turn("user", "you")]}, "no assistant turn"),
            ({"prompt": turns("a", "b"), "completion": [turn("user", "c")]}, "no assistant turn"),
            ({"prompt": turns("a", "b"), "completion": []}, "no assistant turn"),
            ({"prompt": turns("a"), "completion": [turn("user", "b")]}, "no assistant turn"),
            ({"messages": [turn("user", None), turn("assistant", "there")]}, "a turn has no content"),
            ({"messages": [turn("user", "Hello"), turn("assistant", None)]}, "a turn has no content"),
            ({"messages": [turn("user", 7), turn("assistant", "there")]}, "the content of a turn is not text"),
            ({"messages": turns("Hello", " ", "again", "yes")}, "an assistant turn is empty"),
            (
                {"messages": [turn("user", [{"type": "image", "url": "x.png"}]), turn("assistant", "a cat")]},
                "a turn holds something other than text",
            ),
            (
                {"messages": [turn("user", [{"type": "text", "text": None}]), turn("assistant", "a cat")]},
                "a turn holds something other than text",
            ),
            ({"messages": [turn("tool", "42"), turn("assistant", "yes")]}, "role tool is not supported"),
            (
                {"messages": [turn("user", "a"), {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]},
                "tool calls are not supported",
            ),
            ({"messages": turns("a", "b"), "tools": [{"name": "f"}]}, "tools are not supported"),
            ({"messages": turns("a", "b"), "system": 7}, "system is not text"),
            ({"instruction": "Hello", "output": ""}, "empty output"),
            ({"instruction": "Hello", "output": None}, "empty output"),
            ({"instruction": ["Hello"], "output": "there"}, "instruction is not text"),
            ({"prompt": "Hello", "completion": " \n"}, "empty completion"),
            ({"prompt": None, "completion": "there"}, "prompt is missing"),
            ({"prompt": "Hello", "completion": 7}, "completion is not text"),
            ({"prompt": turns("Hello"), "completion": "there"}, "prompt is not text"),
            ({"text": " \n"}, "empty text"),
            ({"text": ["a"]}, "text is not text"),
            ({"question": "a", "answer": "b"}, "no known keys (only answer, question)"),
            ({"prompt": {"replies": []}, "a": 1, "b": 2, "c": 3, "d": 4}, "no known keys (only a, b, c, d, ...)"),
            ('{"text": "half a pair: \\ud83d"}', "not valid Unicode (half of a surrogate pair)"),
        ],
    )
    def test_what_is_skipped_and_why(self, prepared: Preparer, row: Any, reason: str) -> None:
        made = prepared([GOOD, row, GOOD], qwen())
        assert skips(made.report) == {reason: (2,)}
        assert [row.line for row in made.rows] == [1, 3]

    @pytest.mark.parametrize(
        "more",
        [[turn("user", "and?")], [turn("user", "and?"), turn("user", "well?")], [turn("system", "be brief")]],
    )
    def test_turns_that_nobody_answered_are_cut_off(self, prepared: Preparer, more: list[Any]) -> None:
        tokenizer = qwen()
        made = prepared([{"messages": [*GOOD["messages"], *more]}, GOOD], tokenizer)
        assert made.rows[0].input_ids == made.rows[1].input_ids
        assert [(finding.reason, finding.lines) for finding in made.report.repaired] == [
            ("turns after the last assistant turn cut off", (1,))
        ]

    @pytest.mark.parametrize(
        ("format", "kept", "skipped"),
        [
            ("auto", [1, 2, 3, 4, 5], {"empty conversation": (6,)}),
            ("chat", [1, 2], {"not a chat row": (3, 4, 5), "empty conversation": (6,)}),
            ("completion", [2, 3, 4], {"not a completion row": (1, 5, 6)}),
            ("text", [5, 6], {"not a text row": (1, 2, 3, 4)}),
        ],
    )
    def test_a_format_keeps_its_rows(
        self, prepared: Preparer, format: str, kept: list[int], skipped: dict[str, tuple[int, ...]]
    ) -> None:
        rows = [
            GOOD,
            {"prompt": turns("a"), "completion": [turn("assistant", "b")]},
            {"prompt": "a", "completion": "b"},
            {"instruction": "a", "output": "b"},
            {"text": "a"},
            {"messages": [], "text": "a"},
        ]
        made = prepared(rows, qwen(), format=format)
        assert [row.line for row in made.rows] == kept
        assert skips(made.report) == skipped


class TestChat:
    @pytest.mark.parametrize(
        ("tokenizer", "messages", "expected"),
        [
            (qwen(), turns("Hello", "there", "what", "answer"), ["there<|im_end|>", "answer<|im_end|>"]),
            (qwen(), turns("Hello", "there", system="be brief"), ["there<|im_end|>"]),
            # The header's line end and the content's are one token, which counts as the content's.
            (qwen(), turns("Hello", "\n\nthere "), ["\n\n\nthere <|im_end|>"]),
            (qwen(), turns("Hello", "there", "there", "there"), ["there<|im_end|>", "there<|im_end|>"]),
            (qwen(), [turn("user", "a"), turn("user", "b"), turn("assistant", "c")], ["c<|im_end|>"]),
            (
                qwen(),
                [turn("user", "a"), turn("assistant", "b"), turn("assistant", "c")],
                ["b<|im_end|>", "c<|im_end|>"],
            ),
            (
                qwen(),
                [turn("assistant", "a"), turn("user", "b"), turn("assistant", "c")],
                ["a<|im_end|>", "c<|im_end|>"],
            ),
            (qwen(), turns("assistant", "<|im_start|>assistant\n"), ["<|im_start|>assistant\n<|im_end|>"]),
            (gemma(), turns("Hello", "there", "what", "answer"), ["there<end_of_turn>", "answer<end_of_turn>"]),
            (gemma(), turns("Hello", " there\n", system="be brief"), ["there<end_of_turn>"]),
            (
                gemma4(),
                turns("Hello", "<|channel>thought\nhm\n<channel|>there ", "what", "answer", system="be brief"),
                ["there<turn|>", "answer<turn|>"],
            ),
            (mistral(), turns("Hello", "there", "what", "answer"), [" there</s>", " answer</s>"]),
            # The system prompt moves to the last user turn, so the first turn isn't at the end of a prefix.
            (mistral(), turns("Hello", "2", "what", "answer", system="be brief"), ["2</s>", " answer</s>"]),
            (mistral(), turns("Hello", "there", "what", "answer", system="be brief"), [" there</s>", " answer</s>"]),
            (qwen(QWEN3), turns("Hello", "there"), ["<think>\n\n</think>\n\nthere<|im_end|>"]),
            (
                qwen(QWEN3),
                turns("Hello", "<think>\nhm\n</think>\n\nthere", "what", "<think>\nso\n</think>\n\nanswer"),
                ["there<|im_end|>", "<think>\nso\n</think>\n\nanswer<|im_end|>"],
            ),
            (
                qwen(QWEN3),
                [turn("user", "Hello"), {"role": "assistant", "content": "there", "reasoning_content": "hm"}],
                ["<think>\nhm\n</think>\n\nthere<|im_end|>"],
            ),
            (
                qwen(QWEN3_THINKING),
                turns("Hello", "<think>\nhm\n</think>\n\nthere", "what", "<think>\nso\n</think>\n\nanswer"),
                ["there<|im_end|>", "so\n</think>\n\nanswer<|im_end|>"],
            ),
            (
                qwen(QWEN3_THINKING),
                turns("Sentinel0", "Sentinel00", "what", "answer"),
                ["Sentinel00<|im_end|>", "\n</think>\n\nanswer<|im_end|>"],
            ),
            # The last turn ends in another way, so earlier turns are found by what surrounds them, and what is written
            # between the generation prompt and the content is still the assistant's.
            (
                qwen(OTHER_END),
                turns("Hello", "there", "what", "answer"),
                ["<final>there<|im_end|>", "<final>answer<|im_end|>"],
            ),
            (qwen(MARKED), turns("Hello", "there", "what", "answer"), ["there<|im_end|>", "answer<|im_end|>"]),
            (qwen(MARKED_CONTENT), turns("Hello", "there", "what", "answer"), ["there<|im_end|>", "answer<|im_end|>"]),
            (qwen(MARKED_LINE), turns("Hello", "there", "what", "answer"), ["there<|im_end|>", "answer<|im_end|>"]),
        ],
    )
    def test_the_assistant_and_its_terminator_are_trained(
        self, prepared: Preparer, tokenizer: Any, messages: Any, expected: list[str]
    ) -> None:
        made = prepared([{"messages": messages}], tokenizer)
        assert trained(made.rows[0], tokenizer) == expected
        # What is trained is a part of what stock renders and tokenises, not of something else.
        stock = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
        assert made.rows[0].input_ids == stock

    @pytest.mark.parametrize("tokenizer", [qwen(), gemma(), mistral(), qwen(MARKED)])
    def test_a_prompt_of_messages_is_not_trained(self, prepared: Preparer, tokenizer: Any) -> None:
        messages = turns("Hello", "there", "what", "answer")
        both = prepared([{"messages": messages}], tokenizer)
        last = prepared([{"prompt": messages[:3], "completion": messages[3:]}], tokenizer)
        assert last.rows[0].input_ids == both.rows[0].input_ids
        assert trained(last.rows[0], tokenizer) == trained(both.rows[0], tokenizer)[-1:]

    def test_the_terminator_is_trained_when_it_pads_as_well(self, prepared: Preparer) -> None:
        # O-29: pad == eos == the turn's end, and a batch that is padded with it.
        tokenizer = build(QWEN_SPECIALS, QWEN, eos="<|im_end|>", pad="<|im_end|>")
        end = tokenizer.eos_token_id
        made = prepared(
            [{"messages": turns("Hello", "there")}, {"messages": turns("Hello", "there, the answer")}], tokenizer
        )
        batch = collator(tokenizer, 8)(list(made.dataset()))
        for row, labels, mask in zip(
            made.rows, batch["labels"].tolist(), batch["attention_mask"].tolist(), strict=True
        ):
            assert [label for label in labels if label != -100][-1] == end
            assert sum(mask) == len(row.input_ids)
            assert set(labels[len(row.input_ids) :]) <= {-100}

    def test_gemma_ends_turns_with_a_token_that_is_not_its_eos(self, prepared: Preparer) -> None:
        tokenizer = gemma()
        row = prepared([GOOD], tokenizer).rows[0]
        last = [label for label in row.labels if label != -100][-1]
        assert last == tokenizer.convert_tokens_to_ids("<end_of_turn>") != tokenizer.eos_token_id

    @pytest.mark.parametrize("trim", [False, True])
    def test_tokens_of_part_of_a_character_and_of_white_space(self, prepared: Preparer, trim: bool) -> None:
        # Several tokens share the offsets of one character, and trimmed offsets leave nothing of a blank.
        tokenizer = qwen(trim=trim)
        content = "\U0001f642  \t é\n\n 漢字 there  "
        row = prepared([{"messages": turns(f"{content}x", f"{content}")}], tokenizer).rows[0]
        assert trained(row, tokenizer) == [f"{content}<|im_end|>"]
        row = prepared([{"prompt": "é \t ", "completion": "\t  42\t  "}], tokenizer).rows[0]
        assert trained(row, tokenizer) == ["\t  42\t  <|im_end|>"]

    def test_a_tokenizer_that_drops_white_space(self, prepared: Preparer) -> None:
        words = ["<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "Hello", "there", "you"]
        inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
        inner.normalizer = normalizers.Replace(Regex("!"), "")
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        inner.add_special_tokens(words[1:3])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, unk_token="<unk>", eos_token="<|im_end|>", pad_token="<|im_end|>"
        )
        tokenizer.chat_template = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
        made = prepared(
            [{"messages": turns("Hello", "there !", "you", "Hello you")}, {"text": "Hello"}, {"text": "!"}], tokenizer
        )
        assert trained(made.rows[0], tokenizer) == ["there <|im_end|>", "Hello you <|im_end|>"]
        assert trained(made.rows[1], tokenizer) == ["Hello <|im_end|>"]
        assert skips(made.report) == {"no tokens": (3,)}

    def test_a_marker_may_train_less_than_a_turn(self, prepared: Preparer) -> None:
        template = MARKED.replace("'assistant' %}{% gen", "'assistant' and loop.last %}{% gen")
        tokenizer = qwen(template)
        row = prepared([{"messages": turns("Hello", "there", "what", "answer")}], tokenizer).rows[0]
        assert trained(row, tokenizer) == ["answer<|im_end|>"]

    def test_a_marker_is_believed_where_turns_cannot_be_found(self, prepared: Preparer) -> None:
        # Content in capitals is nowhere in the text as it was, and the count makes earlier renderings no prefixes.
        template = "{{ messages|length }}" + MARKED.replace("message.content", "message.content|upper")
        tokenizer = qwen(template)
        row = prepared([{"messages": turns("42", "there", "43", "answer")}], tokenizer).rows[0]
        assert trained(row, tokenizer) == ["THERE<|im_end|>", "ANSWER<|im_end|>"]
        made = prepared([{"text": "a"}, {"prompt": turns("42"), "completion": [turn("assistant", "there")]}], tokenizer)
        assert skips(made.report) == {"an assistant turn can't be found in the rendered conversation": (2,)}

    @pytest.mark.parametrize(
        "template",
        [
            "{% for m in messages %}{{ m.content | upper }}{% if not loop.last %};{% endif %}{% endfor %}"
            "{{ messages | map(attribute='content') | join(',') }}",
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "{% for m in messages if m.role == 'user' %}{{ m.content }};{% endfor %}"
            "{{ '#' if messages[-1].role == 'assistant' }}",
            "{{ messages|length }}{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
            "{{ messages|length }}{% for m in messages %}{{ m.content }}{{ '#' if loop.last else ';' }}{% endfor %}",
            "{{ messages|length }}{% for m in messages %}-{% if m.content != 'there' %}{{ m.content }}-{% endif %};"
            "{% endfor %}",
            "{{ messages[1].content|length }}{% for m in messages %}{{ m.content }};{% endfor %}",
            "{{ messages|length }}{% for m in messages %}{{ m.content }};{% endfor %}{{ messages[1].content|length }}",
        ],
        ids=[
            "repeated elsewhere",
            "dropped",
            "dropped, with an end",
            "twice",
            "other end",
            "shorter",
            "other head",
            "other tail",
        ],
    )
    def test_a_turn_that_cannot_be_found_is_skipped(self, prepared: Preparer, template: str) -> None:
        made = prepared([{"messages": turns("42", "there", "43", "answer")}, {"text": "a"}], qwen(template))
        assert skips(made.report) == {"an assistant turn can't be found in the rendered conversation": (1,)}

    @pytest.mark.parametrize(
        ("tokenizer", "messages", "reason"),
        [
            (
                gemma(),
                [turn("user", "a"), turn("user", "b"), turn("assistant", "c")],
                "rejected by the chat template: Conversation roles must alternate user/assistant/user/assistant/...",
            ),
            (
                gemma(),
                [turn("assistant", "a")],
                "rejected by the chat template: Conversation roles must alternate user/assistant/user/assistant/...",
            ),
            (
                qwen(
                    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
                ),
                turns("a", "b", system="s"),
                "rejected by the chat template: System role not supported",
            ),
            (qwen("{{ messages[0].content + 1 }}"), turns("a", "b"), "rejected by the chat template: "),
            (qwen("{{ nothing.at.all }}"), turns("a", "b"), "rejected by the chat template: 'nothing' is undefined"),
            (
                qwen(QWEN.replace('(message.role == "system" and not loop.first) or', "")),
                [turn("user", "a"), turn("system", "be brief"), turn("assistant", "c")],
                "the chat template leaves out a system turn",
            ),
        ],
    )
    def test_what_the_template_does_not_take(
        self, prepared: Preparer, tokenizer: Any, messages: Any, reason: str
    ) -> None:
        made = prepared([{"text": "a"}, {"messages": messages}], tokenizer)
        ((found, lines),) = skips(made.report).items()
        assert found.startswith(reason)
        assert lines == (2,)

    def test_everything_trained_never_starts(self, prepared: Preparer) -> None:
        template = "{% generation %}{% for m in messages %}{{ m.content|upper }}{% endfor %}{% endgeneration %}"
        with pytest.raises(DataError, match="every token of every conversation"):
            prepared([{"messages": turns("1", "there")}], qwen(template))

    def test_nothing_trained_never_starts(self, prepared: Preparer) -> None:
        # The marker is round the wrong turns.
        with pytest.raises(DataError, match=r"1 nothing to train \(line 1\)"):
            prepared([GOOD], qwen(MARKED.replace("== 'assistant'", "== 'user'")))

    def test_no_template(self, prepared: Preparer) -> None:
        with pytest.raises(DataError, match="no chat template") as caught:
            prepared([GOOD], qwen(None))
        assert "data.chat_template" in caught.value.hint
        assert prepared([{"text": "a"}], qwen(None)).report.kept == 1

    def test_a_template_from_a_file(self, prepared: Preparer, tmp_path: Path) -> None:
        file = tmp_path / "mine.jinja"
        file.write_text(QWEN.replace("assistant\\n", "helper\\n").replace("You are Qwen", "I am"), encoding="utf-8")
        tokenizer = qwen("{{ raise_exception('not this one') }}")
        row = prepared([GOOD], tokenizer, chat_template=str(file)).rows[0]
        assert whole(row, tokenizer).startswith("<|im_start|>system\nI am, created")
        assert tokenizer.chat_template == "{{ raise_exception('not this one') }}"

    @pytest.mark.parametrize(
        ("content", "says"), [(None, "can't read the chat template"), ("{% for %}", "syntax error in line 1")]
    )
    def test_a_template_file_that_is_none(
        self, prepared: Preparer, tmp_path: Path, content: str | None, says: str
    ) -> None:
        file = tmp_path / "mine.jinja"
        if content is not None:
            file.write_text(content, encoding="utf-8")
        with pytest.raises(DataError, match=says):
            prepared([GOOD], qwen(), chat_template=str(file))

    def test_a_tokenizer_with_several_templates(self, prepared: Preparer) -> None:
        tokenizer = qwen()
        tokenizer.chat_template = {"default": QWEN, "tool_use": "{{ raise_exception('no') }}"}
        assert trained(prepared([GOOD], tokenizer).rows[0], tokenizer) == ["there<|im_end|>"]


class TestStartAndEnd:
    ROWS = (
        {"text": "Hello there"},
        {"text": "{bos}Hello there"},
        {"prompt": "Hello", "completion": " there"},
        {"prompt": "{bos}Hello", "completion": " there"},
        {"instruction": "Hello", "output": "there"},
        GOOD,
        {"prompt": turns("Hello"), "completion": [turn("assistant", "there")]},
    )

    @pytest.mark.parametrize(
        ("tokenizer", "starts"),
        [
            (gemma(), True),
            (gemma(start=False), True),  # only the template writes it, as in some mirrors of Gemma
            (gemma(GEMMA.replace("{{ bos_token }}", "")), True),  # only the post-processor does
            (gemma(GEMMA.replace("{{ bos_token }}", ""), start=False), False),
            (mistral(), True),
            (qwen(), False),
        ],
    )
    def test_one_start_token_or_none(self, prepared: Preparer, tokenizer: Any, starts: bool) -> None:
        bos = tokenizer.bos_token if starts else ""
        made = prepared([json.dumps(row).replace("{bos}", bos) for row in self.ROWS], tokenizer)
        assert made.report.kept == len(self.ROWS)
        for row in made.rows:
            assert row.input_ids.count(tokenizer.bos_token_id) == int(starts)
            if starts:
                assert row.input_ids[0] == tokenizer.bos_token_id

    def test_a_template_from_a_file_may_be_what_writes_it(self, prepared: Preparer, tmp_path: Path) -> None:
        file = tmp_path / "mine.jinja"
        file.write_text(GEMMA, encoding="utf-8")
        tokenizer = gemma(None, start=False)
        made = prepared([GOOD, {"text": "Hello there"}], tokenizer, chat_template=str(file))
        assert [row.input_ids.count(tokenizer.bos_token_id) for row in made.rows] == [1, 1]

    @pytest.mark.parametrize("end", [False, True], ids=["as it is", "the post-processor adds it"])
    @pytest.mark.parametrize(
        ("row", "expected"),
        [
            ({"text": "Hello"}, ["<bos>Hello<eos>"]),
            ({"text": "Hello<eos>"}, ["<bos>Hello<eos>"]),
            ({"prompt": "Hello", "completion": " there"}, [" there<eos>"]),
            ({"prompt": "Hello", "completion": " there<eos>"}, [" there<eos>"]),
            (GOOD, ["there<end_of_turn>"]),
        ],
    )
    def test_one_end_token(self, prepared: Preparer, row: Any, expected: list[str], end: bool) -> None:
        tokenizer = gemma(end=end)
        made = prepared([row], tokenizer).rows[0]
        assert trained(made, tokenizer) == expected
        assert made.input_ids.count(tokenizer.eos_token_id) == int("messages" not in row)

    def test_a_tokenizer_without_an_end_token(self, prepared: Preparer) -> None:
        tokenizer = build(("<x>",))
        made = prepared([{"text": "Hello there"}, {"prompt": "Hello", "completion": " there"}], tokenizer)
        assert [trained(row, tokenizer) for row in made.rows] == [["Hello there"], [" there"]]

    def test_a_token_across_the_seam_is_trained(self, prepared: Preparer) -> None:
        # Prompt and completion are one text: its tokens are those that the model sees, whatever the seam.
        tokenizer = qwen()
        row = prepared([{"prompt": "Hello ", "completion": "there"}], tokenizer).rows[0]
        assert row.input_ids[:-1] == tokenizer("Hello there")["input_ids"]
        assert trained(row, tokenizer) == [" there<|im_end|>"]


class TestLength:
    def test_rows_lose_their_end(self, prepared: Preparer) -> None:
        tokenizer = qwen()
        full = prepared([{"text": "Hello there, what is the answer?"}], tokenizer).rows[0]
        made = prepared([{"text": "Hello there, what is the answer?"}, {"text": "a"}], tokenizer, max_length=4)
        assert made.rows[0].input_ids == full.input_ids[:4]
        assert made.rows[0].labels == full.labels[:4]
        assert tokenizer.eos_token_id not in made.rows[0].input_ids
        assert made.report.truncated == (1,)
        assert made.report.kept == 2

    def test_a_row_of_just_the_length_is_not_truncated(self, prepared: Preparer) -> None:
        tokenizer = qwen()
        length = len(prepared([GOOD], tokenizer).rows[0].input_ids)
        assert prepared([GOOD], tokenizer, max_length=length).report.truncated == ()
        assert prepared([GOOD], tokenizer, max_length=length - 1).report.truncated == (1,)

    def test_a_row_that_loses_every_label_is_skipped(self, prepared: Preparer) -> None:
        # O-31: a loss of NaN, or of zero that looks like success.
        long = {"prompt": "Hello there, what is the answer? " * 9, "completion": "there"}
        made = prepared([long, {"text": "Hello"}], qwen(), max_length=16)
        assert skips(made.report) == {"nothing to train within 16 tokens": (1,)}
        assert made.report.truncated == ()
        with pytest.raises(DataError, match=r"1 nothing to train within 16 tokens \(line 1\)") as caught:
            prepared([long], qwen(), max_length=16)
        assert "data.max_length" in caught.value.hint

    def test_a_label_in_the_first_place_only_is_nothing_to_train(self, prepared: Preparer) -> None:
        tokenizer = build(("<x>",))
        made = prepared([{"text": "a"}, {"text": "ab"}, {"text": "Hello there"}], tokenizer)
        assert skips(made.report) == {"nothing to train": (1,)}
        with pytest.raises(DataError, match="nothing to train within 1 tokens"):
            prepared([{"text": "Hello there"}], tokenizer, max_length=1)


class TestRefusals:
    def test_no_row_left(self, prepared: Preparer) -> None:
        rows = ['{"text": ', *[{"messages": []}] * 7, {"text": ""}]
        with pytest.raises(DataError) as caught:
            prepared(rows, qwen())
        assert caught.value.message.splitlines()[1:] == [
            "  - 7 empty conversation (lines 2, 3, 4, 5, 6 and 2 more)",
            "  - 1 bad JSON (line 1)",
            "  - 1 empty text (line 9)",
        ]
        assert caught.value.hint

    @pytest.mark.parametrize(
        ("row", "config", "hint"),
        [
            (GOOD, {"format": "text"}, "data.format"),
            ({"messages": [turn("assistant", "a")]}, {}, "data.chat_template"),
            ({"question": "a"}, {}, "`messages`"),
        ],
    )
    def test_the_way_out(self, prepared: Preparer, row: Any, config: dict[str, Any], hint: str) -> None:
        with pytest.raises(DataError) as caught:
            prepared([row], gemma(), **config)
        assert hint in caught.value.hint

    def test_a_token_without_an_embedding(self, prepared: Preparer) -> None:
        tokenizer = qwen()
        largest = max(tokenizer("Hello there")["input_ids"])
        assert prepared([{"text": "Hello there"}], tokenizer, vocab_size=largest + 1).report.kept == 1
        with pytest.raises(DataError, match=rf"line 2: token {largest} .* vocabulary of {largest}") as caught:
            prepared([{"text": "a"}, {"text": "Hello there"}], tokenizer, vocab_size=largest)
        assert "belong together" in caught.value.hint

    def test_a_slow_tokenizer(self, prepared: Preparer) -> None:
        class Slow:
            is_fast = False

        with pytest.raises(DataError, match="Slow can't say") as caught:
            prepared([GOOD], Slow(), vocab_size=10)
        assert "fast tokenizer" in caught.value.hint


class TestPrepared:
    def test_data_set(self, prepared: Preparer) -> None:
        made = prepared([GOOD, {"text": "Hello"}], qwen())
        rows = list(made.dataset())
        assert [set(row) for row in rows] == [{"input_ids", "labels", "attention_mask"}] * 2
        assert [row["input_ids"] for row in rows] == [row.input_ids for row in made.rows]
        assert [row["labels"] for row in rows] == [row.labels for row in made.rows]
        assert [row["attention_mask"] for row in rows] == [[1] * len(row.input_ids) for row in made.rows]

    def test_the_hash_is_that_of_ids_and_labels(self, prepared: Preparer) -> None:
        tokenizer = qwen()
        text = {"text": "Hello there"}
        made = prepared([GOOD, text], tokenizer)
        moved = prepared(["", GOOD, "bad", text], tokenizer)
        assert len(made.hash) == 16
        assert int(made.hash, 16) >= 0
        assert made.hash == moved.hash  # lines are not part of what is trained
        others = [
            prepared([text, GOOD], tokenizer),
            prepared([GOOD], tokenizer),
            prepared([GOOD, {"prompt": "Hello", "completion": " there"}], tokenizer),
            prepared([GOOD, {"text": "Hello, there"}], tokenizer),
        ]
        assert len({made.hash, *(other.hash for other in others)}) == 5

    def test_counts(self, prepared: Preparer) -> None:
        tokenizer = qwen()
        made = prepared([GOOD, {"text": "Hello"}], tokenizer)
        assert made.report.tokens == sum(len(row.input_ids) for row in made.rows)
        answer, text = (tokenizer(words)["input_ids"] for words in ("there<|im_end|>", "Hello<|im_end|>"))
        assert made.report.supervised_tokens == len(answer) + len(text) - 1  # nothing comes before the text's first

    def test_progress_and_another_path(self, tmp_path: Path) -> None:
        path = tmp_path / "eval.jsonl"
        path.write_text('{"text": "a"}\n{}\n{"text": ""}\n{"text": "b"}\n', encoding="utf-8")
        seen: list[tuple[int, int]] = []
        tokenizer = qwen()
        made = prepare(
            DataConfig(path="not/read.jsonl"),
            tokenizer,
            vocab_size=len(tokenizer),
            path=str(path),
            progress=lambda done, total: seen.append((done, total)),
        )
        assert [row.line for row in made.rows] == [1, 4]
        assert seen == [(1, 3), (2, 3), (3, 3)]

    def test_the_tokenizer_is_left_alone(self, prepared: Preparer) -> None:
        tokenizer = gemma()
        before = tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template
        prepared([GOOD, {"text": "Hello"}], tokenizer, max_length=4)
        assert (tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template) == before


class TestReport:
    def test_in_words(self, prepared: Preparer) -> None:
        rows = [
            GOOD,
            '{"messages": ',
            {"messages": turns("Hello")},
            {"messages": turns("Hello", "there", "and?")},
            "[]]",
            {"text": "Hello there " * 50},
        ]
        made = prepared(rows, qwen(), max_length=128)
        trained, tokens = made.report.supervised_tokens, made.report.tokens
        assert render_report(made.report) == [
            "3 rows kept, 1 repaired, 1 truncated, 3 skipped: 2 bad JSON (lines 2, 5), 1 no assistant turn (line 3)",
            "repaired: 1 turns after the last assistant turn cut off (line 4)",
            f"{trained:,} of {tokens:,} tokens trained ({trained / tokens:.1%})",
        ]

    def test_nothing_to_say(self, prepared: Preparer) -> None:
        assert render_report(prepared([GOOD], qwen()).report)[0] == "1 row kept"
        assert render_report(Report(kept=1312)) == ["1,312 rows kept", "0 of 0 tokens trained (0.0%)"]

    def test_rows_where_there_are_no_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.json"
        path.write_text('[{"text": "a"}, {"text": ""}, {}]', encoding="utf-8")
        tokenizer = qwen()
        made = prepare(DataConfig(path=str(path)), tokenizer, vocab_size=len(tokenizer))
        assert render_report(made.report)[0] == "1 row kept, 2 skipped: 1 empty text (row 2), 1 empty row (row 3)"

    def test_many_reasons(self, prepared: Preparer) -> None:
        rows = [GOOD, *({"messages": [turn(f"role{n}", "a")]} for n in range(11))]
        (line, _) = render_report(prepared(rows, qwen()).report)
        assert line.startswith("1 row kept, 11 skipped: 1 role role0 is not supported (line 2), ")
        assert line.endswith("1 role role7 is not supported (line 9), 3 for other reasons")


class TestCollator:
    ROWS = ({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]})

    def test_right_padding(self) -> None:
        batch = collator(gemma(), 4)(self.ROWS)
        pad = gemma().pad_token_id
        assert batch["input_ids"].tolist() == [[5, 6, 7, pad], [8, pad, pad, pad]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
        assert batch["labels"].tolist() == [[-100, 6, 7, -100], [8, -100, -100, -100]]
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}

    @pytest.mark.parametrize(("multiple", "width"), [(1, 3), (2, 4), (3, 3), (8, 8)])
    def test_widths(self, multiple: int, width: int) -> None:
        assert collator(qwen(), multiple)(self.ROWS)["input_ids"].shape == (2, width)

    def test_the_side_of_the_tokenizer_does_not_matter(self) -> None:
        tokenizer = qwen()
        tokenizer.padding_side = "left"
        assert collator(tokenizer, 4)(self.ROWS)["attention_mask"].tolist()[1] == [1, 0, 0, 0]

    @pytest.mark.parametrize(("rows_of_model", "fills"), [(None, 2), (3, 2), (2, 0)])
    def test_a_padding_token_without_an_embedding(self, rows_of_model: int | None, fills: int) -> None:
        tokenizer = build(("<a>", "<b>", "<pad>"), pad="<pad>")
        batch = collator(tokenizer, 4, vocab_size=rows_of_model)(self.ROWS)
        assert batch["input_ids"][0, -1] == fills

    def test_no_padding_token(self) -> None:
        assert collator(build(("<a>",)), 4)(self.ROWS)["input_ids"][1].tolist() == [8, 0, 0, 0]


def test_importing_costs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, poros.training.data; assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
