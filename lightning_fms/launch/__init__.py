"""Starts training runs from outside: groups of processes, and sweeps over jobs. Loads neither torch nor Lightning."""
