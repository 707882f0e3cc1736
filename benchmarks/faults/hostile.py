"""Files that somebody else wrote to do harm, and requests to the page's server.

No file may be executed, reach out or write elsewhere: an audit hook sees it, names cannot be looked
up, a socket listens, and the folder beside is compared.
"""

import http.client
import json
import random
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import rbdc
from benchmarks.faults.child import in_child, said_by
from benchmarks.faults.matrix import Kind, Outcome, failed, refused, same
from benchmarks.faults.small import finished, fresh, words
from rbdc.data import open_data, open_text
from rbdc.errors import RbdcError
from rbdc.models import couple_folders, memory
from rbdc.report.page import read_state
from rbdc.report.serve import make_server
from tests import hostile_text
from tests.data.test_hostile_data import HOSTILE as HOSTILE_DATA
from tests.hostile import hostile_folders, watched
from tests.models.test_hostile import CALLS, COMMANDS
from tests.report.test_hostile_runs import BYTES, VALUES, places
from tests.support import change

FOLDERS = 90  # of tests/hostile.py
LINES = (
    "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nlr: [*b,*b,*b,*b,*b]",
    "!!python/object/apply:os.mkdir [{canary}/made]",
    "lr: !!python/name:os.system",
    "lr: {digits}",
    "epochs: 1.0e308",
    "batch_size: {digits}",
    "aa: {escape}",
    "opt: [[[[[[[[[[1]]]]]]]]]]",
    "model: hf-hub:attacker/model",
    "teacher: {canary}\ndistillation: hard",
    "data: http://127.0.0.1:{port}/x",
    "model_kwargs: {{pretrained: true, cache_dir: {canary}}}",
    "{deep}",
    "? [a]\n: b",
    "lr: 2001-01-01",
    "lr: .inf",
    "seed: -1",
)


def kinds() -> list[Kind]:
    """Return the kinds of this file."""
    made: dict[str, tuple[str, int, Callable[[int, random.Random, Path], str]]] = {
        "hostile-model": ("model folders, with each way to read one", 2 * FOLDERS, _model),
        "hostile-language": ("folders of language models, tokenizers", 120, _language),
        "hostile-run": ("run folders: any value or byte another", 220, _run),
        "hostile-data": ("data sets: shards, folders, tables, classes", 60, _data),
        "hostile-yaml": ("recipe files", 60, _yaml),
    }
    found = [
        Kind(name=name, text=text, cases=cases, attempt=partial(_attempt, make))
        for name, (text, cases, make) in made.items()
    ]
    return [*found, Kind(name="http", text="requests to report --serve", cases=60, attempt=_http)]


@cache
def _listener() -> socket.socket:
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    return server


def _attempt(
    use: Callable[[int, random.Random, Path], str], number: int, draw: random.Random
) -> Outcome:
    """Use a file in a child that is watched; compare what lies beside."""
    folder, server = fresh("hostile"), _listener()
    answer = in_child(lambda: {"refused": use(number, draw, folder)}, folder / "said")
    try:
        server.accept()
        return failed("it has connected")
    except BlockingIOError:
        pass
    if not isinstance(answer, dict):
        return failed(answer.story)
    made = {path.name for path in (folder / "canary").glob("*")}
    if made - {"config.json", "model", "model.safetensors", "x.pth"}:
        return failed(f"it has written {made}")
    shutil.rmtree(folder)
    return refused(answer["refused"]) if answer["refused"] else same()


def _quietly(folder: Path, act: Callable[[], object]) -> str:
    """Return the refusal of what is tried; raise if it reached out or wrote outside of `output`."""
    problem = ""
    with watched(folder / "output") as seen:
        try:
            act()
        except RbdcError as error:
            problem = error.problem
    if seen:
        raise AssertionError(f"it has done {seen[:3]}")
    return problem


def _command(folder: Path, given: list[str]) -> str:
    """Run a command so; return its refusal, and raise if it ends in another way."""
    ended = []
    _quietly(folder, lambda: ended.append(said_by(given)))
    if ended[0].code and not ended[0].refusal:
        raise AssertionError(ended[0].story)
    return ended[0].refusal


def _model(number: int, draw: random.Random, folder: Path) -> str:
    """Read a hostile folder in every way; from the second round on, one value of it is another."""
    made = next(islice(hostile_folders(folder, _port()), number % FOLDERS, None))
    if number >= FOLDERS:
        path = draw.choice(sorted(made.glob("*.json")))
        path.write_text(json.dumps(_with_another_value(json.loads(path.read_text()), draw)))
    output = folder / "output"
    problems = [_quietly(folder, partial(call, made, output / "wide")) for call in CALLS.values()]
    for name, command in COMMANDS.items():
        here = ["--device", "cpu", "--jobs", "1", "--dry-run"] if name != "couple" else []
        problems.append(_command(folder, [*command(made), "--output", str(output / "x"), *here]))
    return next(filter(None, problems), "")


def _language(number: int, draw: random.Random, folder: Path) -> str:
    """Couple and load a hostile folder, or use a hostile tokenizer; later, one value is another."""
    names, tokenizers = sorted(hostile_text.REFUSED), sorted(hostile_text.TOKENIZERS)
    number, again = number % (len(names) + len(tokenizers)), number >= len(names) + len(tokenizers)
    if number >= len(names):
        return _tokenizer(tokenizers[number - len(names)], draw if again else None, folder)
    made, other = (hostile_text.language_folder(folder / n, i) for i, n in enumerate("ab"))
    if again:
        path = made / hostile_text.CONFIG
        path.write_text(json.dumps(_with_another_value(json.loads(path.read_text()), draw)))
    else:
        hostile_text.REFUSED[names[number]](made)
    output = folder / "output"
    memory.FOLDER = output / "structures"
    calls: list[Callable[[], object]] = [
        partial(couple_folders, made, other, output / "wide"),
        partial(couple_folders, made, made, output / "wide"),
        partial(rbdc.load, made),
    ]
    problems = [_quietly(folder, call) for call in calls]
    problems.append(
        _command(folder, ["couple", str(other), str(made), "--output", str(output / "x")])
    )
    return next(filter(None, problems), "")


def _tokenizer(name: str, draw: random.Random | None, folder: Path) -> str:
    place, text = hostile_text.TOKENIZERS[name]
    if draw and len(text) > 1:
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice(("9", "{", '"', "-", "null", "é")) + text[at + 1 :]
    (folder / place).mkdir()
    (folder / place / "tokenizer.json").write_text(text)
    (folder / "text.txt").write_text("ab cd é " * 1000)
    text_file, tokenizer = str(folder / "text.txt"), str(folder / place)
    return _quietly(folder, lambda: open_text(text_file, length=8, tokenizer=tokenizer))


def _run(number: int, draw: random.Random, folder: Path) -> str:
    """Look at a run of which one file is another's, in every way."""
    run = Path(shutil.copytree(finished("memory"), folder / "run"))
    path = draw.choice(sorted(path for path in run.rglob("*.json*")))
    if number % 3 == 0:
        path.write_bytes(BYTES[draw.choice(sorted(BYTES))])
    elif path.suffix == ".json":
        content = json.loads(path.read_text())
        content.pop("checksum", None)
        changed = _with_another_value(content, draw)
        path.write_text("{}")
        change(path, **changed)
    else:
        path.write_bytes(bytes(draw.randbytes(1000)))
    output = folder / "output"
    problems = [
        _command(folder, ["status", str(run)]),
        _command(folder, ["doctor", str(run)]),
        _command(folder, ["export", str(run), "--output", str(output / "exported")]),
        _quietly(folder, lambda: json.dumps(read_state([run]), allow_nan=False)),
    ]
    return next(filter(None, problems), "")


def _with_another_value(content: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    *outer, last = draw.choice(list(places(content)) or [("a",)])
    inner: Any = content
    for key in outer:
        inner = inner[key]
    inner[last] = draw.choice(VALUES)
    return content


def _data(number: int, draw: random.Random, folder: Path) -> str:
    """Open a data set; from the second round on, random bytes of it are others."""
    names = sorted(HOSTILE_DATA)
    root = folder / "data"
    root.mkdir()
    root = HOSTILE_DATA[names[number % len(names)]][0](root)
    if number >= len(names):
        path = draw.choice(sorted(path for path in root.rglob("*") if path.is_file()))
        content = bytearray(path.read_bytes()) or bytearray(1)
        for _ in range(draw.choice((1, 10, 100))):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
    in_memory = names[number % len(names)].endswith("table") or draw.random() < 0.5
    return _quietly(folder, lambda: open_data(str(root), in_memory=in_memory))


def _yaml(number: int, draw: random.Random, folder: Path) -> str:
    (folder / "canary").mkdir()
    known = {
        "canary": folder / "canary", "port": _port(), "digits": "9" * 400, "deep": "[" * 5000,
        "escape": '"\\e]0;x\\a"',
    }  # fmt: skip
    text = LINES[number % len(LINES)].format(**known)
    if number >= len(LINES):
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice(("\x1b[2J", "\x00", "*a", ": ", "\n", "{", "é")) + text[at:]
    path = folder / "recipe.yaml"
    path.write_text(text)
    given = words("memory", folder / "output" / "run", "--dry-run", "--recipe", str(path))
    return _command(folder, given)


def _port() -> int:
    return int(_listener().getsockname()[1])


def _requests(draw: random.Random) -> Iterator[tuple[str, str, dict[str, str]]]:
    paths = ("/", "/state.json", "/../run.json", "//etc/passwd", "/%2e%2e/", "/" + "x" * 70_000)
    hosts = ("127.0.0.1:1", "localhost:1", "evil.example", "", "\xe9", "127.0.0.1:1, x")
    for _ in range(5):
        method = draw.choice(("GET", "POST", "PUT", "HEAD", "X" * 100, "TRACE"))
        more = {"X" * n: "y" * n for n in range(1, draw.choice((1, 5, 150)))}
        yield method, draw.choice(paths), {"Host": draw.choice(hosts), **more}


def _http(number: int, draw: random.Random) -> Outcome:
    """Send requests to a server; it must refuse all but the page, and go on serving."""
    folder = fresh("http")
    answer = in_child(lambda: {"refused": _serve(draw)}, folder / "said")
    if not isinstance(answer, dict) or (folder / "said").read_text():
        said = (folder / "said").read_text()
        return failed(said[-400:] if isinstance(answer, dict) else answer.story)
    return refused(f"{answer['refused']} of 5 requests, case {number}")


def _serve(draw: random.Random) -> int:
    codes = []
    with make_server([finished("memory")]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = int(server.server_address[1])
        for method, path, headers in _requests(draw):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.putrequest(method, path, skip_host=True)
                for name, value in headers.items():
                    connection.putheader(name, value)
                connection.endheaders()
                codes.append(connection.getresponse().status)
                assert codes[-1] != 200 or path in ("/", "/state.json"), path
            except (http.client.HTTPException, OSError, UnicodeError):
                codes.append(0)
            finally:
                connection.close()
        right = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        right.request("GET", "/state.json")
        assert right.getresponse().status == 200
        server.shutdown()
    return sum(code != 200 for code in codes)
