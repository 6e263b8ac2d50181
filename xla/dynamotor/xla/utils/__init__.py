"""Helpers around the device: checkpoints, cloud files, TFRecords, cached data sets, sample generators."""

from . import cached_dataset, gcsfs, serialization, tf_record_reader, utils

__all__ = ["cached_dataset", "gcsfs", "serialization", "tf_record_reader", "utils"]
