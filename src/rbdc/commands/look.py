"""`rbdc status`, `report`, `doctor` and `export`: what became of a run. They train nothing."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rbdc.commands.console import make_console, say, show
from rbdc.commands.options import Parser
from rbdc.errors import RbdcError

MOST_ROWS = 200  # of a table of jobs; --json has all


def status_parser() -> Parser:
    """Return the parser of `rbdc status`."""
    parser = Parser(description="Show how far a run is.", epilog="rbdc status runs/demo")
    add = parser.add
    add("run", type=Path, help="folder of the run")
    add("--watch", action="store_true", help="update the display until the run ends, or Ctrl-C")
    add("--every", type=float, metavar="SECONDS",
        help="with --watch: seconds between updates (default 2)")  # fmt: skip
    add("--json", action="store_true", help="print JSON; with --watch, one line per change")
    return parser


def status_command(options: Namespace) -> None:
    """Print how far a run is."""
    if options.watch:
        from rbdc.report.watch import watch_run

        every = 2.0 if options.every is None else options.every
        watch_run(options.run, make_console(), every=every, as_json=options.json)
        return
    if options.every is not None:
        raise RbdcError("--every was given without --watch", "Add --watch, or leave it out.")
    from rbdc.report.run import run_status, status_table

    status = run_status(options.run)
    if options.json:
        say(json.dumps(status, indent=2))
    else:
        show(status_table(status, MOST_ROWS))


def report_parser() -> Parser:
    """Return the parser of `rbdc report`."""
    parser = Parser(
        description="Write runs, comparisons and transfers as one self-contained page: the tree, "
        "the budget, learning curves, tables, weights, pictures, and how to repeat it.",
        epilog="rbdc report runs/demo",
    )
    add = parser.add
    add("runs", type=Path, nargs="+", help="folders of runs, comparisons or transfers")
    add("--output", type=Path, metavar="FILE",
        help="the page (default: report.html in the first folder)")  # fmt: skip
    add("--figures", type=Path, metavar="DIR", help="folder for figures as PNG, SVG and PDF files")
    add("--serve", action="store_true",
        help="serve the page at 127.0.0.1 and update it, instead of writing it")  # fmt: skip
    add("--port", type=int, default=0, help="with --serve: port; 0 takes any free one")
    return parser


def report_command(options: Namespace) -> None:
    """Write or serve the page of runs."""
    from rbdc.report.page import REPORT, write_report
    from rbdc.report.paper import save_figures

    folders = list(dict.fromkeys(options.runs))
    if options.serve:
        _serve(folders, options.port)
        return
    if options.figures:
        for path in save_figures(folders, options.figures):
            say(f"figure {path}")
    say(f"page {write_report(folders, options.output or folders[0] / REPORT)}")


def _serve(folders: Sequence[Path], port: int) -> None:
    from rbdc.report.page import read_state
    from rbdc.report.serve import make_server

    read_state(folders)  # a mistake is said here
    with make_server(folders, port) as server:
        say(f"http://{server.server_address[0]!s}:{server.server_address[1]}  (Ctrl-C ends it)")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.serve_forever()


def doctor_parser() -> Parser:
    """Return the parser of `rbdc doctor`."""
    parser = Parser(
        description="Verify every checksum of a run, and say what is damaged and what that costs.",
        epilog="rbdc doctor runs/demo",
    )
    add = parser.add
    add("run", type=Path, help="folder of the run")
    add("--repair", action="store_true",
        help="remove what is damaged, so that the run's command computes it again")  # fmt: skip
    return parser


def doctor_command(options: Namespace) -> None:
    """Print what is damaged in a run, and remove it if asked to."""
    from rbdc.report.units import counted
    from rbdc.runs.doctor import find_damage, repair

    found = repair(options.run) if options.repair else find_damage(options.run)
    for damage in found:
        say(f"{damage.problem}\n  {damage.remove} is removed by --repair")
        say(f"  computed again: {damage.cost}")
    if not found:
        say(f"{options.run}: nothing is damaged")
    elif options.repair:
        say(f"{counted(len(found), 'thing')} removed; give the run's command again")
    else:
        raise RbdcError(
            f"{options.run}: {counted(len(found), 'thing')} damaged or missing",
            "rbdc doctor RUN --repair removes them; the run's command then computes them again.",
        )


def export_parser() -> Parser:
    """Return the parser of `rbdc export`."""
    parser = Parser(
        description="Write the model of a finished run as a folder for a model hub: weights that "
        "timm loads, a model card, figures, and the settings to repeat it with.",
        epilog="rbdc export runs/demo --output demo-model",
    )
    add = parser.add
    add("run", type=Path, help="folder of the run")
    add("--output", type=Path, metavar="DIR", required=True, help="folder to write")
    add("--license", metavar="NAME",
        help="license of the model, by Hugging Face's name (default: none is stated)")  # fmt: skip
    add("--force", action="store_true", help="replace an earlier export at --output")
    return parser


def export_command(options: Namespace) -> None:
    """Write a finished run's model with its card."""
    from rbdc.report.card import export_lines, export_run

    export_run(options.run, options.output, license=options.license, force=options.force)
    say("\n".join(export_lines(options.run, options.output)))
