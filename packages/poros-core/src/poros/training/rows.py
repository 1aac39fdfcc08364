"""Rows as people write them: reading a file, and what each shape of row means.

A data set is a `.jsonl` file (one JSON object a line), a `.json` file (an array of objects), or the name of a data set
that the `datasets` library can load. Nothing is dropped in silence: a row that can't be used is skipped with a reason
and its line number, and a row that is changed before use is reported as repaired.

Shapes. A row is read as the first of these whose keys it has; a key whose value is null counts as missing.

- chat: `messages`, a list of `role` and `content`, or `conversations`, a list of `from` and `value` (ShareGPT). The
  assistant's turns are trained.
- completion: `prompt` and `completion`. Both text: the completion is trained. Both lists of messages: one conversation,
  in which the assistant's turns of the completion are trained.
- completion: `instruction`, `output` and perhaps `input` and `system` (Alpaca). The output is trained; an empty line
  sets the parts apart.
- text: `text`, trained whole.

Odd conversations, and the rule for each:

- Turns after the last assistant turn are cut off, and the row counts as repaired.
- No turn at all, or none of the assistant: skipped.
- A turn whose content is null or not text, or an assistant turn that says nothing: skipped.
- Content as a list of parts: text parts are joined; a part of another kind skips the row.
- A `system` text beside the turns becomes the first turn, unless that is a system turn already.
- Two turns of one role in a row, a system turn, an assistant turn that comes first: rendered as they are where the chat
  template takes them, otherwise skipped with the template's own words.
- Other roles, tools, tool calls: skipped, because many templates would render them wrongly or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from poros.errors import DataError

Message = dict[str, Any]
"""A turn as chat templates expect it: `role` and `content`, both text, and whatever else the row said about it."""

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}

# Keys of a row -> the `data.format` values under which it is read, in the order in which they are looked for.
SHAPES: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"messages"}), frozenset({"auto", "chat"})),
    (frozenset({"conversations"}), frozenset({"auto", "chat"})),
    (frozenset({"prompt", "completion"}), frozenset({"auto", "chat", "completion"})),
    (frozenset({"instruction", "output"}), frozenset({"auto", "completion"})),
    (frozenset({"text"}), frozenset({"auto", "text"})),
)
KEYS = frozenset({"input", "system", "tools"}).union(*(keys for keys, _ in SHAPES))


class RowSkipped(Exception):
    """Raised while a row is being turned into tokens: it can't be used, and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it was read, and where: its line, or its number counting from 1 where rows have no line."""

    line: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """What reading gave.

    Attributes:
        rows: The rows, in order.
        skipped: (line, reason) of what was not a row.
        unit: What the numbers count: `line` for files; `row` for named data sets and for arrays with several objects
            on a line.
    """

    rows: tuple[Row, ...]
    skipped: tuple[tuple[int, str], ...] = ()
    unit: Literal["line", "row"] = "line"


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation; assistant turns from index `first` on are trained."""

    messages: tuple[Message, ...]
    first: int = 0
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A text of which the end is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is trained whole."""

    text: str


def read_rows(path: str, split: str = "train") -> Rows:
    """Read a `.jsonl` or `.json` file, or a split of a named data set.

    Raises:
        DataError: there is no such file or data set, it can't be read, or it is empty.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        raise DataError(f"{path} is a folder, not a data file", "name one .jsonl or .json file in it")
    suffix = file.suffix.lower()
    if suffix not in (".jsonl", ".json"):
        if file.exists():
            raise DataError(f"{path} is a file of a kind that Poros does not read", "write the rows as .jsonl")
        return _named(path, split)
    try:
        content = file.read_bytes()
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}", "check data.path") from error
    read = _lines(content) if suffix == ".jsonl" else _array(path, content)
    if not read.rows and not read.skipped:
        raise DataError(f"{path} is empty", "check data.path")
    return read


def read_row(values: Mapping[str, Any], format: str = "auto") -> Chat | Completion | Text:
    """What a row says, by the rules in the module's description.

    Raises:
        RowSkipped: the row can't be used.
    """
    # Columns of a named data set exist in every row, so null means missing. Only when no shape is complete without
    # its nulls are they looked at: such a row is then skipped for its null, not for having no known keys.
    given = {key for key, value in values.items() if value is not None}
    shapes = [keys for keys, formats in SHAPES if format in formats]
    keys = next((keys for known in (given, values.keys()) for keys in shapes if keys <= known), None)
    if keys is None:
        raise RowSkipped(_unknown(values) if format == "auto" else f"not a {format} row")
    if "text" in keys:
        return Text(_filled(values["text"], "text"))
    if "output" in keys:
        parts = [_string(values[key], key) for key in ("system", "instruction", "input") if values.get(key)]
        return Completion("".join(f"{part}\n\n" for part in parts), _filled(values["output"], "output"))
    if "prompt" not in keys:
        return _chat(values, _messages(values[next(iter(keys))]))
    prompt, completion = values["prompt"], values["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt)
        return _chat(values, before + _messages(completion), first=len(before))
    if format == "chat":
        raise RowSkipped("not a chat row")
    return Completion(_string(prompt, "prompt"), _filled(completion, "completion"))


def _lines(content: bytes) -> Rows:
    rows, skipped = [], []
    lines = content.split(b"\n")  # not splitlines: a JSON string may hold other characters that count as line ends
    if not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(Row(number, _object(json.loads(line.decode("utf-8-sig")) if line.strip() else {})))
        except UnicodeDecodeError:
            skipped.append((number, "not UTF-8"))
        except (ValueError, RecursionError):
            skipped.append((number, "bad JSON"))
        except RowSkipped as skip:
            skipped.append((number, skip.reason))
    return Rows(tuple(rows), tuple(skipped))


def _array(path: str, content: bytes) -> Rows:
    try:
        found = list(_elements(content.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: not UTF-8", "save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        # Behind a fault in an array, nothing tells where the next row starts.
        raise DataError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}",
            "a .json file holds one array of objects; if it holds one object a line, name it .jsonl",
        ) from error
    except RecursionError as error:
        raise DataError(f"{path}: nested too deeply to be rows", "a .json file holds one array of objects") from error
    # An array written on a single line has one line number for all; then the position in the array says more.
    by_line = len({line for line, _ in found}) == len(found)
    rows, skipped = [], []
    for position, (line, value) in enumerate(found, start=1):
        number = line if by_line else position
        try:
            rows.append(Row(number, _object(value)))
        except RowSkipped as skip:
            skipped.append((number, skip.reason))
    return Rows(tuple(rows), tuple(skipped), "line" if by_line else "row")


def _elements(text: str) -> Iterator[tuple[int, Any]]:
    """Each element of a JSON array and the line on which it starts."""
    decoder, blank = json.JSONDecoder(), " \t\r\n"

    def skip_blank(place: int) -> int:
        while place < len(text) and text[place] in blank:
            place += 1
        return place

    place = skip_blank(0)
    if place == len(text):
        return
    if text[place] != "[":
        raise json.JSONDecodeError("expected an array of objects", text, place)
    place = skip_blank(place + 1)
    counted, line = 0, 1
    while text[place : place + 1] != "]":
        line += text.count("\n", counted, place)
        counted = place
        value, place = decoder.raw_decode(text, place)
        yield line, value
        place = skip_blank(place)
        if text[place : place + 1] == ",":
            place = skip_blank(place + 1)
            if text[place : place + 1] == "]":
                raise json.JSONDecodeError("expected another row after the comma", text, place)
        elif text[place : place + 1] != "]":
            raise json.JSONDecodeError("expected ',' or ']'", text, place)
    place = skip_blank(place + 1)
    if place != len(text):
        raise json.JSONDecodeError("something follows the array", text, place)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowSkipped("not a JSON object")
    if not value:
        raise RowSkipped("empty row")
    return value


def _named(name: str, split: str) -> Rows:
    import datasets  # only here: it takes a second, and files don't need it

    try:
        # Whether the network may be used is for `datasets` to say (HF_HUB_OFFLINE, HF_DATASETS_OFFLINE).
        loaded = datasets.load_dataset(name, split=split)
        wanted = [column for column in loaded.column_names if column in KEYS]
        if wanted:
            loaded = loaded.select_columns(wanted)  # a column that nobody reads (pictures, say) is not even decoded
        rows = tuple(Row(number, dict(values)) for number, values in enumerate(loaded, start=1))
    except Exception as error:
        raise DataError(
            f"{name} is neither a .jsonl or .json file nor a data set that can be loaded (split {split}): "
            f"{type(error).__name__}: {' '.join(str(error).split())}",
            "check data.path and data.split; offline (HF_HUB_OFFLINE, HF_DATASETS_OFFLINE) a data set must be in the "
            "cache already",
        ) from error
    if not rows:
        raise DataError(f"{name} (split {split}) is empty", "check data.split")
    return Rows(rows, unit="row")


def _chat(values: Mapping[str, Any], messages: list[Message], first: int = 0) -> Chat:
    if values.get("tools"):
        raise RowSkipped("tools are not supported")
    if not messages:
        raise RowSkipped("empty conversation")
    system = values.get("system")
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _string(system, "system")}, *messages]
        first += 1
    kept = len(messages)
    while kept > first and messages[kept - 1]["role"] != "assistant":
        kept -= 1
    if kept == first:
        raise RowSkipped("no assistant turn")
    if any(not turn["content"].strip() for turn in messages[:kept] if turn["role"] == "assistant"):
        raise RowSkipped("an assistant turn is empty")
    repairs = () if kept == len(messages) else ("turns after the last assistant turn cut off",)
    return Chat(tuple(messages[:kept]), first, repairs)


def _messages(turns: Any) -> list[Message]:
    if turns is None:
        return []
    if not isinstance(turns, list):
        raise RowSkipped("the conversation is not a list of turns")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise RowSkipped("a turn is not an object")
        said = {key: value for key, value in turn.items() if value is not None}
        role = said.pop("from", None)
        role = said.pop("role", role)
        if not isinstance(role, str):
            raise RowSkipped("a turn has no role")
        if role not in ROLES:
            raise RowSkipped(f"role {role} is not supported")
        if said.get("tool_calls"):
            raise RowSkipped("tool calls are not supported")
        content = said.pop("value", None)
        content = said.pop("content", content)
        # What else a turn says (its reasoning, say) is for the template to use or to leave.
        messages.append({**said, "role": ROLES[role], "content": _content(content)})
    return messages


def _content(content: Any) -> str:
    if content is None:
        raise RowSkipped("a turn has no content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowSkipped("the content of a turn is not text")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            raise RowSkipped("a turn holds something other than text")
        texts.append(text)
    return "".join(texts)


def _unknown(values: Mapping[str, Any]) -> str:
    names = sorted(values)
    return f"no known keys (only {', '.join(names[:4])}{', ...' if len(names) > 4 else ''})"


def _filled(value: Any, key: str) -> str:
    """A text that is trained, so it has to say something."""
    if value is None or not _string(value, key).strip():
        raise RowSkipped(f"empty {key}")
    return str(value)


def _string(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RowSkipped(f"{key} is missing" if value is None else f"{key} is not text")
    return value
