"""A run folder: a lock, atomic files with manifests, metrics, and signals."""

from groupwise.rundir.files import (
    as_json,
    atomic_folder,
    encode_json,
    from_json,
    read_json,
    verify_manifest,
    write_bytes,
    write_csv,
    write_json,
    write_safetensors,
)
from groupwise.rundir.metrics import metric_column, read_metrics
from groupwise.rundir.run import RunDir, new_run_path, package_versions
from groupwise.rundir.signals import StopRequest, end_with_parent, interrupts_ignored, stop_on_signals

__all__ = [
    "RunDir",
    "StopRequest",
    "as_json",
    "atomic_folder",
    "encode_json",
    "end_with_parent",
    "from_json",
    "interrupts_ignored",
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
