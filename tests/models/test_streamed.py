"""Two folders of transformers couple from disk to disk, whatever their size."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import rbdc
from rbdc.cli import main
from rbdc.errors import CheckpointError, CouplingError
from rbdc.models import spec_of, streamed
from rbdc.models.coupled import couple_folders
from tests.models.small_language import EXACT, INEXACT
from tests.models.test_language import coupled, logits, made
from tests.support import randomized

transformers = pytest.importorskip("transformers")
VOCABULARY = {chr(48 + n): n for n in range(96)}


def tokenizer(folder: Path, vocabulary: dict[str, int] = VOCABULARY) -> None:
    content = {"model": {"type": "WordLevel", "vocab": vocabulary}, "padding": str(folder)}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def written(root: Path, name: str, **options: Any) -> tuple[list[Any], list[Path]]:
    dtype, shards = options.pop("dtype", torch.float32), options.pop("shards", "1GB")
    models = [made(name, 0.5, seed, **options).to(dtype) for seed in (1, 2)]
    folders = [root / "a", root / "b"]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder, max_shard_size=shards)
        tokenizer(folder)
    return models, folders


CASES = [("gpt2", True), ("llama", False), ("llama", True), ("phi3", False), ("gemma", True)]


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_folders_couple_as_models_do(
    name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "_SMALL", 32)  # so that parts along axes are scaled up
    monkeypatch.setattr(streamed, "CHUNK_BYTES", 1000)  # so that tensors have several parts
    wider = {k: 2 * v for k, v in EXACT[name].items() if k in ("hidden_size", "n_embd")}
    heads = {k: 8 for k in EXACT[name] if k in ("num_attention_heads", "n_head")}
    more = {"num_key_value_heads": 4} if "num_key_value_heads" in EXACT[name] else {}
    models, folders = written(
        tmp_path, name, tie_word_embeddings=tied, **wider, **heads, **more, shards="20KB"
    )
    wide, _ = coupled(*models)
    record = couple_folders(folders[0], folders[1], tmp_path / "wide")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    torch.testing.assert_close(logits(theirs), logits(wide), atol=1e-6, rtol=1e-6)
    found = theirs.state_dict()
    for key, tensor in wide.state_dict().items():
        torch.testing.assert_close(found[key], tensor, atol=1e-7, rtol=1e-7)
    assert record["coupling"]["exact"] and record["coupling"]["proven_on"] == "its own weights"
    assert record["coupling"]["tokenizers_compared"]
    assert (tmp_path / "wide" / "tokenizer.json").exists()
    assert torch.equal(logits(rbdc.load(tmp_path / "wide")), logits(theirs))


def test_bfloat16_is_kept_and_files_stay_small(tmp_path: Path) -> None:
    _, folders = written(tmp_path, "llama", dtype=torch.bfloat16, shards="20KB")
    streamed.couple_streamed(folders[0], folders[1], tmp_path / "wide", shard_bytes=50_000)
    files = sorted((tmp_path / "wide").glob("model-*.safetensors"))
    assert len(files) > 2
    tensors = {k: t for file in files for k, t in load_file(file).items()}
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert theirs.dtype == torch.bfloat16
    wide, _ = coupled(*map(rbdc.load, folders))
    assert torch.equal(theirs.state_dict()["lm_head.weight"].float(), wide.lm_head.weight)


SCRIPT = """
import sys
from pathlib import Path
from rbdc.models import streamed
from rbdc.jobs.measure import _status

a, b, wide, small, shard = sys.argv[1:]
streamed.couple_streamed(Path(small), Path(small), Path(wide + "-small"), allow_identical=True)
Path("/proc/self/clear_refs").write_text("5")
before = _status("VmRSS")
streamed.couple_streamed(Path(a), Path(b), Path(wide), shard_bytes=int(shard), allow_identical=True)
print(_status("VmHWM") - before)
"""


def test_memory_is_that_of_a_part_of_a_shard(tmp_path: Path) -> None:
    """Two models of 100 MB, coupled within 1.2 times the largest file; the small one warms up."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 32000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model: Any = rbdc.build("llama", **{**EXACT["llama"], **sizes, **heads})
    model.bfloat16().save_pretrained(tmp_path / "a")
    rbdc.build("llama", **EXACT["llama"]).save_pretrained(tmp_path / "small")  # type: ignore[operator]
    shard = 2 * 32000 * 2048
    paths = [str(tmp_path / name) for name in ("a", "a", "wide", "small")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *paths, str(shard)],
        env=os.environ | {"HOME": str(tmp_path)},  # what was remembered is not the user's
        capture_output=True,
        text=True,
        check=True,
    )
    largest = max(path.stat().st_size for path in (tmp_path / "wide").glob("*.safetensors"))
    assert largest < 1.01 * shard
    assert int(done.stdout) < 1.2 * largest


def _other_token(folder: Path) -> None:
    tokenizer(folder, {**VOCABULARY, "0": 1, "1": 0})


def _not_finite(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def _same(folder: Path) -> None:
    shutil.copyfile(folder.parent / "a" / "model.safetensors", folder / "model.safetensors")


def _changed(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | values
        (folder / "config.json").write_text(json.dumps(config))

    return change


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (_other_token, "tokenizer.json"),
        (_changed(vocab_size=97), "vocab_size is 96 in .* and 97"),
        (_changed(rms_norm_eps=1e-3), "rms_norm_eps"),
        (_changed(auto_map={"AutoModel": "x.Y"}), "trust_remote_code"),
        (_not_finite, "model.norm.weight of the second parent"),
        (_cut_off, "does not fit its size"),
        (_same, "same weights"),
    ],
)
def test_parents_that_do_not_fit_are_refused(
    damage: Callable[[Path], None], cause: str, tmp_path: Path
) -> None:
    _, (first, second) = written(tmp_path, "llama")
    damage(second)
    with pytest.raises((CouplingError, CheckpointError), match=cause):
        couple_folders(first, second, tmp_path / "wide")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a", "b"]  # nothing is left


def test_inexact_folders_are_refused(tmp_path: Path) -> None:
    for folder, seed in (("a", 1), ("b", 2)):
        model: Any = randomized(rbdc.build("qwen3", 0.5, **INEXACT["qwen3"][0]), seed)
        model.save_pretrained(tmp_path / folder)
    folders = tmp_path / "a", tmp_path / "b"
    with pytest.raises(CouplingError, match="q_norm"):
        couple_folders(*folders, tmp_path / "wide")
    record = couple_folders(*folders, tmp_path / "wide", allow_inexact=True)
    assert not record["coupling"]["exact"]
    assert spec_of(rbdc.load(tmp_path / "wide")).width == 2


def test_the_command_couples_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, folders = written(tmp_path, "gpt2")
    assert main(["couple", *map(str, folders), "--output", str(tmp_path / "wide")]) == 0
    said = capsys.readouterr().out
    assert "proof" in said and "AutoModelForCausalLM" in said
