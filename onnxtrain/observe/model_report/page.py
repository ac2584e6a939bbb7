"""Render the page with jinja2 (`pip install 'onnxtrain[report]'`)."""

from __future__ import annotations

from pathlib import Path

from onnxtrain.errors import OptionError
from onnxtrain.observe.model_report.values import ModelReport, counted


def render(report: ModelReport) -> str:
    """Render the page as self-contained HTML.

    Raises:
        OptionError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415  # an extra
    except ImportError as error:
        raise OptionError(
            "The page cannot be rendered.", "onnxtrain report", "jinja2", "it is not installed",
            todo="pip install 'onnxtrain[report]'",
        ) from error  # fmt: skip
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(report=report, counted=counted)
