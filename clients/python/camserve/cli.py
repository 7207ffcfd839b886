"""The `camserve` command: explain photos with a server, and list its models, layers, methods and metrics.

Other programs can run these commands with a client of their own: see ``Connect``.
"""

from camserve.commands.diff import diff, run_diff
from camserve.commands.evaluate import evaluate, metrics
from camserve.commands.explain import explain
from camserve.commands.group import FAILED, INTERRUPTED, Command, Commands, main
from camserve.commands.inspect import features, inspect
from camserve.commands.jobs import job_spec, job_summary
from camserve.commands.models import health, layers, load, methods, models, unload
from camserve.commands.options import ACCESS_OPTIONS, Connect
from camserve.commands.replay import replay
from camserve.commands.ui import ui

__all__ = [
    "ACCESS_OPTIONS",
    "FAILED",
    "INTERRUPTED",
    "Command",
    "Commands",
    "Connect",
    "diff",
    "evaluate",
    "explain",
    "features",
    "health",
    "inspect",
    "job_spec",
    "job_summary",
    "layers",
    "load",
    "main",
    "methods",
    "metrics",
    "models",
    "replay",
    "run_diff",
    "ui",
    "unload",
]
