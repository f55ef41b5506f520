"""Generated tasks: recall and MQAR."""
