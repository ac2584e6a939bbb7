"""Log the initialization time of a module, to subtract it from the time of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from onnxtrain.log import LOG
from onnxtrain.observe.logs import DEVINFO
from onnxtrain.report import CompileReport


def log_initialisation(name: str, seconds: float, report: CompileReport, *, first: bool) -> None:
    """Log one line at INFO, and each stage at DEVINFO.

    Args:
        name: of the module.
        seconds: from the call until the graph could run.
        report: the times of the stages.
        first: whether it is the module's first graph.
    """
    if not LOG.isEnabledFor(logging.INFO):
        return
    capture = sum(stage.took_ms for stage in report.stages if stage.name == "capture") / 1e3
    task = "initialisation" if first else "a further graph"
    LOG.info("%s: %s took %.2f s, of which capture %.2f s", name, task, seconds, capture)
    for line in _decisions(report):
        LOG.info("%s: %s", name, line)
    if LOG.isEnabledFor(DEVINFO):
        LOG.log(DEVINFO, "%s:\n%s", name, "\n".join(_lines(report, seconds)))


# The passes that skip rows of padding or of ignored labels.
_SPARSITY = frozenset({"skip_ignored_labels", "pack_tokens"})


def _decisions(report: CompileReport) -> Iterator[str]:
    """The changes that the sparsity passes applied or refused, and what backward recomputes."""
    for stage in report.stages:
        for report_of_pass in stage.passes:
            if report_of_pass.name in _SPARSITY:
                yield from (f"{report_of_pass.name}: {text}" for text in report_of_pass.applied)
        for refusal in stage.refused:
            if refusal.pass_name in _SPARSITY:
                yield f"{refusal.pass_name} did not change {refusal.node}: {refusal.reason}"
        yield from (text for text in stage.applied if stage.name == "plan")


def _lines(report: CompileReport, seconds: float) -> Iterator[str]:
    for stage in report.stages:
        yield f"  {stage.name:<24}{stage.took_ms:9.1f} ms  {stage.nodes:6} nodes"
        for p in stage.passes:
            yield f"    {p.name:<22}{p.took_ms:9.1f} ms  {len(p.applied):6} changes, {len(p.refused)} refused"
    yield f"  {'checks, files, rest':<24}{seconds * 1e3 - report.took_ms:9.1f} ms"
