"""Train a class of models in a process of its own: a crash or a hang is an outcome, and no state is shared."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch

from tests.model_sweep.catalog import Entry
from tests.model_sweep.small_configs import LAYERS, set_layers
from tests.model_sweep.training import Outcome, trained

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__, "diffusers"])  # each process is forked with all imports done


def isolated(entry: Entry, limit_s: float, layers: int = LAYERS) -> Outcome:
    """The outcome of a class with this number of layers, trained in a process of its own."""
    connection, theirs = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_serve, args=(theirs, entry, layers), daemon=True)
    process.start()
    theirs.close()
    try:
        if not connection.poll(limit_s):
            return Outcome(entry, "hang", f"more than {limit_s:.0f} s")
        outcome: Outcome = connection.recv()
        return outcome
    except EOFError:
        process.join()
        return Outcome(entry, "crash", f"the process ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        connection.close()


def _serve(connection: Connection, entry: Entry, layers: int) -> None:
    torch.set_num_threads(1)
    set_layers(layers)
    connection.send(trained(entry))
