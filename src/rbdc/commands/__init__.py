"""The commands, a file each or a few that belong together: what can be said, and what is done.

What needs torch is imported when a command runs, so that --help answers at once.
"""
