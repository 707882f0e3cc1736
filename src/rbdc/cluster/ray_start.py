"""Start or join a Ray cluster, and check its nodes.

`probe_node`, which runs on the nodes, needs nothing but the standard library.
"""

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rbdc.errors import RunError, not_installed

ANSWER_SECONDS = 20  # timeout of an address
NODE_SECONDS = 180  # timeout for a process to start on a node, which may be busy
STORE_BYTES = 80 << 20  # the smallest size that Ray allows
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
# With the first variable set to 0, Ray binds 127.0.0.1 only; otherwise it listens on the network,
# whatever address it is given. The token keeps other users of this machine out.
_PRIVATE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}


@contextmanager
def ray_started(address: str | None, memory: int = 0) -> Iterator[Any]:
    """Connect to the cluster at `address`, and yield the `ray` module.

    Without an address, start a private cluster on this machine that ends with the context. An
    existing connection is used. `memory` is the size in bytes of what will be put into the object
    store.
    """
    imported = sys.modules.get("ray")
    if imported is not None and imported.is_initialized():
        yield imported
        return
    if importlib.util.find_spec("ray") is None:
        raise not_installed("ray", "ray", RunError)
    if address:
        _check_address(address)
    elif imported and _PRIVATE.items() - os.environ.items():
        raise RunError(  # Ray reads these variables when it is imported
            "ray was imported before it could be restricted to this machine",
            "Leave the import out, or call ray.init yourself.",
        )
    else:
        os.environ |= _PRIVATE
        # Without a token in the environment, Ray writes one to a file.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = importlib.import_module("ray")
    with tempfile.TemporaryDirectory(prefix="rbdc-ray-", ignore_cleanup_errors=True) as folder:
        private = {
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": folder,
            "object_store_memory": STORE_BYTES + 2 * memory,
            "include_dashboard": False,
        }
        try:
            ray.init(address or "local", **({} if address else private), **_QUIET)
            yield ray
        finally:
            ray.shutdown()


def _check_address(address: str) -> None:
    """Check an address by joining from a separate process first.

    If no Ray cluster answers, Ray waits for minutes and may end the process.
    """
    until = time.monotonic() + ANSWER_SECONDS
    host, colon, port = address.rpartition(":")
    if address != "auto" and (not (host and colon and port.isdigit()) or "/" in host):
        raise RunError(
            f"the address is {address!r}, expected HOST:PORT",
            "Give the one that `ray start --head` prints, on a machine of the cluster.",
        )
    command = [sys.executable, "-c", f"import ray; ray.init({address!r}, **{_QUIET!r})"]
    try:
        if address != "auto":
            socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS / 2).close()
        left = until - time.monotonic()
        subprocess.run(command, capture_output=True, text=True, timeout=left, check=True)
    except subprocess.TimeoutExpired:
        reason = f"no answer within {ANSWER_SECONDS} s"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[-1]
    except (OSError, OverflowError) as error:
        reason = str(error)
    else:
        return
    raise RunError(
        f"no Ray cluster can be joined at {address}: {reason}",
        "Start one with `ray start --head`, and run this on one of its machines, with its token.",
    )


def check_nodes(ray: Any, store: Path) -> list[dict[str, Any]]:
    """Return the living nodes. Refuse one that cannot access the store or has other versions."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    ours = f".ray-{secrets.token_hex(8)}"
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    store.mkdir(parents=True, exist_ok=True)
    try:
        (store / ours).touch()
        asked = {
            ray.remote(probe_node)
            .options(num_cpus=0, max_retries=2, scheduling_strategy=affinity(node["NodeID"], False))
            .remote(str(store), ours, node["NodeID"]): node
            for node in nodes
        }
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=NODE_SECONDS)
        for ref, node in asked.items():
            _check_node(ray, node, ref if ref in done else None, store, ours)
    finally:
        for path in store.glob(f"{ours}*"):
            path.unlink(missing_ok=True)
    return nodes


def _check_node(ray: Any, node: Mapping[str, Any], answer: Any, store: Path, ours: str) -> None:
    where = f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"
    if answer is None:
        raise RunError(f"the node {where} does not answer", "Take it out of the cluster.")
    try:
        problem, there = ray.get(answer)
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise RunError(
            f"the node {where} cannot run anything: {reason}",
            "Install rbdc there, the same version as here.",
        ) from None
    if problem or not (store / f"{ours}-{node['NodeID']}").exists():
        raise RunError(
            f"the node {where} cannot access {store}" + (f": {problem}" if problem else ""),
            "Give an --output in a folder that every node can access at the same path.",
        )
    for name, here in versions().items():
        if there[name] != here:
            raise RunError(
                f"the node {where} has {name} {there[name]}, and here it is {here}",
                "Install the same versions everywhere.",
            )


def probe_node(store: str, ours: str, node: str) -> tuple[str, dict[str, str]]:
    """Return, on a node, why it cannot read or write the store, or "", and its versions."""
    error = ""
    try:
        (Path(store) / ours).read_bytes()
        (Path(store) / f"{ours}-{node}").touch()
    except OSError as problem:
        error = str(problem)
    return error, versions()


def versions() -> dict[str, str]:
    """Return the versions of everything that must be the same on all machines."""
    found = {"Python": sys.version.split()[0]}
    for name in ("rbdc", "torch", "timm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
