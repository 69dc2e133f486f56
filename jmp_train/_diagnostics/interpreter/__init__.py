"""Runs a traced program one equation at a time, on concrete values, and shows each equation to a watcher."""
