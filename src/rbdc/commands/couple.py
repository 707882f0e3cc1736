"""`rbdc couple`: two models of one's own into one twice as wide, and what the proof says of it."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Literal

from rbdc.commands.common import add_weight_files
from rbdc.commands.console import say
from rbdc.commands.options import Parser


def couple_parser() -> Parser:
    """Return the parser of `rbdc couple`."""
    parser = Parser(
        description="Couple two models of one architecture into one of twice the width, and prove "
        "that the coupling is exact.",
        epilog="rbdc couple runs/a runs/b --output runs/wide",
    )
    add = parser.add
    add("first", type=Path, help="exported folder, or weight file together with --model")
    add("second", type=Path, help="the same, trained from another seed")
    add("--output", type=Path, metavar="DIR", required=True,
        help="folder for the wide model, in its parents' format")  # fmt: skip
    add_weight_files(parser)
    add("--off-diagonal", type=Literal["zero", "random"], default="zero",
        help="blocks between the halves: zeros, or the layer's usual initialisation")  # fmt: skip
    add("--seed", type=int, default=0, help="seed of random off-diagonal blocks")
    add("--force", action="store_true", help="replace an exported model at --output")
    add("--allow-identical", action="store_true", help="allow a model to be coupled with itself")
    add("--allow-inexact", action="store_true", help="write the model even if the proof fails")
    add("--json", action="store_true", help="print the record as JSON")
    return parser


def couple_command(options: Namespace) -> None:
    """Couple two models, and print what the proof says."""
    from rbdc.models import couple_folders
    from rbdc.report.run import how_to_load

    names = ("model", "off_diagonal", "seed", "force", "allow_identical", "allow_inexact")
    record = couple_folders(
        options.first,
        options.second,
        options.output,
        arguments=options.model_kwargs,
        use_ema=not options.no_ema,
        **{name: getattr(options, name) for name in names},
    )
    if options.json:
        say(json.dumps(record, indent=2))
        return
    coupling = record["coupling"]
    error, drift = coupling["proof_error"], coupling["norm_drift"]
    for line in record.get("read", ()):
        say(f"read {line}")
    say(f"{options.output}: {record['spec']['name']} at width {record['spec']['width']:g}")
    for name, (before, after) in record.get("sizes", {}).items():
        say(f"  {name} {_size(before)} -> {_size(after)}")
    if options.off_diagonal == "zero" and not coupling["exact"]:
        say(f"inexact: even with norms per branch it is {error:.1e} off its parents' mean")
    elif options.off_diagonal == "zero":
        of = (
            "a small one of random weights"
            if coupling.get("proven_on") == "random weights"
            else "it"
        )
        say(f"proof: with norms per branch {of} is its parents' mean, to {error:.1e} of the logits")
    else:
        say(f"random off-diagonal blocks: {error:.1e} of the logits from its parents' mean")
    say(f"drift: joint normalisation moves its logits by {drift:.1e}")
    say(f"load it with {how_to_load(options.output, timm_loads=record['timm_loads'])}")
    if not coupling["class_names_compared"]:
        say("note: a parent carries no class list, so the order of classes was not compared")
    if not coupling.get("tokenizers_compared", True):
        say("note: a parent carries no tokenizer, so the numbers of tokens were not compared")


def _size(value: int | tuple[int, ...]) -> str:
    return f"{value:,}" if isinstance(value, int) else ", ".join(map(str, value))
