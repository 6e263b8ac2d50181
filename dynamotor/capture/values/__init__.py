"""The value kinds of the interpreter; importing the package registers all of them."""
