"""Builds the C++ program, makes artifacts, and trains them with it.

Usage: python -m examples.cpp [--steps N] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from examples.cpp.build import BuildError, build


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser("python -m examples.cpp", description="Trains artifacts in C++.")
    parser.add_argument("--steps", type=int, default=300, help="training steps (300)")
    parser.add_argument("--out", type=Path, default=Path("build/cpp"), help="the folder for all files (build/cpp)")
    options = parser.parse_args(arguments)
    try:
        program = build(options.out)
    except BuildError as error:
        sys.exit(str(error))
    artifacts = options.out / "artifacts"
    if not (artifacts / "digits.bin").exists():
        from examples.web.artifacts import make  # noqa: PLC0415  PyTorch is needed only to make them

        make(artifacts)
    command = [str(program), str(artifacts), str(options.steps), str(options.out / "trained.safetensors")]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        return ran.returncode
    result = json.loads(ran.stdout)
    losses, accuracy = result["losses"], result["accuracy"]
    print(f"{len(losses)} steps: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}.")
    print(f"It reads {accuracy:.1%} of the digits that it has not seen.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
