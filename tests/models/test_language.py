"""Language models couple exactly, tied or not, and transformers loads what is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rbdc
from rbdc.coupling import couple_moments, example_for
from rbdc.errors import CheckpointError, CouplingError, ModelError, WidthError
from rbdc.models import ModelSpec, as_spec, halves_structure, spec_of
from rbdc.models.coupled import couple_verified
from rbdc.models.explain import explain
from tests.models.small_language import EXACT, INEXACT, REFUSED
from tests.support import randomized

transformers = pytest.importorskip("transformers")
EVERY = [(name, tied) for name in EXACT for tied in (False, True) if (name, tied) != ("olmo", True)]
TOKENS = torch.randint(96, (2, 12), generator=torch.Generator().manual_seed(3))


def made(name: str, width: float, seed: int, **arguments: Any) -> Any:
    return randomized(rbdc.build(name, width, **{**EXACT[name], **arguments}), seed)


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(tokens, use_cache=False).logits
    return result


def coupled(first: nn.Module, second: nn.Module, **options: Any) -> tuple[Any, dict[str, Any]]:
    return couple_verified(first, second, spec_of(first).scaled(2), "zero", **options)


@pytest.mark.parametrize(("name", "tied"), EVERY)
def test_a_coupled_language_model_is_the_mean_of_its_parents(name: str, tied: bool) -> None:
    first, second = (made(name, 0.5, seed, tie_word_embeddings=tied) for seed in (1, 2))
    _, proof = coupled(first, second)
    assert proof["exact"] and proof["proof_error"] < 1e-5
    assert proof["norm_drift"] > 0
    twice, _ = coupled(first, first, allow_identical=True)  # joint norms change nothing here
    torch.testing.assert_close(logits(twice), logits(first), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_key_value_heads_stay_with_their_query_heads(groups: int, tied: bool) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2 * groups, "head_dim": 16}
    first, second = (made("llama", 0.5, seed, **heads, tie_word_embeddings=tied) for seed in (1, 2))
    assert coupled(first, second)[1]["proof_error"] < 1e-5
    with pytest.raises(WidthError, match="num_key_value_heads is 1"):
        rbdc.build("llama", 0.5, **{**EXACT["llama"], "num_key_value_heads": 1})


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bfloat16_weights_are_halved_without_rounding(name: str) -> None:
    parents = [made(name, 0.5, seed, tie_word_embeddings=True).bfloat16() for seed in (1, 2)]
    spec = spec_of(parents[0]).scaled(2)
    wide = rbdc.build(spec).bfloat16()
    structure = halves_structure(spec)
    rbdc.couple(*parents, into=wide, structure=structure)
    exact = rbdc.build(spec)
    rbdc.couple(*(p.float() for p in parents), into=exact, structure=structure)
    for name, tensor in exact.state_dict().items():
        assert torch.equal(wide.state_dict()[name].float(), tensor)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_a_coupled_model(name: str, tied: bool, tmp_path: Path) -> None:
    first, second = (made(name, 0.5, seed, tie_word_embeddings=tied) for seed in (1, 2))
    wide, _ = coupled(first, second)
    rbdc.export(wide, tmp_path / "wide")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert torch.equal(logits(theirs), logits(wide))
    assert theirs.generate(TOKENS, max_new_tokens=3, do_sample=False).shape == (2, 15)
    ours = rbdc.load(tmp_path / "wide")
    assert torch.equal(logits(ours), logits(wide)) and spec_of(ours) == spec_of(wide)
    (tmp_path / "wide" / "rbdc.json").unlink()  # as if transformers had written it
    assert torch.equal(logits(rbdc.load(tmp_path / "wide")), logits(wide))


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_tied_tensors_stay_one_tensor(name: str, tmp_path: Path) -> None:
    rbdc.export(made(name, 1.0, 1, tie_word_embeddings=True), tmp_path / "a")
    loaded: Any = rbdc.load(tmp_path / "a")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


@pytest.mark.parametrize("name", INEXACT)
def test_inexact_architectures_are_refused_with_the_cause(name: str) -> None:
    arguments, cause = INEXACT[name]
    first, second = (randomized(rbdc.build(name, 0.5, **arguments), seed) for seed in (1, 2))
    with pytest.raises(CouplingError, match="would not be exact") as refused:
        coupled(first, second)
    assert cause in str(refused.value)
    _, proof = coupled(first, second, allow_inexact=True)
    assert not proof["exact"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_coupled_is_refused_by_name(name: str) -> None:
    arguments, cause = REFUSED[name]
    first, second = (randomized(rbdc.build(name, 0.5, **arguments), seed) for seed in (1, 2))
    with pytest.raises(CouplingError, match=cause):
        coupled(first, second, allow_inexact=True)


@pytest.mark.parametrize(("name", "tied"), [("llama", True), ("gemma", True), ("gpt2", False)])
def test_moments_are_coupled_as_gradients_are(name: str, tied: bool) -> None:
    parent = made(name, 0.5, 1, tie_word_embeddings=tied).double()
    wide = rbdc.build(spec_of(parent).scaled(2)).double()
    structure = halves_structure(spec_of(wide))
    rbdc.couple(parent, parent, into=wide, structure=structure, allow_identical=True)
    for model in (parent, wide):
        model.eval()(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    gradients = {f"{k}/exp_avg": p.grad for k, p in parent.named_parameters()}
    expected = couple_moments(gradients, gradients, structure.layout)
    for key, parameter in wide.named_parameters():
        axes = structure.layout[key]
        assert parameter.grad is not None
        for branch in (0, 1):  # off-diagonal blocks have no past
            ours = axes.branch_of(expected[f"{key}/exp_avg"], branch)
            torch.testing.assert_close(
                axes.branch_of(parameter.grad, branch), ours, atol=1e-6, rtol=1e-4, msg=key
            )


def test_a_folder_names_its_model(tmp_path: Path) -> None:
    model = made("llama", 1.0, 1)
    model.save_pretrained(tmp_path)
    spec = as_spec(str(tmp_path), 0.5)
    assert spec.name == "llama" and spec.width == 0.5
    narrow: Any = rbdc.build(spec)
    assert narrow.config.hidden_size == 32 and narrow.config.num_hidden_layers == 2
    assert as_spec(str(tmp_path), num_hidden_layers=1).arguments["num_hidden_layers"] == 1


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"auto_map": {"AutoModel": "x--y.Z"}}, "trust_remote_code"),
        ({"model_type": "unheard"}, "unheard"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"hidden_size": 10**7}, "hidden_size"),
    ],
)
def test_folders_that_cannot_be_used_are_refused(
    change: dict[str, Any], cause: str, tmp_path: Path
) -> None:
    made("llama", 1.0, 1).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((CheckpointError, ModelError), match=cause):
        rbdc.load(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    model = made("llama", 1.0, 1)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert torch.equal(logits(rbdc.load(tmp_path)), logits(model))
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        rbdc.load(tmp_path)


def test_unknown_fields_and_long_sequences_are_refused() -> None:
    with pytest.raises(ModelError, match=r"hiden_size(.|\n)*hidden_size"):
        rbdc.build("llama", hiden_size=64)
    with pytest.raises(ModelError, match="1 to 64 tokens"):
        rbdc.build("llama", **EXACT["llama"], sequence_length=65)
    with pytest.raises(ModelError, match="vocab_size"):
        explain(ModelSpec(name="llama", arguments={**EXACT["llama"], "vocab_size": [16]}))


def test_the_example_is_a_sequence_of_tokens() -> None:
    tokens = example_for(rbdc.build("llama", **EXACT["llama"]))["input_ids"]
    assert tokens.shape == (1, 16) and int(tokens.max()) < 96
