"""What `fms-plan` does with a config: probes, times, measures, and writes a plan; the pure parts are in `planner`."""
