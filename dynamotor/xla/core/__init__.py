"""`xla_model` and `functions`: the calls that training scripts make."""
