"""The machine and the process: processor facts, files and cache folders, Python's garbage collector."""
