"""Settings, errors, events, logs, the disk cache and rule registries: what every room stands on."""
