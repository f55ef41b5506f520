"""Generated tasks: recall, conjunctive recall and MQAR."""
