"""A run folder: a lock, atomic files with manifests, metrics, and signals."""

from groupwise.rundir.files import (
    as_json,
    atomic_folder,
    from_json,
    json_bytes,
    read_json,
    verify_manifest,
    write_bytes,
    write_csv,
    write_json,
    write_safetensors,
)
from groupwise.rundir.metrics import MetricsFollower, metric_column, read_metrics
from groupwise.rundir.run import RunDir, new_run_path, package_versions
from groupwise.rundir.signals import (
    SignalInterrupt,
    StopRequest,
    end_with_parent,
    interrupt_on_signals,
    interrupts_ignored,
    stop_on_signals,
)

__all__ = [
    "MetricsFollower",
    "RunDir",
    "SignalInterrupt",
    "StopRequest",
    "as_json",
    "atomic_folder",
    "end_with_parent",
    "from_json",
    "interrupt_on_signals",
    "interrupts_ignored",
    "json_bytes",
    "metric_column",
    "new_run_path",
    "package_versions",
    "read_json",
    "read_metrics",
    "stop_on_signals",
    "verify_manifest",
    "write_bytes",
    "write_csv",
    "write_json",
    "write_safetensors",
]
