"""Plain weights as quantised ones, group by group, while they are saved."""
