"""Functions by which a launcher of your own reports processes that have ended; docs/launching.md has an example."""

from ps_worker.cluster.launcher_reports import report_shard_end, report_worker_end

__all__ = ["report_shard_end", "report_worker_end"]
