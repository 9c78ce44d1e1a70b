"""Displays for notebooks and terminals: tables, values and progress bars."""
