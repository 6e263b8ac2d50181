"""Tools for users: explain, lower, the report, the event stream, and the command
line.
"""
