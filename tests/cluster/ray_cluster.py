"""A real Ray cluster of several nodes on this machine, that listens to this machine only.

It lives in a network namespace of its own, where that is allowed. Its keeper is a process (this
file, run as a script) that starts nodes and ends them all when its standard input is closed, so
that nothing is left behind, however the tests end.
"""

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, Any

from tests.support import forked

NODE: dict[str, Any] = {
    "num_cpus": 1,
    "object_store_memory": 80 << 20,
    "node_ip_address": "127.0.0.1",
}
SYSTEM = {
    "idle_worker_killing_time_threshold_ms": 600_000,  # for the driver's next run
    "worker_niceness": 0,  # Ray's 15 lets tests beside these take the cores
    # a lost node is found out in seconds
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 5,
}
PR_SET_PDEATHSIG = 1
NEW_NAMESPACE = ["unshare", "--map-root-user", "--net"]


def _namespaces_work() -> bool:
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    tried = [*NEW_NAMESPACE, "--mount", "ip", "link", "set", "lo", "up"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


class RayCluster:
    """Two nodes with a CPU each, and more if asked for."""

    def __init__(self) -> None:
        self.isolated = _namespaces_work()
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: sockets lie in it
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # bind 127.0.0.1 only
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.folder),
        }
        paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.keeper = subprocess.Popen(
            [*(NEW_NAMESPACE if self.isolated else []), sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment, "PYTHONPATH": os.pathsep.join(paths)},
        )
        told = self._ask({"isolated": self.isolated})
        self.address: str = told["address"]
        self.raylets: list[int] = told["raylets"]

    def add(self) -> None:
        """One more node like the others."""
        self.raylets.append(self._ask({})["raylet"])

    def add_odd(self, *, hidden: Path, python_path: Path) -> None:
        """A node without CPUs that does not see what others do in a folder, and imports what they
        do not. It needs namespaces."""
        self._ask({"hidden": str(hidden), "python_path": str(python_path)})

    def remove_odd(self) -> None:
        self._ask({"remove": True})

    def start(self, target: Callable[..., None], *args: Any) -> ForkProcess:
        """A process inside, that does `target`: a copy of this one, so that it starts in no time.
        Nobody may have imported ray in this one."""
        assert "ray" not in sys.modules
        return forked(self._enter, target, *args)

    def worker(self, name: str) -> tuple[int, int] | None:
        """(process, its raylet) of the task whose name begins so, if it runs."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                title = (folder / "cmdline").read_bytes().decode(errors="replace")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
            if title.startswith(f"ray::{name}") and parent in self.raylets:
                return int(folder.name), parent
        return None

    def close(self) -> None:
        assert self.keeper.stdin and self.keeper.stdout
        self.keeper.stdin.close()
        self.keeper.wait()
        self.keeper.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self.keeper.stdin and self.keeper.stdout
        self.keeper.stdin.write(json.dumps(order) + "\n")
        self.keeper.stdin.flush()
        answer: dict[str, Any] = json.loads(self.keeper.stdout.readline())
        return answer

    def _enter(self, target: Callable[..., None], *args: Any) -> None:
        assert self.keeper.stdin
        os.close(self.keeper.stdin.fileno())  # only who started the keeper keeps it
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nothing is left if the tests are killed
        os.environ |= self.environment
        if self.isolated:
            until = time.monotonic() + 10
            # Only a process of one thread may enter; a pool's, told to end, may be still at it.
            while len(list(Path("/proc/self/task").iterdir())) > 1 and time.monotonic() < until:
                time.sleep(0.01)
            for kind in ("user", "net"):
                descriptor = os.open(f"/proc/{self.keeper.pid}/ns/{kind}", os.O_RDONLY)
                if libc.setns(descriptor, 0):
                    raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace")
        target(*args)


def keep() -> None:
    """Start nodes as asked for, a line each, until there is nobody to ask."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray prints is no answer
    order = json.loads(sys.stdin.readline())
    if order["isolated"]:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    others: list[subprocess.Popen[bytes]] = []
    try:
        head = cluster.add_node(**NODE, include_dashboard=False, _system_config=SYSTEM)
        raylets = [raylet(head), raylet(cluster.add_node(**NODE))]
        _say(answers, {"address": cluster.address, "raylets": raylets})
        for line in sys.stdin:
            order = json.loads(line)
            if not order:
                _say(answers, {"raylet": raylet(cluster.add_node(**NODE))})
            elif "remove" in order:
                _end(others.pop())
                _say(answers, {})
            else:
                others.append(_odd_node(cluster.address, **order))
                _say(answers, {})
    finally:
        for process in others:
            _end(process)
        cluster.shutdown()
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    process.wait()


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _odd_node(address: str, hidden: str, python_path: str) -> "subprocess.Popen[bytes]":
    import ray

    ray.init(address=address, log_to_driver=False)
    before = len([node for node in ray.nodes() if node["Alive"]])
    start = (
        f"mount -t tmpfs none '{hidden}' && exec {sys.executable} -m ray.scripts.scripts start "
        f"--address={address} --num-cpus=0 --num-gpus=0 --block "
        f"--object-store-memory={NODE['object_store_memory']}"
    )
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
    environment["PYTHONPATH"] += f":{python_path}"
    process = subprocess.Popen(["unshare", "--mount", "sh", "-c", start], env=environment)
    while len([node for node in ray.nodes() if node["Alive"]]) == before:
        if process.poll() is not None:
            raise RuntimeError("the node has ended")
        time.sleep(0.05)
    ray.shutdown()
    return process


def _say(answers: IO[str], what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


if __name__ == "__main__":
    keep()
