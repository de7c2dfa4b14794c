"""What each job type asks of the engine."""

from worker.tasks.run import JobReport, run

__all__ = ["JobReport", "run"]
