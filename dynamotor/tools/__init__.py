"""What people look through and what they start: explain, lower, the report, the event stream, and the command
line.
"""
