"""Builtins and library functions as small Python functions that the interpreter inlines."""
