"""Executors: what runs a StepPlan. One interface, one driver, a backend per way to run."""
