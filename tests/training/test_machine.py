"""What is chosen by default on machines that are not here, and torch's switches for it."""

import json
import os
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rbdc.errors import RunError
from rbdc.experiments.train import prepare
from rbdc.jobs.job import Context, execute
from rbdc.jobs.store import Store
from rbdc.jobs.train import TrainJob
from rbdc.runs import request as runs
from rbdc.runs.run import Where, chosen_lines, settle
from rbdc.settings import Cluster, DetectionRecipe, Machine, Request
from rbdc.training import Start, World, choices, initial_weights, session
from rbdc.training import machine as reading
from rbdc.training.choices import (
    COMPILE_PAYS,
    COMPILE_SECONDS,
    MachineFacts,
    choice_lines,
    choose_compile,
    choose_machine,
    choose_precision,
    loader_workers,
    training_seconds,
)
from rbdc.training.machine import read_facts, set_backends, settled, usable_cores
from tests.support import (
    LANGUAGE,
    QUICK,
    TINY,
    data_for,
    forked,
    small_recipe,
    small_task,
    started,
    train,
)

GB = 1 << 30
AMPERE: dict[str, Any] = {
    "device": "cuda", "bfloat16": True, "tf32": True, "compiler": True, "gpus": 1,
}  # fmt: skip
FACTS = {
    "8 x H100": MachineFacts(
        **{**AMPERE, "gpus": 8}, name="NVIDIA H100", capability=(9, 0), gpu_bytes=80 * GB,
        cores=192, memory_bytes=2000 * GB, processes=8,
    ),
    "RTX 3090": MachineFacts(
        **AMPERE, name="NVIDIA GeForce RTX 3090", capability=(8, 6), gpu_bytes=24 * GB,
        cores=8, memory_bytes=32 * GB,
    ),
    "V100": MachineFacts(
        device="cuda", name="Tesla V100", capability=(7, 0), gpu_bytes=16 * GB, gpus=1,
        compiler=True, cores=12, memory_bytes=64 * GB,
    ),
    "GTX 1080": MachineFacts(
        device="cuda", name="GTX 1080", capability=(6, 1), gpus=1, cores=4, memory_bytes=8 * GB
    ),
    "CPU": MachineFacts(device="cpu", cores=2, memory_bytes=8 * GB, compiler=True),
    "Mac": MachineFacts(device="mps", cores=10, memory_bytes=16 * GB, platform="darwin"),
}  # fmt: skip
LONG = 1e20  # FLOPs of standard training of DeiT-Base: days on a GPU
#           amp, dtype, TF32, channels last, deterministic, compiled if long, workers
EXPECTED = {
    "8 x H100": (True, "bfloat16", True, True, False, True, 23),
    "RTX 3090": (True, "bfloat16", True, True, False, True, 7),
    "V100": (True, "float16", False, True, False, True, 11),
    "GTX 1080": (False, "bfloat16", False, True, False, False, 3),
    "CPU": (False, "bfloat16", False, True, True, False, 2),
    "Mac": (False, "bfloat16", False, False, False, False, 9),
}


@pytest.mark.parametrize("name", FACTS)
def test_what_each_machine_does_by_default(name: str) -> None:
    facts = FACTS[name]
    recipe, machine = choose_precision(small_recipe(), facts), choose_machine(Machine(), facts)
    assert (
        recipe.amp,
        recipe.amp_dtype,
        machine.tf32,
        machine.channels_last,
        machine.deterministic,
        choose_compile(machine, facts, LONG)[0],
        machine.workers,
    ) == EXPECTED[name]
    assert choose_machine(machine, FACTS["CPU"]) == machine  # what is chosen stays
    assert choose_precision(recipe, FACTS["8 x H100"]) == recipe
    assert choose_precision(DetectionRecipe(), facts).amp_dtype == EXPECTED[name][1]


@pytest.mark.parametrize("name", FACTS)
def test_what_the_user_gives_is_never_changed(name: str) -> None:
    facts = FACTS[name]
    given = Machine(
        workers=5, channels_last=False, deterministic=True, tf32=True, compile=True, device="cpu"
    )
    assert choose_machine(given, facts) == given
    assert choose_compile(given, facts, 0.0) == (True, "as asked")
    opposite = replace(given, channels_last=True, deterministic=False, tf32=False, compile=False)
    assert choose_machine(opposite, facts) == opposite
    assert choose_compile(opposite, facts, LONG) == (False, "as asked")
    for amp in (True, False):
        recipe = small_recipe(amp=amp, amp_dtype="float16")
        assert choose_precision(recipe, facts) == recipe
    assert choose_precision(small_recipe(amp=False), facts).amp_dtype == "bfloat16"


def test_compiled_is_what_is_long_enough() -> None:
    facts = FACTS["RTX 3090"]
    machine = choose_machine(Machine(), facts)
    flops = COMPILE_PAYS * COMPILE_SECONDS * LONG / training_seconds(facts, LONG)
    assert choose_compile(machine, facts, 1.01 * flops)[0]
    assert not choose_compile(machine, facts, 0.99 * flops)[0]
    assert not choose_compile(machine, facts, 1.01 * flops, processes=8)[0]  # eight times as fast
    assert training_seconds(FACTS["8 x H100"], LONG) < training_seconds(facts, LONG)
    future = replace(facts, capability=(12, 0))
    assert training_seconds(future, LONG) == training_seconds(FACTS["8 x H100"], LONG)


@pytest.mark.parametrize(
    ("settings", "facts", "reason"),
    [
        ({"deterministic": True}, {}, "deterministic"),
        ({"parallel": "fsdp"}, {}, "sharded"),
        ({}, {"compiler": False}, "Triton or a C compiler is missing"),
    ],
)
def test_why_a_long_training_is_not_compiled(
    settings: dict[str, Any], facts: dict[str, Any], reason: str
) -> None:
    here = replace(FACTS["8 x H100"], **facts)
    machine = choose_machine(Machine(**settings), here)
    assert choose_compile(machine, here, 1e3 * LONG, processes=8) == (False, reason)


def test_workers_share_cores_and_memory() -> None:
    one = FACTS["RTX 3090"]
    assert loader_workers(replace(one, processes=4)) == 1  # two cores each, one for the GPU
    assert loader_workers(replace(one, cores=1)) == 1  # a GPU always has one
    assert loader_workers(replace(one, memory_bytes=3 * GB)) == 3
    assert loader_workers(replace(one, memory_bytes=0)) == 7  # unknown
    assert loader_workers(replace(FACTS["CPU"], cores=64)) == 2
    assert loader_workers(replace(FACTS["CPU"], cores=1)) == 1


def test_a_run_says_what_it_chose_and_why() -> None:
    gpu, cpu = FACTS["RTX 3090"], FACTS["CPU"]
    machine = choose_machine(Machine(), gpu)
    lines = choice_lines(machine, gpu, "bfloat16", [3e18, 1e15, 1e15], workers=7)
    assert lines[0] == (
        "NVIDIA GeForce RTX 3090, 8 cores: bfloat16, TF32, channels last, compiled 1 of 3 models "
        "(est. 42 h), 7 data workers"
    )
    assert lines[1].startswith("--deterministic makes a resume bitwise equal")
    promised = replace(machine, deterministic=True)
    assert choice_lines(promised, gpu, "bfloat16", [3e18], workers=0) == [
        "NVIDIA GeForce RTX 3090, 8 cores: bfloat16, TF32, channels last, deterministic, "
        "not compiled (deterministic), no data workers"
    ]
    short = choice_lines(machine, gpu, "bfloat16", [1e15], workers=7)[0]
    assert "not compiled (est. 1 min, too short)" in short
    assert "not compiled (image sizes vary)" in choice_lines(machine, gpu, "x", [], workers=1)[0]
    assert choice_lines(choose_machine(Machine(), cpu), cpu, "float32", [LONG], workers=1) == [
        "cpu, 2 cores: float32, channels last, deterministic, 1 data worker"
    ]


def prepared(folder: Path, where: Where | None = None, **recipe: Any) -> Any:
    request = Request(
        model="resnet18d",
        model_kwargs=TINY["resnet18d"],
        data=str(folder),
        in_memory=True,
        epochs=2.0,
        baseline_epochs=4,
    )
    return prepare(request, small_recipe(**recipe), where)


def keys(training: Any) -> list[str]:
    return [node.job.key for node in training.nodes]


def test_precision_is_in_the_keys_and_a_cpu_s_keys_are_those_of_fp32(folder: Path) -> None:
    on_cpu = prepared(folder, Where(machine=QUICK))
    assert keys(on_cpu) == keys(prepared(folder, amp=False, amp_dtype="bfloat16"))
    on_gpu = prepared(folder, Where(facts=FACTS["RTX 3090"]))
    assert keys(on_gpu) == keys(prepared(folder, amp=True, amp_dtype="bfloat16"))
    older = prepared(folder, Where(facts=FACTS["V100"]))
    assert keys(older) == keys(prepared(folder, amp=True, amp_dtype="float16"))
    assert len({*keys(on_cpu), *keys(on_gpu), *keys(older)}) == 3 * len(keys(on_cpu))


def test_on_a_cluster_the_worker_s_device_decides(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def worker_facts(_cluster: Cluster, device: str) -> MachineFacts:
        asked.append(device)
        return FACTS["8 x H100"]

    monkeypatch.setattr(runs, "worker_facts", worker_facts)
    cluster = Cluster(engine="ray", address="head:6379")
    where = settle(Where(cluster=cluster))
    assert asked == ["auto"]
    assert settle(where) is where  # asked once
    assert where.machine.workers == 23
    training = prepared(folder, where)
    assert training.setting.recipe.amp
    assert training.run().request["amp_dtype"] == "bfloat16"
    assert "NVIDIA H100, 192 cores / 8 processes: bfloat16" in chosen_lines(
        training.run(), where
    )[0]  # fmt: skip
    job = training.nodes[0].job
    assert isinstance(job, TrainJob)
    assert job.task.recipe.amp
    # a device that the user names needs no worker, nor does a cluster on this machine
    assert settle(Where(cluster=cluster, machine=QUICK)).facts == read_facts("cpu")
    assert settle(Where(cluster=Cluster(engine="ray"))).facts == read_facts("auto")
    assert asked == ["auto"]


def test_this_machine_is_described_and_processes_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    read_facts.cache_clear()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    facts = settle(Where(machine=Machine(device="cpu"), jobs=3)).facts
    read_facts.cache_clear()
    assert facts is not None
    assert facts.processes == 6
    assert facts.device == "cpu"
    assert facts.cores == usable_cores() >= 1
    assert facts.memory_bytes > GB // 4
    assert asdict(facts)["platform"] == sys.platform
    with pytest.raises(RunError, match="the device 'abacus' cannot be used"):
        read_facts("abacus")


@pytest.mark.parametrize(("content", "cores"), [("150000 100000\n", 2), ("max 100000\n", 16)])
def test_a_container_s_quota_limits_the_cores(
    content: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(content)
    monkeypatch.setattr(reading, "CPU_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(reading.os, "sched_getaffinity", lambda _pid: set(range(16)), raising=False)
    monkeypatch.setattr(reading.sys, "platform", "linux")
    assert usable_cores() == cores
    monkeypatch.setattr(reading, "CPU_QUOTA", tmp_path / "none")
    assert usable_cores() == 16


def test_whether_to_compile_is_decided_for_each_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "read_facts", lambda _device: FACTS["RTX 3090"])
    assert settled(Machine()).compile is None
    assert settled(Machine(), LONG).compile is True
    assert settled(Machine(), 1e12).compile is False
    assert settled(Machine(compile=False), LONG).compile is False


def test_a_job_does_what_was_chosen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is this CPU; the choices are those of a GPU."""
    compiled: list[Any] = []
    switches: list[tuple[Machine, str, bool]] = []

    def fake_compile(model: Any, *, dynamic: bool) -> Any:
        compiled.append((model, dynamic))
        return model

    def fake_switches(machine: Machine, device: str, *, fixed_shapes: bool) -> None:
        switches.append((machine, device, fixed_shapes))

    for module in (reading, session):
        monkeypatch.setattr(module, "read_facts", lambda _device: FACTS["RTX 3090"])
    monkeypatch.setattr(session, "set_backends", fake_switches)
    monkeypatch.setattr(torch, "compile", fake_compile)
    job = prepared(folder, Where(machine=QUICK)).nodes[0].job
    for seconds, count in ((COMPILE_SECONDS, 0), (0.0, 1)):
        monkeypatch.setattr(choices, "COMPILE_SECONDS", seconds)
        context = Context(store=Store(tmp_path / str(count)), machine=QUICK, world=World())
        execute(job, context, observe=lambda _progress: None, stopped=lambda: False)
        assert len(compiled) == count
    assert compiled[0][1] is False
    machine, device, fixed_shapes = switches[-1]
    assert (machine.tf32, machine.deterministic, device, fixed_shapes) == (
        True, False, "cuda", True,
    )  # fmt: skip


def test_run_json_has_the_machine_and_what_was_chosen(folder: Path, tmp_path: Path) -> None:
    started(prepared(folder, Where(machine=QUICK)), tmp_path / "run")
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["machine"]["deterministic"] is True
    assert record["machine"]["channels_last"] is True
    assert record["device"]["device"] == "cpu"
    assert record["device"]["cores"] == usable_cores()
    (line,) = record["device"]["chosen"]
    assert line.endswith("float32, channels last, deterministic, no data workers")
    assert record["request"]["amp"] is False


def _switch() -> None:
    def seen() -> tuple[Any, ...]:
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.benchmark,
            # what inductor reads: if only the newer names were set, this would raise
            torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.allow_tf32,
            torch.get_float32_matmul_precision(),
        )

    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    before = seen()
    fast, exact = Machine(deterministic=False, tf32=True), Machine(deterministic=True, tf32=False)
    set_backends(fast, "cpu")
    assert seen() == before
    set_backends(fast, "cuda")
    assert seen() == (False, True, True, True, "high"), seen()
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    set_backends(fast, "cuda", fixed_shapes=False)
    assert seen()[1] is False
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    set_backends(exact, "cuda")
    assert seen() == (True, False, False, False, "highest"), seen()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_torch_s_switches_are_set_for_cuda_only() -> None:
    process = forked(_switch)  # they are global
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", LANGUAGE])
def test_recomputed_activations_give_the_same_bits(name: str, tmp_path: Path) -> None:
    data, calls = data_for(name), list[bool]()
    options: dict[str, Any] = {"drop_path": 0.2} if data.class_names else {"smoothing": 0.0}
    task = small_task(name, data, epochs=1, **options)
    trained = []
    for recompute in (False, True):
        start = initial_weights(task)
        block = next(m for m in start.model.modules() if isinstance(m, nn.LayerNorm))
        block.register_forward_hook(partial(_count, calls, recompute))
        (folder := tmp_path / str(recompute)).mkdir()
        machine = replace(QUICK, recompute=recompute)
        state = train(task, data, folder, start=partial(_same, start), machine=machine).state
        trained.append(state.saved()[0])
    assert calls.count(True) > 1.5 * calls.count(False)  # and it really recomputes
    for key, tensor in trained[0].items():
        assert torch.equal(tensor, trained[1][key]), key


def _same(start: Start) -> Start:
    return start


def _count(calls: list[bool], kind: bool, *_args: Any) -> None:
    calls.append(kind)


def test_batch_norms_are_not_recomputed(tmp_path: Path) -> None:
    data = data_for("resnet18d")
    task, machine = small_task("resnet18d", data), replace(QUICK, recompute=True)
    with pytest.raises(RunError, match="count each batch twice"):
        train(task, data, tmp_path, start=lambda: initial_weights(task), machine=machine)
