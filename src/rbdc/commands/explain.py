"""`rbdc explain`: how a model couples, how exactly, and why not."""

import json
from argparse import Namespace
from pathlib import Path

from rbdc.commands.common import check_picture
from rbdc.commands.console import say, show
from rbdc.commands.options import Parser


def explain_parser() -> Parser:
    """Return the parser of `rbdc explain`."""
    parser = Parser(
        description="Explain how a model couples from two of half its width: which rule applies to "
        "which tensors, what mixes the halves, and how exact it is, measured on random weights.",
        epilog="rbdc explain convnext_atto",
    )
    add = parser.add
    add("model", help="timm name of the wide model, or torchvision:NAME")
    add("--width", type=float, default=1.0, help="fraction of its full width")
    add("--model-kwargs", type=dict, default={},
        help="arguments of the full-width model, such as depth=6 img_size=64")  # fmt: skip
    add("--tensors", action="store_true", help="print every tensor, not one example per rule")
    add("--plot", type=Path, metavar="FILE", help="also draw it (.png, .svg or .pdf)")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def explain_command(options: Namespace) -> None:
    """Print how a model couples."""
    from rich.table import Table

    from rbdc.models import as_spec, shapes_of
    from rbdc.models.explain import explain
    from rbdc.report.figures import save_figure
    from rbdc.report.structure import draw_structure

    if options.plot:
        check_picture(options.plot)
    found = explain(as_spec(options.model, options.width, **options.model_kwargs))
    if options.plot:
        shapes = {name: tuple(t.shape) for name, t in shapes_of(found.spec).items()}
        save_figure(draw_structure(found.groups, found.structure.layout, shapes), options.plot)
    if options.json:
        say(json.dumps(found.to_json(), indent=2))
        return
    structure, proof = found.structure, found.proof
    say(f"{found.spec}: halved {found.halved}")
    table = Table("rule", "tensors", "of them" if options.tensors else "for example", box=None)
    for rule, names in found.groups.items():
        table.add_row(rule, str(len(names)), "\n".join(names if options.tensors else names[:1]))
    show(table)
    if structure.joint:
        first, count = next(iter(structure.joint)), len(structure.joint)
        say(f"{count} modules mix the halves, as {first}; the proof runs each per half")
    if structure.unused:
        say(f"{len(structure.unused)} tensors are not used, as {structure.unused[0]}")
    for what, cause in list(structure.inexact.items())[: None if options.tensors else 5]:
        say(f"inexact: {what}: {cause}")
    if not options.tensors and len(structure.inexact) > 5:
        say(f"inexact: {len(structure.inexact) - 5} more (--tensors prints all)")
    word = "exact" if proof.holds else "not exact"
    say(
        f"{word}: random parents give an error of {proof.error:.0e}, and {proof.drift:.0e} of drift"
    )
