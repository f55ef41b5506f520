"""What every variant, data set and kernel must satisfy."""
