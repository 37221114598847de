"""Where a step's time goes, read from a profiler's trace."""
