"""`onnxtrain plan-scale MODEL`: the memory and the communication of a training step under FSDP2 on many ranks.

FSDP2 runs on fake tensors, as rank 0 of a process group that exchanges nothing: nothing is allocated or sent.
"""

from __future__ import annotations

import argparse
import os
import re
import sys

import torch
from rich.console import Console
from rich.table import Table

from onnxtrain.cli.argument_types import new_file, positive
from onnxtrain.cli.model import LoadedModel, load_model, loss_of, model_arguments
from onnxtrain.cli.page import write_page
from onnxtrain.distributed.scale_plan import Machine, Plan, Sharding, adam_state, record_fake_step, simulate
from onnxtrain.distributed.step_recorder import COLLECTIVES
from onnxtrain.errors import OptionError
from onnxtrain.observe.memory_page import Chart, Tile, render
from onnxtrain.observe.memory_timeline import BANDS, as_bytes

_WIDTH = 150  # of tables, if the output is not a terminal
_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    model_arguments(parser)
    parser.add_argument("--world", type=positive, required=True, metavar="RANKS", help="the number of ranks")
    parser.add_argument(
        "--shard",
        type=_sharding,
        metavar="[REPLICAS]x[SHARDS]",
        help="8x128: 8 replicas of 128 shards (HSDP); 1024: 1024 shards (default: all ranks)",
    )
    parser.add_argument(
        "--link", type=_link, default="400Gb", metavar="RATE", help="the bandwidth of a rank's link (default: 400Gb)"
    )
    parser.add_argument(
        "--tflops",
        type=positive,
        default=400,
        metavar="N",
        help="the throughput of a rank, in 10¹² floating-point operations per second (default: 400)",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="bfloat16", help="the dtype of gathered parameters (default: bfloat16)"
    )
    parser.add_argument("--checkpoint", action="store_true", help="recompute each block in backward")
    parser.add_argument("--html", type=new_file, metavar="FILE", help="write the timeline to an HTML page")


def _sharding(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
    if match is None or "0" in match.groups():
        raise argparse.ArgumentTypeError(f"expected REPLICASxSHARDS, such as 8x128, got {text}")
    return int(match[1] or 1), int(match[2])


def _link(text: str) -> float:
    """Parse a rate such as 400Gb or 50GB, and return bytes per second."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)([bB])(?:/s|ps)?", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"expected bits or bytes per second, such as 400Gb or 50GB, got {text}")
    return float(match[1]) * _PREFIXES[match[2]] / (8 if match[3] == "b" else 1)


def run(options: argparse.Namespace) -> int:
    """Print the plan; write the page if asked to."""
    replicas, shards = options.shard or (1, options.world)
    if replicas * shards != options.world:
        raise OptionError(
            "--shard does not divide the ranks.",
            expected=f"REPLICASxSHARDS with a product of {options.world}",
            got=f"{replicas}x{shards}",
            todo="change --shard or --world",
        )
    with torch.device("meta"):
        loaded = load_model(options.model, batch=options.batch, length=options.length)
    sharding = Sharding(replicas, shards, _DTYPES[options.dtype], options.checkpoint)
    plan = _planned(loaded, sharding, Machine(options.tflops * 1e12, options.link))
    console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH)
    about = f"{loaded.name} on {options.world} ranks: {replicas} × {shards} shards, gathered in {options.dtype}"
    console.print(about, highlight=False)
    console.print(_memory(plan))
    console.print(_communication(plan))
    console.print(_times(plan))
    if options.html is not None:
        tiles = [Tile(as_bytes(plan.timeline.peak.total), "peak of rank 0"), *(Tile(*t) for t in _figures(plan))]
        caption = "Temporary memory is that of gathered parameters and of communication."
        title = f"Plan of {loaded.name}"
        write_page(options.html, render(title, f"{about}.", tiles, [Chart(plan.timeline, caption)], []))
    return 0


def _planned(loaded: LoadedModel, sharding: Sharding, machine: Machine) -> Plan:
    # A mask is all ones in sequences of full length, and attention that reads its elements cannot run without them.
    kwargs = {name: value for name, value in loaded.kwargs.items() if name != "attention_mask"}
    events = record_fake_step(
        loaded.module,
        lambda inputs: loss_of(loaded.module(*inputs[0], **inputs[1])),
        (loaded.args, kwargs),
        sharding,
    )
    return simulate(events, machine, adam_state(events))


def _table(title: str, *columns: str) -> Table:
    result = Table(header_style="bold", title=title, title_justify="left")
    for number, name in enumerate(columns):
        result.add_column(name, justify="right" if number else "left")
    return result


def _memory(plan: Plan) -> Table:
    peak = plan.timeline.peak
    result = _table(f"peak of rank 0, {peak.doing}", "category", "bytes")
    for name, size in zip(BANDS, peak.bytes_by_band, strict=True):
        result.add_row(name, as_bytes(size))
    result.add_row("total", as_bytes(peak.total), style="bold")
    return result


def _communication(plan: Plan) -> Table:
    result = _table("collectives of rank 0 in a step", "kind", "count", "bytes", "sent by a rank")
    for kind in COLLECTIVES:
        events = plan.collectives(kind)
        sizes = as_bytes(sum(e.bytes for e in events)), as_bytes(sum(e.sent for e in events))
        result.add_row(kind, str(len(events)), *sizes)
    return result


def _figures(plan: Plan) -> list[tuple[str, str]]:
    hidden = 1 - plan.exposed / plan.communication if plan.communication else 1.0
    return [
        (f"{plan.step * 1e3:,.0f} ms", "a step"),
        (f"{plan.compute * 1e3:,.0f} ms", "computation"),
        (f"{plan.communication * 1e3:,.0f} ms", "communication"),
        (f"{plan.exposed * 1e3:,.0f} ms", "exposed communication"),
        (f"{hidden:.0%}", "of communication overlapped"),
    ]


def _times(plan: Plan) -> Table:
    result = _table("estimated times", "", "time")
    for value, name in _figures(plan):
        result.add_row(name, value)
    return result
