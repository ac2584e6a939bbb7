"""Merge the statistics of two runs into files that a diff tool can compare.

    python -m onnxtrain.observe.hooks.merge_activation_summary --pt_dir pt --ort_dir ort --output_dir merged

writes `merged/merge_pt/step_0_.txt` and `merged/merge_ort/step_0_.txt`, and so on for each step that both runs have,
with the tensors in the order of the PyTorch run.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path


def merge(pt_dir: Path, ort_dir: Path, output_dir: Path, *, overwrite: bool = False) -> int:
    """Write the files and return the number of steps.

    Raises:
        FileNotFoundError: the folder of a run does not exist.
        FileExistsError: `output_dir` exists, and `overwrite` is False.
        ValueError: the runs have no step in common.
    """
    steps = [{p.name for p in folder.iterdir() if (p / "order.txt").exists()} for folder in (pt_dir, ort_dir)]
    common = sorted(steps[0] & steps[1], key=lambda name: int(name.removeprefix("step_")))
    if not common:
        raise ValueError(f"{pt_dir} and {ort_dir} have no step in common: were both written by StatisticsSubscriber?")
    if output_dir.exists():
        if not overwrite:
            raise FileExistsError(f"{output_dir} exists already: pass another --output_dir, or --overwrite.")
        shutil.rmtree(output_dir)
    for step in common:
        order = (pt_dir / step / "order.txt").read_text(encoding="utf-8").split("\n")
        names = [
            f"{name}_{direction}" for direction in ("forward", "backward") for name in dict.fromkeys(order) if name
        ]
        for run, folder in (("merge_pt", pt_dir), ("merge_ort", ort_dir)):
            target = output_dir / run / f"{step}_.txt"
            target.parent.mkdir(parents=True, exist_ok=True)
            files = [folder / step / name for name in names if (pt_dir / step / name).exists()]
            parts = [f.read_text(encoding="utf-8") if f.exists() else f"{f.name}: missing\n" for f in files]
            target.write_text("\n".join(parts), encoding="utf-8")
    return len(common)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description="Merge the activation statistics of two runs for comparison.")
    parser.add_argument("--pt_dir", type=Path, required=True, help="the folder of the PyTorch run")
    parser.add_argument("--ort_dir", type=Path, required=True, help="the folder of the ORTModule run")
    parser.add_argument("--output_dir", type=Path, required=True, help="the folder for the merged files")
    parser.add_argument("--overwrite", action="store_true", help="empty output_dir first")
    arguments = parser.parse_args(argv)
    try:
        merge(arguments.pt_dir, arguments.ort_dir, arguments.output_dir, overwrite=arguments.overwrite)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
