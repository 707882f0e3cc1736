"""Folders of language models, tokenizers and tables that somebody else made to do harm."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

LLAMA = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 16, "max_position_embeddings": 16,
}  # fmt: skip
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
Change = Callable[[Path], object]


def language_folder(folder: Path, seed: int = 1) -> Path:
    """Return a harmless folder of transformers."""
    import torch

    from rbdc.models.create import create

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = create("llama", LLAMA)
    model.save_pretrained(folder)
    return folder


def _config(**more: Any) -> Change:
    return lambda folder: _write(folder / CONFIG, json.loads((folder / CONFIG).read_text()) | more)


def _record(**content: Any) -> Change:
    return lambda folder: _write(folder / "rbdc.json", content)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))


def _index(name: str) -> Change:
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "weights.safetensors")
        _write(folder / INDEX, {"weight_map": {"lm_head.weight": name}})

    return spoil


def _header(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change every tensor's entry in the header of the weights."""

    def spoil(folder: Path) -> None:
        path = folder / WEIGHTS
        content = path.read_bytes()
        length = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:length])
        for name, entry in header.items():
            if name != "__metadata__":
                change(entry)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[length:])

    return spoil


def _link(name: str, target: str = "../secret") -> Change:
    def spoil(folder: Path) -> None:
        (folder.parent / "secret").write_text("{}")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return spoil


def _pipe(name: str) -> Change:
    def spoil(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return spoil


def _pipe_outside(folder: Path) -> None:
    os.mkfifo(folder.parent / "pipe")
    _record(shards={"../pipe": "x"})(folder)


def _floats(entry: dict[str, Any]) -> None:
    entry["data_offsets"] = [float(n) for n in entry["data_offsets"]]


def _negative(entry: dict[str, Any]) -> None:
    entry["shape"] = [-n if len(entry["shape"]) == 2 else n for n in entry["shape"]]


REFUSED: dict[str, Change] = {
    "code of its own": _config(auto_map={"AutoModel": "attacker/model--code.Model"}),
    "another type": _config(model_type="../../model"),
    "a list as type": _config(model_type=["llama"]),
    "layer path": _config(hidden_act="/etc/passwd"),
    "layer of Python": _config(hidden_act="__import__"),
    "no heads": _config(num_attention_heads=0),
    "large heads": _config(head_dim=2**16, num_attention_heads=2**16),
    "many layers": _config(num_hidden_layers=2**16),
    "digits": _config(vocab_size=10**400),
    "long names": _config(rope_scaling={"rope_type": "x" * 1000}),
    "quantized": _config(quantization_config={"quant_method": "x"}),
    "index of a parent": _index("../weights.safetensors"),
    "index of the root": _index("/etc/passwd"),
    "index of dots": _index(".."),
    "index of the config": _index(CONFIG),
    "sum of a pipe": _pipe_outside,
    "sum of the root": _record(shards={"/dev/zero": "x"}),
    "sum of nothing": _record(shards={"other.safetensors": "x"}),
    "pipe for weights": _pipe(WEIGHTS),
    "pipe for a config": _pipe(CONFIG),
    "device for weights": _link(WEIGHTS, "/dev/zero"),
    "offsets with a point": _header(_floats),
    "negative sizes": _header(_negative),
    "link for a tokenizer": _link("tokenizer.json"),
    "link for merges": _link("merges.txt", "/etc/passwd"),
    "link for settings": _link("generation_config.json"),
}
"""What is refused, when such a folder is coupled or loaded."""

LEFT_OUT = {
    "attn_implementation": "attacker/kernel", "_attn_implementation": "attacker/kernel",
    "use_kernels": True, "_name_or_path": "/etc/passwd", "custom_pipelines": {"x": {"impl": "x"}},
}  # fmt: skip
"""Fields of a config.json that do no harm here, and are not copied into a model made of it."""


def _tokenizer(**changes: Any) -> str:
    content: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    }  # fmt: skip
    return json.dumps(content | changes)


def _words(**vocabulary: int) -> dict[str, Any]:
    return {"type": "WordLevel", "vocab": vocabulary, "unk_token": next(iter(vocabulary))}


TOKENIZERS: dict[str, tuple[str, str]] = {
    "empty": ("x", ""),
    "null": ("x", "null"),
    "deep": ("x", '{"a":' * 100_000),
    "gaps": ("x", _tokenizer(model=_words(a=70_000, b=69_999))),
    "called characters": ("characters", _tokenizer(model=_words(ab=0, c=1)) + " "),
    "no unknown token": (
        "x", _tokenizer(model={"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]})
    ),
    "a panic while it is read": (
        "x", _tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    ),
    "a panic at work": (
        "x", _tokenizer(normalizer={"type": "Replace", "pattern": {"Regex": ""}, "content": "xy"})
    ),
}  # fmt: skip
"""The name of a folder and its tokenizer.json, which is refused, or gives tokens of its own."""

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
Row = dict[str, bytes | str | None]


def table_rows(folder: Path, port: int) -> dict[str, Row]:
    """Return images of a table that a library would fetch, wait for, or run."""
    os.mkfifo(folder / "pipe")
    paths = {
        "address": f"http://127.0.0.1:{port}/x.png",
        "hub": "hf://datasets/attacker/set/x.png",
        "archive": f"zip://x.png::http://127.0.0.1:{port}/x.zip",
        "pipe": str(folder / "pipe"),
        "no image": "/etc/passwd",
        "no file": "nowhere.png",
    }
    rows: dict[str, Row] = {name: {"bytes": None, "path": path} for name, path in paths.items()}
    return {**rows, "program": {"bytes": EPS, "path": None}}
