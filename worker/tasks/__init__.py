"""What each job type asks of the engine."""

from worker.tasks.run import OutputReport, run

__all__ = ["OutputReport", "run"]
