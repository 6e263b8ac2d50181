"""Helpers around the device: checkpoints, cloud files, TFRecords, cached data sets, sample generators."""
