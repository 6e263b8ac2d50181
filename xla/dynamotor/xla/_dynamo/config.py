"""Settings of the bridge: `skip_input_data_check` is accepted, since calls look nothing up by tensor."""

skip_input_data_check = False
