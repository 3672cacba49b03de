"""Measurements behind ``shadowmask bench``: every figure is a ratio of two things run one after the other.

``workload`` makes model, prompts and settings, ``cases`` measures one thing in its own process and prints
JSON, ``commands/bench`` runs the processes in turn and tabulates.
"""
