"""Training rows to token rows: what `poros train` learns from, and what it says about it before it starts.

`prepare` reads rows (`poros.training.rows`), finds what is trained in them (`poros.training.spans`), tokenises them
(`poros.training.tokenize`), cuts them to length, and refuses what would look like training without being it:

- a row of which no token is trained, which gives a loss of NaN or of zero: skipped and reported;
- a data set without any row left: an error that lists the reasons;
- conversations in which every token is trained, the sign of a mask that failed: an error;
- a token that the model has no embedding for, the sign of a tokenizer that isn't the checkpoint's: an error.

`Prepared.dataset()` and `collator` are what `transformers.Trainer` takes. A causal model predicts token i+1 at place i
and shifts the labels itself, so a label at place 0 is never used and doesn't count as trained.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from poros.config import DataConfig
from poros.errors import DataError
from poros.training.rows import Chat, RowSkipped, read_row, read_rows
from poros.training.spans import Tokenizer
from poros.training.tokenize import IGNORED, Encoder

if TYPE_CHECKING:
    import torch

LINES_SHOWN = 5
REASONS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A row as it is trained.

    Attributes:
        line: Where it comes from, as in `Report.unit`.
        input_ids: Its tokens, at most `data.max_length`.
        labels: Of the same length: the token itself where it is trained, -100 elsewhere.
    """

    line: int
    input_ids: list[int]
    labels: list[int]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was found in one or more rows, and in which."""

    reason: str
    lines: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of the rows.

    Attributes:
        kept: How many rows are trained; those repaired and truncated are among them.
        repaired: Rows that were changed, by what was done.
        truncated: The lines of rows that were longer than `data.max_length`.
        skipped: What was left out, by reason.
        tokens: Tokens of all rows.
        supervised_tokens: Tokens that are trained.
        unit: Whether numbers are those of lines or of rows.
    """

    kept: int
    repaired: tuple[Finding, ...] = ()
    truncated: tuple[int, ...] = ()
    skipped: tuple[Finding, ...] = ()
    tokens: int = 0
    supervised_tokens: int = 0
    unit: Literal["line", "row"] = "line"


@dataclass(frozen=True)
class Prepared:
    """Token rows, ready to train, and the report about them."""

    rows: tuple[TokenRow, ...]
    report: Report

    @cached_property
    def hash(self) -> str:
        """Sixteen hex digits of the SHA-256 of all ids and labels; the same for the same training, wherever it lay."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(json.dumps([row.input_ids, row.labels]).encode() + b"\n")
        return digest.hexdigest()[:16]

    def dataset(self) -> Any:
        """A `datasets.Dataset` with `input_ids`, `labels` and `attention_mask`, not padded."""
        import datasets

        return datasets.Dataset.from_dict(
            {
                "input_ids": [row.input_ids for row in self.rows],
                "labels": [row.labels for row in self.rows],
                "attention_mask": [[1] * len(row.input_ids) for row in self.rows],
            }
        )


@dataclass(frozen=True, slots=True)
class Collator:
    """Makes a batch of rows, padded on the right to a common multiple of `multiple_of`.

    On the right, because a padded place on the left would attend to nothing at all, which some kernels answer with NaN.
    Places are padding because they lie behind a row's end, whatever token is there: the padding token may well be the
    end token, which is trained.
    """

    pad_id: int
    multiple_of: int
    marks: tuple[str, ...] = ()

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        import torch

        longest = max(len(row["input_ids"]) for row in rows)
        width = -(-longest // self.multiple_of) * self.multiple_of

        def padded(values: Iterable[Sequence[int]], filler: int) -> torch.Tensor:
            return torch.tensor([[*value, *[filler] * (width - len(value))] for value in values], dtype=torch.long)

        ids = padded((row["input_ids"] for row in rows), self.pad_id)
        return {
            "input_ids": ids,
            **{name: torch.zeros_like(ids) for name in self.marks},
            "attention_mask": padded(([1] * len(row["input_ids"]) for row in rows), 0),
            "labels": padded((row["labels"] for row in rows), IGNORED),
        }


def collator(
    tokenizer: Tokenizer, pad_to_multiple_of: int, *, vocab_size: int | None = None, marks: tuple[str, ...] = ()
) -> Collator:
    """The `data_collator` for `transformers.Trainer`.

    Args:
        tokenizer: Names the token that fills padded places; 0 does where it has none.
        pad_to_multiple_of: Few different lengths mean few different shapes.
        vocab_size: Rows of the model's embedding. A padding token that was added to the tokenizer only has none there,
            and 0 takes its place; what fills a padded place has no effect.
        marks: Further inputs, of zeros, that tell a multimodal model that every token is text.
    """
    pad = tokenizer.pad_token_id
    if pad is None or (vocab_size is not None and pad >= vocab_size):
        pad = 0
    return Collator(pad, pad_to_multiple_of, marks)


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    path: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Read rows and turn them into token rows.

    Args:
        config: Which rows, and how.
        tokenizer: A fast tokenizer; it is not changed.
        vocab_size: Rows of the model's embedding.
        path: Rows to read in place of those of `config.path`; `config.eval_path`, say.
        progress: Called after each row with the number of rows done and of all rows.

    Raises:
        DataError: the data can't be read, nothing is left to train, or what is left would train the wrong thing.
    """
    path = config.path if path is None else path
    encoder = Encoder(tokenizer, None if config.chat_template is None else _template(config.chat_template))
    source = read_rows(path, config.split)
    kept: list[TokenRow] = []
    skipped, repaired = list(source.skipped), []
    truncated: list[int] = []
    chats: list[TokenRow] = []
    for done, row in enumerate(source.rows, start=1):
        try:
            example = read_row(row.values, config.format)
            ids, labels = encoder.encode(example)
            tokens = TokenRow(row.line, ids[: config.max_length], labels[: config.max_length])
            if not _supervised(tokens.labels):
                cut = f" within {config.max_length} tokens" if _supervised(labels) else ""
                raise RowSkipped(f"nothing to train{cut}")
        except RowSkipped as skip:
            skipped.append((row.line, skip.reason))
        else:
            _check_ids(tokens, vocab_size, f"{path}, {source.unit} {row.line}")
            kept.append(tokens)
            if len(ids) > config.max_length:
                truncated.append(row.line)
            if isinstance(example, Chat):
                chats.append(tokens)
                repaired += [(row.line, repair) for repair in example.repairs]
        if progress is not None:
            progress(done, len(source.rows))
    report = Report(
        kept=len(kept),
        repaired=_findings(repaired),
        truncated=tuple(truncated),
        skipped=_findings(skipped),
        tokens=sum(len(row.input_ids) for row in kept),
        supervised_tokens=sum(_supervised(row.labels) for row in kept),
        unit=source.unit,
    )
    if not kept:
        reasons = "\n".join(f"  - {_phrase(finding, report.unit)}" for finding in report.skipped)
        raise DataError(f"{path}: no row is left to train:\n{reasons}", _way_out(config, report))
    if chats and all(_supervised(row.labels) == len(row.labels) - 1 for row in chats):
        raise DataError(
            f"{path}: every token of every conversation would be trained, not only what the assistant says",
            "the chat template marks everything as generated, or renders no user turns: check it",
        )
    return Prepared(tuple(kept), report)


def render_report(report: Report) -> list[str]:
    """The report in a few lines for people."""
    head = f"{report.kept:,} row{'' if report.kept == 1 else 's'} kept"
    if report.repaired:
        head += f", {sum(len(finding.lines) for finding in report.repaired):,} repaired"
    if report.truncated:
        head += f", {len(report.truncated):,} truncated"
    if report.skipped:
        shown = [_phrase(finding, report.unit) for finding in report.skipped[:REASONS_SHOWN]]
        rest = sum(len(finding.lines) for finding in report.skipped[REASONS_SHOWN:])
        shown += [f"{rest:,} for other reasons"] if rest else []
        head += f", {sum(len(finding.lines) for finding in report.skipped):,} skipped: {', '.join(shown)}"
    lines = [head]
    if report.repaired:
        lines.append("repaired: " + ", ".join(_phrase(finding, report.unit) for finding in report.repaired))
    share = report.supervised_tokens / report.tokens if report.tokens else 0.0
    lines.append(f"{report.supervised_tokens:,} of {report.tokens:,} tokens trained ({share:.1%})")
    return lines


def _template(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"can't read the chat template {path}: {error}", "check data.chat_template") from error


def _supervised(labels: Sequence[int]) -> int:
    """How many tokens of a row are trained; the first can't be, because no token comes before it."""
    return sum(label != IGNORED for label in labels[1:])


def _check_ids(row: TokenRow, vocab_size: int, where: str) -> None:
    largest = max(row.input_ids)
    if largest >= vocab_size:
        raise DataError(
            f"{where}: token {largest} is outside the model's vocabulary of {vocab_size}",
            "the tokenizer and the checkpoint don't belong together",
        )


def _findings(found: Iterable[tuple[int, str]]) -> tuple[Finding, ...]:
    """Lines grouped by reason, the most frequent reason first."""
    lines: dict[str, list[int]] = {}
    for line, reason in found:
        lines.setdefault(reason, []).append(line)
    findings = [Finding(reason, tuple(where)) for reason, where in lines.items()]
    return tuple(sorted(findings, key=lambda finding: (-len(finding.lines), finding.lines)))


def _phrase(finding: Finding, unit: str) -> str:
    """`2 bad JSON (lines 17, 90)`"""
    count, shown = len(finding.lines), finding.lines[:LINES_SHOWN]
    where = ", ".join(str(line) for line in shown)
    if count > len(shown):
        where += f" and {count - len(shown):,} more"
    return f"{count:,} {finding.reason} ({unit}{'' if count == 1 else 's'} {where})"


def _way_out(config: DataConfig, report: Report) -> str:
    """A hint for the most frequent reason."""
    reason = report.skipped[0].reason
    if reason.startswith("nothing to train within"):
        return "raise data.max_length"
    if reason == f"not a {config.format} row":
        return "set data.format to auto, or to the format of these rows"
    if "chat template" in reason:
        return "change the conversations, or set data.chat_template to a template that takes them"
    return "rows hold `messages`, `prompt` and `completion`, or `text`, one JSON object a line"
