"""Model folders that somebody else wrote to do harm, and a watch that sees what they reach."""

import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
from safetensors.torch import save_file

from rbdc.cli import main

VIT = "deit_tiny_patch16_224"
PLAIN = {"img_size": 16, "patch_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2}
CLASSES = 10
ADDRESS = "http://127.0.0.1:{port}/weights.safetensors"


def arguments(canary: Path, port: int) -> dict[str, dict[str, Any]]:
    """`model_args` that load, reach out, name paths or addresses, or take all memory."""
    address = ADDRESS.format(port=port)
    source = {"url": address, "hf_hub_id": "attacker/model", "hf_hub_filename": "x.bin"}
    return {
        "pretrained": {"pretrained": True},
        "download to": {"pretrained": True, "cache_dir": str(canary), "pretrained_cfg": source},
        "overlay": {"pretrained": True, "pretrained_cfg_overlay": source},
        "file": {"pretrained": True, "pretrained_cfg_overlay": {"file": str(canary / "x.pth")}},
        "tag": {"pretrained_cfg": "in21k"},
        "checkpoint": {"checkpoint_path": str(canary / "x.pth")},
        "features": {"features_only": True},
        "device": {"device": "cuda"},
        "dtype": {"dtype": "float64"},
        "source arguments": {"pretrained_model_args": {"depth": 1}},
        "layer path": {"norm_layer": "/etc/passwd"},
        "layer address": {"act_layer": address},
        "layer nested": {"norm_layer": [[[[[[1]]]]]]},
        "layer object": {"norm_layer": {"__class__": "os.system"}},
        "layer long": {"norm_layer": "x" * 10_000},
        "depth": {"depth": 10**9},
        "depth within": {"depth": 2**16},
        "width": {"embed_dim": 10**12},
        "width within": {"embed_dim": 2**16, "num_heads": 1, "depth": 1000},
        "ratio": {"mlp_ratio": 1e300},
        "classes": {"num_classes": 10**12},
        "image": {"img_size": 10**9},
        "image within": {"img_size": 10**5},
        "image of three": {"img_size": [8, 8, 8]},
        "image text": {"img_size": "16"},
        "patch": {"patch_size": 0},
        "channels": {"in_chans": 0},
        "channels many": {"in_chans": 10**7},
        "digits": {"depth": 10**400},
        "not a number": {"mlp_ratio": float("nan")},
        "many": {f"depth{n}": n for n in range(10_000)},
        "text for a number": {"depth": "2"},
        "list for a number": {"depth": [2]},
        "negative": {"embed_dim": -16},
    }


NAMES = (
    "hf-hub:attacker/model", "hf_hub:attacker/model", "local-dir:{canary}", "attacker/model",
    "{address}", "../{vit}", "{canary}", "", "no_such_model", "{vit}\n", "x" * 100_000,
)  # fmt: skip
"""Architectures that are no plain names of timm's."""


def hostile_folders(root: Path, port: int) -> Iterator[Path]:
    """Make one folder after the other: hostile in config.json, then in rbdc.json."""
    canary = root / "canary"
    (canary / "model").mkdir(parents=True)
    (canary / "x.pth").write_bytes(pickle.dumps(Trap(str(canary / "pickled"))))
    (canary / "config.json").write_text(json.dumps({"architecture": VIT}))
    model = timm.create_model(VIT, **PLAIN, num_classes=CLASSES)
    save_file(model.state_dict(), canary / "model.safetensors")
    known = {"vit": VIT, "canary": canary, "address": ADDRESS.format(port=port)}
    described = [(VIT, {**PLAIN, **more}) for more in arguments(canary, port).values()]
    described += [(name.format(**known), PLAIN) for name in NAMES]
    for name, given in described:
        config: dict[str, Any] = {"architecture": name, "num_classes": CLASSES}
        yield _folder(root, {**config, "model_args": given})
        spec = {"name": name, "width": 1.0, "arguments": {"num_classes": CLASSES, **given}}
        yield _folder(root, {"architecture": VIT}, {"spec": spec})


def _folder(root: Path, config: dict[str, Any], record: dict[str, Any] | None = None) -> Path:
    folder = root / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "rbdc.json").unlink(missing_ok=True)
    if record:
        (folder / "rbdc.json").write_text(json.dumps(record))
    weights = folder / "model.safetensors"
    if not weights.exists():
        weights.hardlink_to(root / "canary" / "model.safetensors")
    return folder


class Trap:
    """Make a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


_REACHING = (
    "socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen",
    "os.system", "os.exec", "os.posix_spawn", "pickle.find_class", "ctypes.dlopen",
)  # fmt: skip
_WRITING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod")
_seen: list[str] | None = None  # while a watch is on
_allowed = ""


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _seen is None:
        return
    if event in _REACHING:
        _seen.append(f"{event} {args}")
        raise PermissionError(f"{event} is not allowed here")
    writes = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (writes or event in _WRITING) and isinstance(args[0], str):
        inside = Path(f"/proc/self/fd/{args[-1]}") if event != "open" and args[-1] >= 0 else None
        path = os.path.normpath((inside.readlink() if inside else Path.cwd()) / args[0])
        if not path.startswith((_allowed, "/dev/null")) and "__pycache__" not in path:
            _seen.append(f"{event} {path}")


sys.addaudithook(_audit)


@contextmanager
def watched(output: Path) -> Iterator[list[str]]:
    """Yield a list of all that reaches out, and of all that is written outside of `output`."""
    global _seen, _allowed
    seen: list[str] = []
    _seen, _allowed = seen, str(output)
    try:
        yield seen
    finally:
        _seen = None


def refusal(words: list[str], capsys: Any) -> list[str]:
    """Return the lines of the error with which a command ends; none if it succeeds."""
    code = main(words)
    lines = capsys.readouterr().err.splitlines()
    assert code in (0, 2), lines
    if code == 0:
        return []
    assert len(lines) == 2 and lines[0].startswith("error: "), lines
    return list(lines)
