"""Suites of training runs: a grid of cells, each run once, and the table and figures over seeds."""
