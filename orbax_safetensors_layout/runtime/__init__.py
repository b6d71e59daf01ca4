"""Threads, memory and processes: task pools, budgets, process groups, progress."""
