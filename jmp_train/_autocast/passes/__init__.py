"""The passes of autocast, one file each; `planner.py` lists them in their order."""
