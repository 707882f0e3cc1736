"""Where jobs run: in this process and its children, or on a Ray cluster."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rbdc.settings.recipe import check_range, settle_types


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The engine that runs a tree's jobs, and what each of them may use.

    What is given by level has the target's number first; the last one is that of all narrower
    models too.
    """

    engine: Literal["local", "ray"] = "local"
    """what runs the jobs: this machine alone, or Ray"""
    address: str | None = None
    """HOST:PORT of the Ray cluster to join; without it, Ray is started on this machine"""
    gpus_per_job: tuple[float, ...] = ()
    """with Ray, GPUs of a model, by level, target first; by default what ends soonest,
    by the measured speed of one"""
    cpus_per_job: tuple[float, ...] = ()
    """with Ray, CPU cores of a model, by level; by default a level's models share them all"""
    workers_per_job: tuple[int, ...] = ()
    """with Ray, processes that train a model together, by level; by default one a GPU"""
    retries: int = 3
    """with Ray, how often a job whose worker or node is lost is started again"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __post_init__(self) -> None:
        for name in ("gpus_per_job", "cpus_per_job", "workers_per_job"):
            value = getattr(self, name)
            if isinstance(value, int | float):  # one number for all levels
                object.__setattr__(self, name, (value,))
        settle_types(self)
        check_range(self, ("gpus_per_job", "retries"), at_least=0)
        check_range(self, ("cpus_per_job",), above=0)
        check_range(self, ("workers_per_job",), at_least=1)
