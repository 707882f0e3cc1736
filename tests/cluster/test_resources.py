"""The CPUs and GPUs of each job, on clusters that are only described."""

from pathlib import Path
from typing import Any

import pytest

from rbdc.cluster.resources import JobResources, check_resources, fit, fitting, job_resources
from rbdc.errors import RunError
from rbdc.plan import Scaling
from rbdc.settings import Cluster
from tests.runs.test_run import small_tree


def _node(**resources: float) -> dict[str, Any]:
    return {"Resources": resources, "Alive": True}


def test_shares_by_level(folder: Path) -> None:
    prepared = small_tree(folder)  # four leaves, two models, the target
    jobs = {node.name: node.job for node in prepared.nodes}
    levels = {node.job.key: node.level for node in prepared.nodes}

    speeds: dict[int, Scaling] = {}

    def shares(nodes: list[dict[str, Any]], **asked: Any) -> dict[str, JobResources]:
        cluster = Cluster(engine="ray", **asked)
        found = job_resources(list(jobs.values()), levels, cluster, nodes, speeds)
        return {name: found[job.key] for name, job in jobs.items()}

    cores = shares([_node(CPU=8.0)])
    assert [cores[name].cpus for name in ("2.0", "1.0", "target")] == [2, 4, 8]
    spread = shares([_node(CPU=4.0), _node(CPU=4.0)])
    assert [spread[name].cpus for name in ("2.0", "1.0", "target")] == [2, 4, 4]
    gpus = shares([_node(CPU=64.0, GPU=8.0)], gpus_per_job=(8, 2, 1))
    assert gpus["target"] == JobResources(workers=8, cpus=1 / 8, gpus=1)
    assert gpus["1.0"].workers == 2 and gpus["2.3"] == JobResources(workers=1, cpus=1, gpus=1)
    assert gpus["coupling target"].workers == 1 and gpus["coupling target"].gpus == 1


def test_gpus_by_measured_speed(folder: Path) -> None:
    """Siblings side by side first, then each on several, as far as that is faster."""
    prepared = small_tree(folder)
    jobs = [node.job for node in prepared.nodes]
    levels = {node.job.key: node.level for node in prepared.nodes}
    names = {node.job.key: node.name for node in prepared.nodes}

    def gpus(nodes: list[dict[str, Any]], *, images_per_second: float, **others: Any) -> list[int]:
        speed = Scaling(
            **{
                "batch_size": 1024,
                "images_per_second": (images_per_second,),
                "gradient_bytes": (4_000_000,),
                **others,
            }
        )
        speeds = dict.fromkeys((0, 1, 2), speed)
        found = job_resources(jobs, levels, Cluster(engine="ray"), nodes, speeds)
        check_resources(nodes, {names[key]: share for key, share in found.items()})
        by_name = {names[key]: share for key, share in found.items()}
        chosen = [by_name[name] for name in ("2.0", "1.0", "target")]
        assert all(share.gpus == 1 for share in chosen)
        return [share.workers for share in chosen]

    eight, node = [_node(CPU=64.0, GPU=8.0)], _node(CPU=16.0, GPU=4.0)
    assert gpus(eight, images_per_second=500) == [2, 4, 8]
    assert gpus([node, node], images_per_second=500) == [2, 4, 8]
    assert gpus([_node(CPU=8.0, GPU=2.0)], images_per_second=500) == [1, 1, 2]
    # a step that is as short as steps can be gets no shorter
    assert gpus(eight, images_per_second=100_000) == [1, 1, 1]
    # 256 images of a step are all that one has room for
    assert gpus(eight, images_per_second=100_000, max_images_per_device=256) == [4, 4, 4]
    assert gpus([_node(CPU=1.0, GPU=1.0)], images_per_second=500, max_images_per_device=256) == [
        1,
        1,
        1,
    ]


def test_room(folder: Path) -> None:
    gone = {"Resources": {"CPU": 8.0}, "Alive": False}
    nodes = [_node(CPU=2.0, GPU=1.0), _node(CPU=2.0), gone]
    one = JobResources(workers=1, cpus=1, gpus=0)
    assert fit([one] * 4, nodes) and not fit([one] * 5, nodes)
    large = JobResources(workers=2, cpus=1, gpus=1)
    assert not fit([large], nodes)
    jobs = [node.job for node in small_tree(folder).nodes[:4]]
    shares = {job.key: share for job, share in zip(jobs, [one, one, large, one], strict=True)}
    assert fitting(jobs, shares, [], nodes) == jobs[:2]  # none is let past another
    assert fitting(jobs, shares, [one] * 3, nodes) == jobs[:1]
    assert fitting(jobs[2:], shares, [one], nodes) == []
    assert fitting(jobs[2:], shares, [], nodes) == jobs[2:3]  # whatever it is: Ray may know better


def test_shares_that_no_node_can_give() -> None:
    nodes = [_node(CPU=4.0, GPU=2.0), _node(CPU=4.0, GPU=2.0)]
    check_resources(nodes, {"it": JobResources(workers=4, cpus=2, gpus=1)})
    with pytest.raises(RunError, match="it needs 5 GPUs, and the cluster has 4"):
        check_resources(nodes, {"it": JobResources(workers=5, cpus=1, gpus=1)})
    with pytest.raises(RunError, match="1 workers with 6 CPUs each, and the nodes have"):
        check_resources(nodes, {"it": JobResources(workers=1, cpus=6, gpus=0)})
