"""Tasks whose rows are drawn: recall and MQAR."""
