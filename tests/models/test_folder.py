"""Models on disk: timm's layout out and in, weight files in, and no code from either."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import rbdc
from rbdc.coupling import class_names, set_class_names
from rbdc.errors import CheckpointError, CouplingError
from rbdc.models import couple_folders
from rbdc.models.build import timm_builds
from tests.support import SMALL, images, logits, parents

VIT = "deit_tiny_patch16_224"


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("name", [name for name in SMALL if name != "resnet18"])
def test_timm_loads_what_is_exported_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, _ = parents(name)
    folder = rbdc.export(model, tmp_path / "model")
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True)
    x = images(model)
    assert torch.equal(logits(loaded, x), logits(model, x))
    assert files(folder) == {"config.json", "model.safetensors", "rbdc.json"}
    assert files(tmp_path) == {"model"}


@pytest.mark.parametrize("name", list(SMALL))
def test_an_exported_model_comes_back_with_its_spec_and_classes(name: str, tmp_path: Path) -> None:
    model, _ = parents(name)
    set_class_names(model, ["e", "d", "c", "b", "a"])
    loaded: Any = rbdc.load(rbdc.export(model, tmp_path / "model"))
    assert rbdc.spec_of(loaded) == rbdc.spec_of(model)
    assert loaded.pretrained_cfg["label_names"] == ["e", "d", "c", "b", "a"]
    assert loaded.pretrained_cfg["input_size"] == model.pretrained_cfg["input_size"]
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert torch.equal(logits(loaded, images(model)), logits(model, images(model)))


@pytest.mark.parametrize("name", ["resnet18d", VIT])
def test_how_images_are_prepared_goes_along_and_nothing_of_timms_own_weights(
    name: str, tmp_path: Path
) -> None:
    model: Any = rbdc.build(name, **SMALL[name])
    prepared = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_pct": 1.0}
    model.pretrained_cfg.update(prepared, interpolation="bilinear")
    folder = rbdc.export(rbdc.load(rbdc.export(model, tmp_path / "first")), tmp_path / "second")
    record = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    assert {key: tuple(record[key]) for key in ("mean", "std")} | {"crop_pct": 1.0} == prepared
    assert record["crop_pct"] == 1.0 and record["interpolation"] == "bilinear"
    assert not {"tag", "license", "origin_url", "test_input_size"} & record.keys()


def test_a_folder_of_one_channel_with_timms_three_means_is_loaded(tmp_path: Path) -> None:
    arguments = {"num_classes": 3, "depth": 1, "in_chans": 1}
    model = timm.create_model(VIT, **arguments)
    timm.models.save_for_hf(model, tmp_path, model_args=arguments, safe_serialization=True)
    loaded: Any = rbdc.load(tmp_path)
    assert len(loaded.pretrained_cfg["mean"]) == len(loaded.pretrained_cfg["std"]) == 1


def test_a_folder_exported_by_timm_itself_is_loaded(tmp_path: Path) -> None:
    model = timm.create_model(VIT, num_classes=3, depth=1)
    timm.models.save_for_hf(
        model, tmp_path, model_args={"depth": 1, "num_classes": 3}, safe_serialization=True
    )
    loaded: Any = rbdc.load(tmp_path)
    assert loaded.num_classes == 3 and loaded.embed_dim == 192
    assert torch.equal(loaded.head.weight, model.head.weight)


def test_a_folder_with_pickled_weights_is_loaded(tmp_path: Path) -> None:
    model = timm.create_model("resnet18", num_classes=3)
    timm.models.save_for_hf(model, tmp_path / "m", model_args={"num_classes": 3})
    assert "pytorch_model.bin" in files(tmp_path / "m")
    loaded: Any = rbdc.load(tmp_path / "m")
    assert torch.equal(loaded.fc.weight, model.fc.weight)


def test_of_a_training_checkpoint_the_averaged_weights_are_taken_as_timm_does(
    tmp_path: Path,
) -> None:
    raw, averaged = parents(VIT)
    path = tmp_path / "last.pth.tar"
    torch.save({"state_dict": raw.state_dict(), "state_dict_ema": averaged.state_dict()}, path)
    options: dict[str, Any] = {"model": VIT, "arguments": SMALL[VIT]}
    default: Any = rbdc.load(path, **options)
    chosen: Any = rbdc.load(path, **options, use_ema=False)
    assert torch.equal(default.head.weight, averaged.head.weight)
    assert torch.equal(chosen.head.weight, raw.head.weight)


def test_a_folder_and_a_file_are_coupled(tmp_path: Path) -> None:
    first, second = parents(VIT)
    a, b = rbdc.export(first, tmp_path / "a"), tmp_path / "b.safetensors"
    save_file(second.state_dict(), b)
    record = couple_folders(a, b, tmp_path / "wide", model=VIT, arguments=SMALL[VIT])
    assert record["coupling"]["exact"] and record["timm_loads"]
    with pytest.raises(CheckpointError, match="are folders, which already name"):
        couple_folders(a, tmp_path / "wide", tmp_path / "x", model=VIT)


def test_a_wide_model_takes_images_as_its_parents_did(tmp_path: Path) -> None:
    first, second = parents(VIT)
    for model, name in ((first, "a"), (second, "b")):
        model.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "crop_pct": 1.0}
        rbdc.export(model, tmp_path / name)
    couple_folders(tmp_path / "a", tmp_path / "b", tmp_path / "wide")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())["pretrained_cfg"]
    assert config["mean"] == [0.1, 0.2, 0.3] and config["crop_pct"] == 1.0
    second.pretrained_cfg |= {"mean": (0.1, 0.2, 0.4)}
    rbdc.export(second, tmp_path / "c")
    with pytest.raises(CouplingError, match="preprocess images differently: mean is"):
        couple_folders(tmp_path / "a", tmp_path / "c", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_timms_transform_fits_a_model_of_one_channel(tmp_path: Path) -> None:
    model = rbdc.build(VIT, **(SMALL[VIT] | {"in_chans": 1}))
    rbdc.export(model, tmp_path / "m")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'm'}", pretrained=True)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(loaded))
    assert transform(Image.new("L", (40, 40))).shape == (1, 16, 16)


def test_an_existing_folder_is_replaced_only_by_force_and_only_a_model(tmp_path: Path) -> None:
    first, second = parents(VIT)
    folder = rbdc.export(first, tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        rbdc.export(second, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    rbdc.export(second, folder, force=True)
    assert (folder / "model.safetensors").read_bytes() != before
    assert files(tmp_path) == {"model"}
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="contains more than an exported model"):
        rbdc.export(second, thesis, force=True)
    rbdc.export(first, project := tmp_path / "project")
    (project / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="contains more than an exported model"):
        rbdc.export(second, project, force=True)
    assert files(thesis) == {"thesis.tex"} and "thesis.tex" in files(project)


def test_a_parent_is_never_overwritten_by_its_child(tmp_path: Path) -> None:
    first, second = parents(VIT)
    a, b = rbdc.export(first, tmp_path / "up" / "a"), rbdc.export(second, tmp_path / "up" / "b")
    (tmp_path / "link").symlink_to(a)
    for output in (a, b, tmp_path / "link", a / "wide", tmp_path / "up"):
        with pytest.raises(CheckpointError):
            couple_folders(a, b, output, force=True)
    assert files(a) == files(b) == {"config.json", "model.safetensors", "rbdc.json"}


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    first, second = parents(VIT)
    real = rbdc.export(first, tmp_path / "real")
    (tmp_path / "link").symlink_to(real)
    rbdc.export(second, tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink() and files(tmp_path) == {"real", "link"}
    assert torch.equal(rbdc.load(real).head.weight, second.head.weight)  # type: ignore[arg-type, union-attr]


def test_a_model_changed_since_it_was_built_is_not_exported_as_what_it_was(tmp_path: Path) -> None:
    model, _ = parents(VIT)
    model.reset_classifier(9)
    with pytest.raises(CheckpointError, match=r"head.weight is \(9, 16\) in the model"):
        rbdc.export(model, tmp_path / "model")
    model, _ = parents(VIT)
    set_class_names(model, ["a", "b"])
    with pytest.raises(CheckpointError, match="5 classes and 2 class names"):
        rbdc.export(model, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_model_in_channels_last_is_exported(tmp_path: Path) -> None:
    model, _ = parents("resnet18d")
    model.to(memory_format=torch.channels_last)
    loaded: Any = rbdc.load(rbdc.export(model, tmp_path / "model"))
    assert torch.equal(loaded.conv1[0].weight, model.conv1[0].weight)
    assert model.conv1[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_only_rbdc_loads_a_plain_stem_that_timm_cannot_build(tmp_path: Path) -> None:
    model, _ = parents("resnet18")
    folder = rbdc.export(model, tmp_path / "model")
    assert not timm_builds(rbdc.spec_of(model)) and timm_builds(rbdc.spec_of(model).scaled(2))
    # timm finds it out in the state dict, newer versions at the stem itself
    with pytest.raises((RuntimeError, AttributeError), match=r"conv1|Sequential.*weight"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)
    assert torch.equal(rbdc.load(folder).conv1.weight, model.conv1.weight)  # type: ignore[arg-type, union-attr]


def test_class_names_as_a_mapping_are_read_in_order(tmp_path: Path) -> None:
    folder = rbdc.export(parents(VIT)[0], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["label_names"] = {str(i): name for i, name in reversed(list(enumerate("abcde")))}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json does not have the checksum"):
        rbdc.load(folder)
    (folder / "rbdc.json").unlink()  # a folder of timm's
    assert class_names(rbdc.load(folder)) == ("a", "b", "c", "d", "e")


def test_a_write_that_fails_leaves_nothing_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = parents(VIT)
    folder = rbdc.export(first, tmp_path / "model")
    before = (folder / "model.safetensors").read_bytes()

    def full_disk(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            rbdc.export(second, folder, force=True)
    assert (folder / "model.safetensors").read_bytes() == before
    assert files(tmp_path) == {"model"}

    rename = Path.rename

    def second_rename_fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", second_rename_fails)
        with pytest.raises(OSError, match="Input/output error"):
            rbdc.export(second, folder, force=True)
    assert (folder / "model.safetensors").read_bytes() == before
    assert files(tmp_path) == {"model"}


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = rbdc.export(parents(VIT)[0], tmp_path / "model")
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="does not have the checksum"):
        rbdc.load(folder)


@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_weight_files_are_coupled_with_width_and_classes_read_off_them(
    name: str, suffix: str, tmp_path: Path
) -> None:
    models = parents(name)
    a, b = (tmp_path / f"{side}.{suffix}" for side in "ab")
    for path, model in zip((a, b), models, strict=True):
        if suffix == "pth":
            torch.save({"model": model.state_dict(), "epoch": 3}, path)
        else:
            save_file(model.state_dict(), path)
    arguments = {key: value for key, value in SMALL[name].items() if key != "num_classes"}
    record = couple_folders(a, b, tmp_path / "wide", model=name, arguments=arguments)
    assert record["spec"]["width"] == 1.0
    assert record["coupling"]["proof_error"] <= 1e-5
    wide = timm.create_model(f"local-dir:{tmp_path / 'wide'}", pretrained=True)
    kept = json.loads((tmp_path / "wide" / "rbdc.json").read_text())
    assert kept["coupling"] == record["coupling"]
    proof = rbdc.verify_coupling(*models, wide, images(models[0]))
    assert proof.holds


def test_a_malicious_pickle_is_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (canary,))

    pickle.loads(pickle.dumps(Attack()))
    assert canary.exists()  # the attack works where pickles are trusted
    canary.unlink()
    for name in ("evil.pth", "evil.safetensors", "evil.bin"):
        (tmp_path / name).write_bytes(pickle.dumps({"head.weight": Attack()}, protocol=2))
        with pytest.raises(CheckpointError, match="cannot be read as weights"):
            rbdc.load(tmp_path / name, model=VIT)
    torch.save({"head.weight": Attack()}, tmp_path / "zipped.pth")
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        rbdc.load(tmp_path / "zipped.pth", model=VIT)
    assert not canary.exists()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json does not exist"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read: "),
        (lambda f: (f / "config.json").write_text("[]"), "config.json is damaged: it is []"),
        (lambda f: (f / "rbdc.json").write_text('{"spec": "x"}'), "damaged: spec is 'x'"),
        (lambda f: (f / "rbdc.json").write_text('{"spec": {"nam": 1}}'), "lacks spec.name"),
        (
            lambda f: (f / "rbdc.json").unlink() or (f / "config.json").write_text("{}"),
            "config.json lacks architecture",
        ),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors does not exist"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "cannot be read as weights"),
        (lambda f: os.truncate(f / "model.safetensors", 1000), "cannot be read as weights"),
    ],
)
def test_a_damaged_folder_says_what_is_wrong(damage: Any, expected: str, tmp_path: Path) -> None:
    folder = rbdc.export(parents(VIT)[0], tmp_path / "model")
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        rbdc.load(folder)
    assert expected in caught.value.problem


@pytest.mark.parametrize("content", [[1, 2], None, torch.ones(2), {"model": None}, {1: 2}, {}])
def test_a_pickle_without_a_state_dict_says_so(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=r"cannot be read as weights|contains no state dict"):
        rbdc.load(tmp_path / "weights.pth", model=VIT)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_weights_that_are_no_weights_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {name: t.to(dtype) for name, t in parents(VIT)[0].state_dict().items()}
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match="cls_token has dtype torch"):
        rbdc.load(tmp_path / "w.pth", model=VIT, arguments=SMALL[VIT])


def test_weights_that_do_not_fit_name_the_tensor_and_both_shapes(tmp_path: Path) -> None:
    folder = rbdc.export(parents(VIT)[0], tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    path = tmp_path / "w.safetensors"
    save_file(state | {"pos_embed": torch.zeros(1, 3, 16)}, path)
    with pytest.raises(CheckpointError) as caught:
        rbdc.load(path, model=VIT, arguments=SMALL[VIT])
    assert "pos_embed is (1, 3, 16)" in caught.value.problem
    with pytest.raises(CheckpointError, match="not the name of their model"):
        rbdc.load(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        rbdc.load(tmp_path / "nowhere")


def test_a_coupling_that_is_not_exact_is_not_written_unless_allowed(tmp_path: Path) -> None:
    arguments = SMALL[VIT] | {"qk_norm": True}  # norms over the head dimension: shared weights
    first, second = parents(VIT, **arguments)
    a, b = rbdc.export(first, tmp_path / "a"), rbdc.export(second, tmp_path / "b")
    with pytest.raises(rbdc.RbdcError, match="both branches share it"):
        couple_folders(a, b, tmp_path / "wide")
    assert files(tmp_path) == {"a", "b"}
    record = couple_folders(a, b, tmp_path / "wide", allow_inexact=True)
    assert record["coupling"]["proof_error"] > 1e-5
