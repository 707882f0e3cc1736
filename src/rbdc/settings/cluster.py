"""Where the jobs of a run are executed: on this machine, or on a Ray cluster."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from rbdc.settings.schema import Amount, Count, Positive, Settings, Several, Whole, settings


def _by_level(value: Any) -> Any:
    """Let a single number stand for every level."""
    return (value,) if isinstance(value, int | float) else value


@settings
class Cluster(Settings):
    """The engine that runs the jobs, and the resources of each job.

    Resources per level are listed from the target down. The last number given also applies to all
    narrower models.
    """

    engine: Literal["local", "ray"] = "local"
    """what runs the jobs: processes on this machine, or Ray"""
    address: str | None = None
    """HOST:PORT of the Ray cluster; by default Ray is started here"""
    gpus_per_job: Annotated[Several[Amount], BeforeValidator(_by_level)] = ()
    """Ray: GPUs per model, one number or one per level, target first; default: the number that
    finishes first, from the measured speed of one GPU"""
    cpus_per_job: Annotated[Several[Positive], BeforeValidator(_by_level)] = ()
    """Ray: CPU cores per model, one number or one per level, target first; default: an equal split
    of the cluster among the models of a level"""
    workers_per_job: Annotated[Several[Count], BeforeValidator(_by_level)] = ()
    """Ray: processes that train one model together, one number or one per level, target first;
    default: one per GPU"""
    retries: Whole = 3
    """Ray: restarts of a job whose worker or node is lost"""
